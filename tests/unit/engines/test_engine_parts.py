"""Model and optimizer state by name: bit-exact resume, identity kept, differences named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.core.config import TrainConfig
from harness.core.errors import CheckpointError
from harness.engines.torch_engine import TorchEngine
from harness.optim.optimizers import build_optimizer
from harness.optim.schedule import Schedule
from tests.support.updates import finish

CPU = torch.device("cpu")
Saved = dict[str, tuple[dict[str, Tensor], dict[str, Any]]]


class Net(nn.Module):
    def __init__(self, hidden: int = 5, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.head = nn.Linear(hidden, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def get_extra_state(self) -> bytes:
        return b"pickled"

    def set_extra_state(self, state: bytes) -> None:
        raise AssertionError("extra state is not ours to load")

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.norm(self.embed(ids))), ids)


BUILDERS = {
    "adamw": lambda model: build_optimizer(model, TrainConfig.model_validate({}), CPU),
    "sgd": lambda model: build_optimizer(
        model, TrainConfig.model_validate({"optimizer": "sgd"}), CPU
    ),
    "lazy sgd": lambda model: torch.optim.SGD(model.parameters(), momentum=0.9),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
}


def make(optimizer: str = "adamw", seed: int = 0, **model: Any) -> TorchEngine:
    torch.manual_seed(seed)
    net = Net(**model)
    return TorchEngine(net, BUILDERS[optimizer](net), Schedule(0.1, 2, 20, 0.1), 1.0, device=CPU)


def train(engine: TorchEngine, steps: range) -> None:
    for step in steps:
        ids = torch.randint(7, (6,), generator=torch.Generator().manual_seed(step))
        engine.backward(engine.module(ids))
        finish(engine)


def save(engine: TorchEngine) -> Saved:
    saved: Saved = {}
    for name, part in engine.parts().items():
        tensors, meta = part.state_dict()
        saved[name] = ({key: tensor.clone() for key, tensor in tensors.items()}, meta)
    return saved


def load(engine: TorchEngine, saved: Saved) -> None:
    for name, part in engine.parts().items():
        part.load_state_dict(*saved[name])


def test_layout() -> None:
    engine = make()
    train(engine, range(2))
    saved = save(engine)
    model, meta = saved["model"]
    assert set(model) == {
        "embed.weight",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert meta == {"tied": {"head.weight": "embed.weight"}}
    states = {
        f"{name}.{key}"
        for name in ("embed.weight", "norm.weight", "norm.bias")
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert set(saved["optimizer"][0]) == {"applied", *states}
    assert saved["optimizer"][0]["applied"].item() == 2.0


@pytest.mark.parametrize("optimizer", BUILDERS)
@pytest.mark.parametrize("live", [False, True])
def test_a_restored_engine_continues_bit_identically(optimizer: str, live: bool) -> None:
    first = make(optimizer)
    train(first, range(3))
    saved = save(first)
    train(first, range(3, 6))
    second = make(optimizer, seed=9)
    if live:
        train(second, range(10, 12))
    owned = [id(param) for param in second.module.parameters()]
    load(second, saved)
    restored = save(second)
    for part in saved:
        assert restored[part][0].keys() == saved[part][0].keys()
        assert all(
            torch.equal(restored[part][0][key], saved[part][0][key]) for key in saved[part][0]
        )
    train(second, range(3, 6))
    end, expected = save(second), save(first)
    assert all(
        torch.equal(end[part][0][key], expected[part][0][key])
        for part in end
        for key in end[part][0]
    )
    assert not torch.equal(end["model"][0]["embed.weight"], saved["model"][0]["embed.weight"])
    assert owned == [id(param) for param in second.module.parameters()]


def test_a_saved_state_does_not_alias_what_was_loaded() -> None:
    engine = make("lazy sgd")
    train(engine, range(2))
    saved = save(engine)
    kept = {key: tensor.clone() for key, tensor in saved["optimizer"][0].items()}
    other = make("lazy sgd")
    load(other, saved)
    train(other, range(2, 4))
    assert all(torch.equal(saved["optimizer"][0][key], kept[key]) for key in kept)


def test_differences_are_named() -> None:
    saved = save(make())
    with pytest.raises(
        CheckpointError,
        match=r"embed\.weight is .*\[7, 5\] in the checkpoint, .*\[7, 4\] in the run",
    ):
        load(make(hidden=4), saved)
    with pytest.raises(CheckpointError, match="tied parameters differ"):
        load(make(tied=False), saved)
    with pytest.raises(CheckpointError, match="written by AdamW, this run has SGD"):
        make("sgd").parts()["optimizer"].load_state_dict(*saved["optimizer"])


@pytest.mark.parametrize(
    ("part", "lost"),
    [("model", "norm.bias"), ("model", "norm.running_var"), ("optimizer", "applied")],
)
@pytest.mark.parametrize("broken", ["stranger", "lost"])
def test_a_stranger_or_a_loss_is_named_and_nothing_is_changed(
    part: str, lost: str, broken: str
) -> None:
    engine = make()
    train(engine, range(1))
    tensors, meta = save(engine)[part]
    if broken == "stranger":
        tensors["nobody.weight"] = torch.zeros(1)
    else:
        del tensors[lost]
    target = make(seed=5)
    before = save(target)
    with pytest.raises(CheckpointError, match=r"nobody\.weight" if broken == "stranger" else lost):
        target.parts()[part].load_state_dict(tensors, meta)
    after = save(target)
    assert all(torch.equal(after[part][0][key], before[part][0][key]) for key in before[part][0])


def test_another_dtype_is_refused_rather_than_converted() -> None:
    saved = save(make())
    tensors = {
        key: value.bfloat16() if value.is_floating_point() else value
        for key, value in saved["model"][0].items()
    }
    with pytest.raises(CheckpointError, match=r"torch\.bfloat16"):
        make().parts()["model"].load_state_dict(tensors, saved["model"][1])
