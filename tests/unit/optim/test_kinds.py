"""Every optimizer that a run can name: gated, restored bit for bit, of the size reserved for it, or refused by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from harness.core.config import TrainConfig
from harness.core.errors import CheckpointError, ConfigError
from harness.core.facts import Limits
from harness.core.state import ExternalState
from harness.core.update import takes_found_inf
from harness.engines.torch_engine import TorchEngine
from harness.optim.optimizers import (
    MuonAdamW,
    build_optimizer,
    optimizer_bytes,
    refused_by,
    waits_for,
)
from harness.optim.schedule import Schedule, too_high
from tests.support.updates import finish

CPU = torch.device("cpu")
OWN = """
import torch
from torch.testing._internal.two_tensor import TwoTensor

class Counting(torch.optim.Optimizer):
    '''SGD whose rate is divided by what it counts: in its state, its groups and itself.'''

    def __init__(self, params, lr, weight_decay=0.0, power=1.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "power": power, "seen": 0})
        self.total = 0

    def step(self, closure=None):
        self.total += 1
        for group in self.param_groups:
            group["seen"] += 1
            for param in group["params"]:
                state = self.state[param]
                state["calls"] = state.get("calls", 0) + 1
                state["sum"] = state.get("sum", torch.zeros_like(param)) + param.grad
                by = (self.total + group["seen"] + state["calls"]) ** group["power"]
                param.data.mul_(1 - group["lr"] * group["weight_decay"]).sub_(state["sum"], alpha=group["lr"] / by)

class NoDecay(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad, alpha=group["lr"])

class Liar(NoDecay):
    _step_supports_amp_scaling = True

class Listing(NoDecay):
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["past"] = [param.grad]

class Paired(NoDecay):
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["pair"] = TwoTensor(param.detach().clone(), param.detach().clone())

class Closing(NoDecay):
    def step(self, closure):
        pass

class Failing(NoDecay):
    def step(self):
        raise RuntimeError("no kernel")

class Kept(torch.optim.Optimizer):
    def __init__(self, params, weight_decay=0.0):
        super().__init__(params, {"weight_decay": weight_decay})

NotOne = 3
"""


@pytest.fixture(scope="module", autouse=True)
def own(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_optimizers.py").write_text(OWN)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    sys.modules.pop("own_optimizers", None)


class Net(nn.Module):
    """Matrices of 4096 elements and more are quantised by torchao, `odd` is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 64)
        self.hidden = nn.Linear(64, 128)
        self.odd = nn.Linear(128, 5, bias=False)
        self.back = nn.Linear(5, 64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 128, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.back(self.odd(torch.relu(self.hidden(self.embed(ids)))))
        return nn.functional.cross_entropy(self.head(self.norm(x)), ids)


KINDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw amsgrad": {"optimizer": "adamw", "optimizer_args": {"amsgrad": True}},
    "sgd": {},
    "adamw8bit": {},
    "adamw_fp8": {},
    "muon": {},
    "own_optimizers:Counting": {"optimizer_args": {"power": 0.5}},
    "torch.optim:Adagrad": {"optimizer_args": {"fused": True}, "betas": (0.9, 0.95)},
    "torch.optim:RMSprop": {"weight_decay": 0.0},
}
LIVE = pytest.mark.parametrize("live", [False, True], ids=["fresh", "live"])
EVERY = pytest.mark.parametrize("name", KINDS)


def config(name: str, **more: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {"optimizer": name, "lr": 0.01, **KINDS.get(name, {}), **more}
    )


def make(name: str, seed: int = 0) -> TorchEngine:
    torch.manual_seed(seed)
    net = Net()
    train = config(name)
    return TorchEngine(
        net, build_optimizer(net, train, CPU), Schedule(0.01, 2, 20, 0.1), 1.0, device=CPU
    )


def train(engine: TorchEngine, steps: range, **settings: Any) -> dict[str, Tensor]:
    figures: dict[str, Tensor] = {}
    for step in steps:
        ids = torch.randint(128, (32,), generator=torch.Generator().manual_seed(step))
        engine.backward(engine.module(ids))
        figures = finish(engine, **settings)
    return figures


def save(engine: TorchEngine) -> dict[str, Any]:
    saved: dict[str, Any] = {}
    for name, part in engine.parts().items():
        tensors, meta = part.state_dict()
        saved[name] = ({key: tensor.clone() for key, tensor in tensors.items()}, meta)
    return saved


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(
        a[part][1] == b[part][1]
        and a[part][0].keys() == b[part][0].keys()
        and all(torch.equal(a[part][0][key], b[part][0][key]) for key in a[part][0])
        for part in a
    )


@EVERY
@LIVE
def test_a_restored_run_continues_bit_identically(name: str, live: bool) -> None:
    first = make(name)
    train(first, range(3))
    middle = save(first)
    assert all(type(tensor) is Tensor for tensor in middle["optimizer"][0].values()), (
        "files hold plain tensors"
    )
    train(first, range(3, 6))
    second = make(name, seed=9)
    if live:
        train(second, range(10, 15))
    for part, state in second.parts().items():
        state.load_state_dict(*middle[part])
    assert same(save(second), middle)
    train(second, range(3, 6))
    assert same(save(second), save(first))
    assert not same(save(second), middle)


@EVERY
def test_a_gated_step_leaves_everything_as_it_was(name: str) -> None:
    engine = make(name)
    train(engine, range(2))
    before = save(engine)
    assert train(engine, range(2, 3), limits=Limits(loss=0.5))["applied"] == 0.0
    assert same(save(engine), before)
    assert train(engine, range(3, 4))["applied"] == 1.0
    assert not same(save(engine), before)


@EVERY
def test_the_size_that_is_reserved_is_the_states(name: str) -> None:
    engine = make(name)
    train(engine, range(1))
    tensors, _ = engine.parts()["optimizer"].state_dict()
    held = {key: tensor for key, tensor in tensors.items() if tensor.ndim > 0}
    size = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
    assert optimizer_bytes(Net(), config(name)) == pytest.approx(
        size, rel=0 if ":" not in name else 0.01
    )


@pytest.mark.parametrize("momentum", [{"betas": (0.0, 0.9)}, {"optimizer_args": {"momentum": 0.0}}])
def test_sgd_without_momentum_keeps_no_state(momentum: dict[str, Any]) -> None:
    plain = config("sgd", **momentum)
    optimizer = build_optimizer(Net(), plain, CPU)
    held = [each for state in optimizer.state.values() for each in state.values()]
    assert not any(torch.is_tensor(each) for each in held)
    assert optimizer_bytes(Net(), plain) == 0


@pytest.mark.parametrize("name", ["adamw8bit", "adamw_fp8"])
def test_torchao_keeps_its_moments_in_bytes(name: str) -> None:
    table = 2 * 4 * 128 * 64
    assert optimizer_bytes(Net(), config(name)) - table < 0.4 * (
        optimizer_bytes(Net(), config("adamw")) - table
    )
    engine = make(name)
    state = engine.optimizer.state[engine.module.get_parameter("hidden.weight")]
    assert is_traceable_wrapper_subclass(state["exp_avg"])
    assert not is_traceable_wrapper_subclass(
        engine.optimizer.state[engine.module.get_parameter("norm.bias")]["exp_avg"]
    )
    train(engine, range(3))
    after = engine.optimizer.state[engine.module.get_parameter("hidden.weight")]["exp_avg"]
    assert after is state["exp_avg"]
    assert after.dequantize().abs().sum() > 0


@pytest.mark.parametrize("name", ["adamw8bit", "adamw_fp8"])
def test_torchao_follows_fused_adamw_embeddings_too(name: str) -> None:
    ends = []
    for kind in (name, "adamw"):
        engine = make(kind)
        train(engine, range(8))
        ends.append(torch.cat([param.detach().flatten() for param in engine.module.parameters()]))
    start = torch.cat([param.detach().flatten() for param in make(name).module.parameters()])
    moved = ends[1] - start
    assert (ends[0] - ends[1]).norm() < 0.1 * moved.norm()
    assert (ends[0] - ends[1]).abs().max() < 0.1, "no weight was thrown far away"


@pytest.mark.parametrize("name", ["adamw8bit", "adamw_fp8", "muon"])
def test_the_guards_snapshots_bring_it_back_in_a_loop_of_ones_own(name: str) -> None:
    def looped(first: int, last: int) -> None:
        for step in range(first, last):
            net.zero_grad()
            net(torch.randint(128, (32,), generator=torch.Generator().manual_seed(step))).backward()
            optimizer.step()

    net = Net()
    optimizer = build_optimizer(net, config(name), CPU)
    part = ExternalState("optimizer", optimizer)
    looped(0, 2)
    tensors, meta = part.state_dict()
    kept = {key: tensor.clone() for key, tensor in tensors.items()}, json.dumps(meta)
    assert all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors.values())
    weights = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    looped(2, 4)
    expected = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    looped(7, 9)
    net.load_state_dict(weights)
    part.load_state_dict(kept[0], json.loads(kept[1]))
    moment = optimizer.state[net.hidden.weight]
    assert is_traceable_wrapper_subclass(moment.get("exp_avg", torch.zeros(()))) is (name != "muon")
    looped(2, 4)
    assert all(torch.equal(net.state_dict()[key], tensor) for key, tensor in expected.items())


def test_state_of_other_blocks_is_refused() -> None:
    saved = save(make("adamw8bit"))
    other = Net()
    args = config("adamw8bit", optimizer_args={"block_size": 128})
    engine = TorchEngine(
        other, build_optimizer(other, args, CPU), Schedule(0.01, 2, 20, 0.1), 1.0, device=CPU
    )
    with pytest.raises(CheckpointError, match="scale"):
        engine.parts()["optimizer"].load_state_dict(*saved["optimizer"])


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest() -> None:
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    train = config("muon", lr=0.02, optimizer_args={"others": ["back.*"]})
    optimizer = build_optimizer(net, train, CPU)
    assert isinstance(optimizer, MuonAdamW)
    hidden = [twin.hidden.weight, twin.odd.weight]
    kept = [param for param in twin.parameters() if all(param is not each for each in hidden)]
    matrices, vectors = (
        [param for param in kept if (param.ndim >= 2) is wanted] for wanted in (True, False)
    )
    muon = torch.optim.Muon(hidden, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.02, betas=train.betas, fused=True)
    for step in range(3):
        ids = torch.randint(128, (32,), generator=torch.Generator().manual_seed(step))
        for model in (net, twin):
            model.zero_grad()
            model(ids).backward()
        optimizer.step()
        muon.step()
        adamw.step()
    for (name, ours), theirs in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_muon_needs_a_matrix_and_patterns_that_match() -> None:
    with pytest.raises(ConfigError, match="no hidden matrix"):
        build_optimizer(nn.LayerNorm(4), config("muon"), CPU)
    with pytest.raises(ConfigError, match=r"matches no parameter: heads\.\*") as error:
        build_optimizer(Net(), config("muon", optimizer_args={"others": ["heads.*"]}), CPU)
    assert "train.optimizer_args.others" in str(error.value)


def test_the_host_waits_for_what_does_not_read_the_gate() -> None:
    waits = {name: bool(waits_for(make(name).optimizer)) for name in KINDS}
    fused = {"adamw", "adamw amsgrad", "sgd", "torch.optim:Adagrad"}
    assert {name for name, waiting in waits.items() if not waiting} == fused
    assert not takes_found_inf(make("muon").optimizer)
    assert "MuonAdamW" in waits_for(make("muon").optimizer)


def test_embeddings_decay_unless_told_otherwise() -> None:
    def spared(**more: Any) -> set[str]:
        groups = build_optimizer(Net(), config("adamw", **more), CPU).param_groups
        return {
            name for group in groups if not group["weight_decay"] for name in group["param_names"]
        }

    vectors = {"hidden.bias", "back.bias", "norm.weight", "norm.bias"}
    assert spared() == vectors
    assert spared(decay_embeddings=False) == {*vectors, "embed.weight"}


@pytest.mark.parametrize(
    ("name", "more", "told"),
    [
        (
            "adamw",
            {"optimizer_args": {"epz": 1e-6}},
            r"optimizer_args\.epz: AdamW does not take it",
        ),
        ("adamw", {"optimizer_args": {"lr": 1e-6}}, "fix: set train.lr"),
        ("adamw", {"optimizer_args": {"fused": False}}, "chosen by the harness"),
        ("adamw", {"optimizer_args": {"eps": -1.0}}, "AdamW failed: ValueError"),
        ("adamw8bit", {"optimizer_args": {"blocksize": 128}}, 'did you mean "block_size"'),
        ("muon", {"optimizer_args": {"ns_stepz": 3}}, 'did you mean "ns_steps"'),
        ("no_such_module:Adam", {}, "cannot import"),
        ("torch.optim:AdamZ", {}, 'no function "AdamZ"'),
        ("os:system", {}, "Python's own library, which has no optimizers"),
        ("torch.optim.lr_scheduler:LambdaLR", {}, r"is no torch\.optim\.Optimizer"),
        ("own_optimizers:NotOne", {}, 'no function "NotOne"'),
        ("own_optimizers:NoDecay", {}, "train.weight_decay has no effect"),
        (
            "own_optimizers:NoDecay",
            {"weight_decay": 0.0, "betas": (0.8, 0.9)},
            "train.betas has no effect",
        ),
        ("own_optimizers:Kept", {}, "train.lr has no effect"),
        ("own_optimizers:Liar", {"weight_decay": 0.0}, "says that it takes found_inf"),
        ("own_optimizers:Listing", {"weight_decay": 0.0}, r"cannot hold: past \(list\)"),
        ("own_optimizers:Closing", {"weight_decay": 0.0}, "needs a closure"),
        ("own_optimizers:Failing", {"weight_decay": 0.0}, "no kernel"),
        ("own_optimizers:Paired", {"weight_decay": 0.0}, r"cannot hold: pair \(TwoTensor\)"),
    ],
)
def test_what_a_run_cannot_gate_or_save_is_refused(
    name: str, more: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        build_optimizer(Net(), config(name, **more), CPU)


def test_engines_that_take_only_two_name_the_others() -> None:
    assert refused_by("deepspeed", config("adamw")) == refused_by("deepspeed", config("sgd")) == []
    for name in ("adamw8bit", "muon", "own_optimizers:Counting"):
        (problem,) = refused_by("deepspeed", config(name))
        assert "deepspeed does not take it" in problem.what
        assert name in problem.where


def test_a_name_without_a_colon_must_be_known() -> None:
    with pytest.raises(ValueError, match="neither adamw, sgd"):
        TrainConfig.model_validate({"optimizer": "adam"})


def test_the_rate_of_quantised_adamw_is_looked_at_too(tmp_path: Path) -> None:
    assert "train.lr" in too_high(Net(), config("adamw8bit", lr=10.0))
    assert too_high(Net(), config("muon", lr=10.0)) == ""
