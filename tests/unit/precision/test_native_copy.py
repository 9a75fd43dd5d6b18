"""A deep copy of a converted model (an EMA of its weights, a teacher) follows the original and sets no scales."""

from __future__ import annotations

import copy

import pytest
import torch
from native_support import APPLY, SKIP, backend_for, same, window
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from harness.precision.backends.native import NativeBackend


def converted() -> tuple[nn.Sequential, NativeBackend, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    backend = backend_for(model)
    x = torch.randn(16, 32)
    window(backend, model, x)
    return model, backend, x


def test_a_copy_has_its_own_weights_and_computes_with_live_scales() -> None:
    model, backend, x = converted()
    twin = copy.deepcopy(model)
    assert not {p.data_ptr() for p in twin.parameters()} & {
        p.data_ptr() for p in model.parameters()
    }
    assert list(twin.state_dict()) == list(model.state_dict())
    window(backend, model, 3 * x)
    for demoted in ([], ["00"]):
        backend.switch(demoted, [])
        with torch.no_grad(), backend.context():
            assert torch.equal(twin(x), model(x)), (
                "scales and demotion of now, not of when the copy was made"
            )
    with torch.no_grad():
        plain = twin(x)
    assert plain.dtype == torch.float32, "outside of a context it is a plain Linear"


def test_gradients_flow_through_a_copy_and_leave_no_trace() -> None:
    model, backend, x = converted()
    twin = copy.deepcopy(model)
    backend.begin_window(sample=True)
    staged = backend.amax(), backend.slot_buffers.sums.clone()
    inputs = (100 * x).requires_grad_()
    with backend.context():
        loss = twin(inputs).float().square().sum()
    with backend.backward_context():
        loss.backward()
    assert inputs.grad is not None
    assert inputs.grad.abs().sum() > 0
    assert torch.equal(backend.amax(), staged[0])
    assert torch.equal(backend.slot_buffers.sums, staged[1])
    backend.end_window(backend.amax(), APPLY, same)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_copy_of_a_compiled_model_is_not_compiled_and_has_its_weights() -> None:
    model, backend, x = converted()
    model.compile(backend="aot_eager", fullgraph=True)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    with torch.no_grad(), backend.context():
        ours, theirs = model(x), twin(x)
        twin.compile(backend="aot_eager", fullgraph=True)
        assert torch.equal(twin(x), theirs)
        assert torch.equal(model(x), ours)
    assert not torch.equal(ours, theirs)


def test_an_ema_is_evaluated_in_fp8_with_its_weights_of_now() -> None:
    model, backend, x = converted()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    outs = []
    for _ in range(3):
        window(backend, model, x)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        ema.update_parameters(model)
        fresh = copy.deepcopy(model)
        fresh.load_state_dict(ema.module.state_dict())
        with torch.no_grad(), backend.context():
            outs.append(ema(x))
            assert torch.equal(outs[-1], fresh(x))
    assert not torch.equal(outs[0], outs[1])


def test_weights_swapped_between_two_evaluations_are_seen() -> None:
    model, backend, x = converted()
    backend.begin_window(sample=False)
    with backend.context():
        model(x)  # a training forward quantises the weights for the rest of its window
    with torch.no_grad(), backend.context():
        before = model(x)
        for linear in model:
            linear.get_parameter("weight").data.mul_(2)  # as EMA swaps do: no version counter moves
        assert not torch.equal(model(x), before)


@pytest.mark.parametrize("units", [True, False])
def test_a_layer_that_no_training_step_has_measured_runs_in_bf16(units: bool) -> None:
    """A frozen teacher under no_grad: nothing ever sets its scales, and at scale 1 its small weights would vanish."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"teacher": nn.Linear(32, 32), "student": nn.Linear(32, 32)})
    with torch.no_grad():
        model.get_parameter("teacher.weight").mul_(2.0**-9)
    teacher = copy.deepcopy(model["teacher"])
    backend = backend_for(model, fp8_units=units)
    student = model["student"]
    x = torch.randn(16, 32)
    seen: list[Tensor] = []

    class Pair(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                seen.append(model["teacher"](x))
            return student(x)

    def evaluated(layer: nn.Module) -> Tensor:
        with torch.no_grad(), backend.context():
            return layer(x)

    in_bf16 = evaluated(teacher)
    model.eval()
    before = evaluated(student)
    assert torch.equal(evaluated(model["teacher"]), in_bf16), "before the first step"
    model.train()
    for _ in range(2):
        window(backend, Pair(), x)
    assert not torch.equal(seen[0], in_bf16), "in train mode it may be a reentrant checkpoint's"
    assert torch.equal(seen[1], in_bf16), "from the second step on"
    model.eval()
    assert backend.slot_buffers.scale[0] == 1.0, "it leaves no trace"
    assert not torch.equal(evaluated(student), before), "the student has scales now"

    tensors, meta = backend.state_dict()
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    backend.load_state_dict({}, {**meta, "slots": []})
    assert torch.equal(evaluated(student), before), "as in a run that loads no FP8 state"
    backend.load_state_dict(kept, meta)
    assert not torch.equal(evaluated(student), before)


def test_a_skipped_first_step_sets_no_scale() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32)).eval()
    backend = backend_for(model)
    x = torch.randn(16, 32)
    with torch.no_grad(), backend.context():
        before = model(x)
    window(backend, model, x, SKIP)
    with torch.no_grad(), backend.context():
        assert torch.equal(model(x), before)
