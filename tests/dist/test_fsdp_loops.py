"""harness.Precision in a loop that shards its model with FSDP2: the bits of the same loop under DDP.

Run as a script, this file is one rank.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from harness import Guard, Precision
from harness.core.errors import MisuseError
from harness.engines.fsdp import FsdpEngine
from harness.precision.recipe import Recipe, load_recipe
from tests.support.ranks import run_ranks
from tests.support.updates import finish

CPU = torch.device("cpu")
STEPS = 7
CLIP = 0.05

pytestmark = pytest.mark.dist


class Block(nn.Module):
    """Rows that two ranks cannot share evenly, and a parameter of one row: the second rank holds none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(32, 33, bias=False)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.odd(x).mean(dim=-1, keepdim=True)
        return x + self.down(torch.tanh(self.up(x))) * self.gain


class Net(nn.Module):
    """Blocks, tied weights, a 0-d parameter and a frozen one. A rank's pieces fill vector registers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 32)
        self.inward = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.outward = nn.Linear(32, 32)
        self.outward.weight = self.inward.weight
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.inward(self.first(inputs))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.outward(x))) * self.scale + self.frozen[:3]


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def shard(model: nn.Module, **settings: Any) -> nn.Module:
    """As torch's guide says; 0-d parameters cannot be cut."""
    settings.setdefault("ignored_params", {p for p in model.parameters() if p.ndim == 0})
    for block in model.get_submodule("blocks").children():
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def recipe(name: str) -> Recipe:
    """Converts small layers; weights are over their limit at once, so that the fallback acts."""
    base = load_recipe(name).model_dump()
    base["layers"]["min_features"] = 16
    base["fp8"]["stats_every"] = 3
    base["fallback"].update(saturation_weight=1e-6, hits=1, window=2, warmup_steps=2)
    return Recipe.model_validate(base)


def data(step: int) -> tuple[Tensor, Tensor]:
    """Two micro-batches of this rank."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(2, 32, 6, generator=generator)
    targets = torch.randn(2, 32, 3, generator=generator) * 3
    here = slice(dist.get_rank(), None, dist.get_world_size())
    return inputs[:, here], targets[:, here]


def adamw(weights: Any, **settings: Any) -> torch.optim.Optimizer:
    trained = [weight for weight in weights if weight.requires_grad]
    return torch.optim.AdamW(trained, lr=2**-7, **{"fused": True, **settings})


def whole(tensor: Tensor) -> list[float]:
    """All rows of all ranks. Collective."""
    tensor = tensor.detach()
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.flatten().tolist()


class Loop:
    """One loop of somebody's own under DDP or FSDP2."""

    def __init__(
        self,
        name: str,
        sharded: bool,
        standard: bool = False,
        make: Callable[[Any], torch.optim.Optimizer] = adamw,
        **settings: Any,
    ) -> None:
        self.precision = Precision(recipe(name))
        self.sharded = sharded
        self.bare = self.precision.prepare(net())
        self.model: Any = (
            shard(self.bare, **settings) if sharded else DistributedDataParallel(self.bare)
        )
        self.optimizer = make(self.bare.parameters())
        self.wrapped = self.precision.wrap(self.optimizer, max_grad_norm=CLIP) if standard else None

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Gradients are exchanged in the last one alone."""
        if self.sharded:
            self.model.set_requires_gradient_sync(last)
        with nullcontext() if self.sharded or last else self.model.no_sync():
            yield

    def backward(self, step: int, index: int, poison: float = 1.0) -> float:
        inputs, targets = data(step)
        if self.wrapped is not None:
            loss = nn.functional.mse_loss(self.model(inputs[index]), targets[index]) / 2
            (loss * poison).backward()
        else:
            with self.precision.context():
                outputs = self.model(inputs[index]).float()
                loss = nn.functional.mse_loss(outputs, targets[index]) / 2
            self.precision.backward(loss * poison)
        return loss.item()

    def step(self, step: int, poisoned: bool = False, guard: Guard | None = None) -> dict[str, Any]:
        poison = math.nan if poisoned and dist.get_rank() == 1 else 1.0
        losses: list[float] = []
        for index in range(2):
            with self.micro_batch(index == 1):
                losses.append(self.backward(step, index, poison))
        if self.wrapped is not None:
            self.wrapped.step()
            outcome = self.wrapped.outcome
        else:
            outcome = self.precision.step(self.optimizer, max_grad_norm=CLIP)
        self.optimizer.zero_grad()
        assert outcome is not None
        done = "" if guard is None else type(guard.end_step()).__name__
        return {
            "losses": losses,
            "norm": outcome.grad_norm.item(),
            "applied": outcome.was_applied,
            "scale": outcome.loss_scale.item(),
            "switch": str(outcome.switch),
            "guard": done,
        }

    def state(self) -> dict[str, Any]:
        """All that a step leaves, whoever holds it. Collective."""
        if self.sharded:
            for module in self.bare.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        weights = {name: whole(param) for name, param in self.bare.named_parameters()}
        moments: list[Any] = []
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                moments += [whole(value) for value in self.optimizer.state[param].values()]
        kept = self.precision.state_dict()["tensors"]
        ours = {name: tensor.tolist() for name, tensor in kept.items() if name != "last"}
        return {"weights": weights, "moments": moments, "precision": ours}


def same(ours: Any, theirs: Any) -> bool:
    """Equal bits; NaN equals NaN."""
    return json.dumps(ours) == json.dumps(theirs)


def beside_ddp(name: str, standard: bool = False, **settings: Any) -> dict[str, Any]:
    """The same loop under DDP and FSDP2: accumulation, clipping, a skipped step, demotions; what differs."""
    loops = [Loop(name, sharded, standard, **settings) for sharded in (False, True)]
    steps: list[list[dict[str, Any]]] = [[], []]
    for found, loop in zip(steps, loops, strict=True):
        for step in range(STEPS):
            if step == 5 and loop.precision.plan.fp8_layers():
                loop.precision.demote("blocks.2.up")
            found.append(loop.step(step, poisoned=step == 2))
    states = [loop.state() for loop in loops]
    return {
        "figures": same(*steps),
        "state": [key for key in states[0] if not same(states[0][key], states[1][key])],
        "applied": [step["applied"] for step in steps[1]],
        "norms": [[step["norm"] for step in found] for found in steps],
        "switched": [step["switch"] != "None" for step in steps[1]],
        "demoted": loops[1].precision.demoted,
        "rows": sum(
            p.to_local().numel() for p in loops[1].bare.parameters() if isinstance(p, DTensor)
        ),
    }


def beside_our_engine() -> bool:
    """The same updates by the engine of `harness train`."""
    loop = Loop("fp32", sharded=True)
    engine = FsdpEngine(
        net(),
        lambda weights: adamw(weights.values()),
        lambda applied: torch.full_like(applied, 2**-7),
        CLIP,
        device=CPU,
    )
    theirs: list[float] = []
    ours: list[float] = []
    for step in range(STEPS):
        ours.append(loop.step(step)["norm"])
        inputs, targets = data(step)
        for index in range(2):
            with engine.micro_batch(index == 1):
                outputs = engine.module(inputs[index])
                engine.backward(nn.functional.mse_loss(outputs, targets[index]) / 2)
        theirs.append(finish(engine)["grad_norm"].item())
    weights = {name: whole(param) for name, param in engine.module.named_parameters()}
    return same(ours, theirs) and same(loop.state()["weights"], weights)


def said_of(call: Callable[[], object]) -> str:
    try:
        call()
    except MisuseError as error:
        return str(error)
    return ""


def rank_main(folder: Path) -> None:
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for name in ("fp32", "bf16", "fp8_hybrid", "fp16_scaler"):
        for standard in (False, True):
            results[f"{name} {standard}"] = beside_ddp(name, standard)
    results["engine"] = beside_our_engine()
    results["not fused"] = beside_ddp("fp32", make=lambda weights: adamw(weights, fused=False))
    dist.destroy_process_group()
    (folder / f"{dist.get_rank() if dist.is_initialized() else folder.name}.json").write_text("")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__file__, tmp_path_factory.mktemp("loops"), 2)


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
