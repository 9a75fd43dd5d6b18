"""harness.Precision in a loop that shards its model with FSDP2: the bits of the same loop under DDP.

Run as a script, this file is one rank.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from harness import Guard, Precision
from harness.core.errors import MisuseError
from harness.engines.fsdp import FsdpEngine
from harness.precision.recipe import Recipe, load_recipe
from harness.precision.sharding import LoopShards
from tests.support.ranks import run_ranks
from tests.support.updates import finish

CPU = torch.device("cpu")
STEPS = 7
CLIP = 0.05

pytestmark = [pytest.mark.dist, pytest.mark.slow]


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
    fully_shard(model, **settings)
    return model


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
        "resolved": str(loops[1].precision.plan.resolved),
        "advised": [
            str(loop.precision.plan).count("copies of all blocks' weights") for loop in loops
        ],
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


def guarded(sharded: bool) -> dict[str, Any]:
    """Windows that break the run on one rank from the ninth on, until a rollback; a validation after every step."""
    loop = Loop("fp8_hybrid", sharded)
    guard = Guard.for_precision(
        loop.precision, loop.optimizer, max_grad_norm=CLIP, healthy_steps=2, snapshot_every=2
    )
    steps: list[dict[str, Any]] = []
    rolled_back = False
    while guard.step < 15:
        window = guard.window
        steps.append(loop.step(window, poisoned=window >= 8 and not rolled_back, guard=guard))
        rolled_back |= steps[-1]["guard"] == "Rollback"
        steps[-1] |= {"step": guard.step, "validated": validated(loop)}
    return {"steps": steps, **loop.state()}


def validated(loop: Loop) -> float:
    """Leaves the root of a sharded model gathered."""
    with loop.precision.evaluating():
        return loop.bare(data(99)[0][0]).sum().item()


def evaluated_before_the_step(sharded: bool) -> list[Any]:
    """A validation between backward and step gathers weights that are about to change."""
    loop = Loop("fp32", sharded)
    found: list[Any] = []
    for step in range(3):
        for index in range(2):
            with loop.micro_batch(index == 1):
                found.append(loop.backward(step, index))
        found.append(validated(loop))
        found.append(loop.precision.step(loop.optimizer).grad_norm.item())
        loop.optimizer.zero_grad()
    return found


def dropped(sharded: bool) -> list[Any]:
    """A window that is given up before its gradients were exchanged."""
    loop = Loop("fp8_hybrid", sharded)
    found: list[Any] = [loop.step(0)]
    with loop.micro_batch(False):
        loop.backward(9, 0)
    loop.precision.drop_window()
    loop.optimizer.zero_grad()
    return [*found, loop.step(1), loop.step(2)]


def resumed() -> list[bool]:
    """A fresh loop goes on from state dicts; with and without the help of torch's own checkpoints."""
    loop = Loop("fp8_hybrid", sharded=True)
    for step in range(2):
        loop.step(step)
    model, optimizer = copy.deepcopy(get_state_dict(loop.bare, loop.optimizer))
    plain = copy.deepcopy(loop.optimizer.state_dict())
    ours = loop.precision.state_dict()
    after = [loop.step(step) for step in range(2, 5)]

    equal: list[bool] = []
    for standard in (False, True):
        fresh = Loop("fp8_hybrid", sharded=True, standard=standard)
        validated(fresh)
        if standard:
            fresh.bare.load_state_dict(model)
            assert fresh.wrapped is not None
            fresh.wrapped.load_state_dict(plain)
        else:
            states = {"model_state_dict": model, "optim_state_dict": optimizer}
            set_state_dict(fresh.bare, fresh.optimizer, **states)
        fresh.precision.load_state_dict(ours)
        equal.append(same(after, [fresh.step(step) for step in range(2, 5)]))
    return equal


def reentrant(sharded: bool) -> list[Any]:
    """Reentrant checkpoints hide the parameters of blocks from the graph of the loss."""
    loop = Loop("fp16_scaler", sharded, standard=True)
    for block in loop.bare.get_submodule("blocks").children():
        inner = block.forward
        block.forward = partial(checkpoint, inner, use_reentrant=True)  # type: ignore[method-assign]
    return [loop.step(step) for step in range(3)]


def without_parameters_of_its_own(sharded: bool) -> list[float]:
    """The root has no parameter, so the graph of the loss shows gathered weights of blocks alone."""
    torch.manual_seed(0)
    precision = Precision(recipe("fp8_hybrid"))
    model = precision.prepare(nn.Sequential(nn.Linear(6, 32), nn.Linear(32, 32), nn.Linear(32, 3)))
    if sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    whole_model: Any = model if sharded else DistributedDataParallel(model)
    optimizer = precision.wrap(adamw(model.parameters()), max_grad_norm=CLIP)
    found: list[float] = []
    for step in range(3):
        inputs, targets = data(step)
        loss = nn.functional.mse_loss(whole_model(inputs[0]), targets[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        found.append(loss.item())
    return found


def clipped_by_torch(sharded: bool) -> list[float]:
    """torch's own clipping in its own loop: norms before it, and what the step then sees. In one micro-batch."""
    torch.manual_seed(0)
    precision = Precision(recipe("fp16_scaler"))
    model = precision.prepare(nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3)))
    whole_model: Any = fully_shard(model) if sharded else DistributedDataParallel(model)
    optimizer = precision.wrap(adamw(model.parameters()))
    found: list[float] = []
    for step in range(4):
        inputs, targets = data(step)
        nn.functional.mse_loss(whole_model(inputs[0]), targets[0]).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        found += whole(norm)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.outcome is not None
        found.append(optimizer.outcome.grad_norm.item())
    return found


def kept_casts() -> int:
    """Casts of whole weights of FP8 layers that autograd holds between forward and backward."""
    loop = Loop("fp8_hybrid", sharded=True)
    loop.step(0)
    shapes = {(64, 32), (32, 64), (32, 32)}
    count = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal count
        # A gathered Parameter is freed and filled again; anything else of its shape is a copy.
        count += not isinstance(tensor, nn.Parameter) and tuple(tensor.shape) in shapes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loop.backward(1, 0)
    return count


def said_of(call: Callable[[], object]) -> str:
    try:
        call()
    except MisuseError as error:
        return str(error)
    return ""


def prepared(seed: int = 0) -> tuple[Precision, Net]:
    precision = Precision.from_recipe("fp32")
    return precision, precision.prepare(net(seed))


def sharded_before() -> None:
    Precision.from_recipe("fp32").prepare(shard(net()))


def optimizer_before() -> None:
    precision, model = prepared()
    optimizer = adamw(model.parameters())
    shard(model)
    precision.wrap(optimizer)


def guard_before() -> None:
    precision, model = prepared()
    Guard.for_precision(precision, adamw(model.parameters()))
    shard(model)
    precision.wrap(adamw(model.parameters()))


def wrapped_before() -> None:
    precision, model = prepared()
    precision.wrap(adamw(model.parameters()))
    shard(model)(data(0)[0][0])


def blocks_alone() -> None:
    precision, model = prepared()
    for block in model.blocks:
        fully_shard(block)
    precision.wrap(adamw(model.parameters()))


def loop_of(**settings: Any) -> Callable[[], Loop]:
    return lambda: Loop("fp32", sharded=True, standard=True, **settings)


def muon(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([weight for weight in weights if weight.ndim == 2])


def two_dimensions() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "rows"))


def other_device() -> None:
    _, model = prepared()
    LoopShards("wrap()", shard(model), torch.device("cuda"), None)


def other_weights(load: bool) -> None:
    precision, model = prepared(seed=dist.get_rank())
    shard(model)
    if load:
        model.load_state_dict(
            {name: torch.full_like(t, 0.5) for name, t in model.state_dict().items()}
        )
    precision.wrap(adamw(model.parameters()))


def never_exchanged() -> None:
    loop = Loop("fp32", sharded=True)
    with loop.micro_batch(False):
        loop.backward(0, 0)
    loop.precision.step(loop.optimizer)


def not_zeroed() -> None:
    loop = Loop("fp32", sharded=True)
    loop.backward(0, 0)
    loop.precision.step(loop.optimizer)
    loop.backward(1, 0)


def clipped_under_a_scale() -> None:
    loop = Loop("fp16_scaler", sharded=True)
    loop.backward(0, 0)
    nn.utils.clip_grad_norm_([param for param in loop.bare.parameters() if param.ndim], 1.0)
    loop.precision.step(loop.optimizer)


def stepped_directly() -> None:
    loop = Loop("fp8_hybrid", sharded=True)
    loop.backward(0, 0)
    loop.optimizer.step()


def moved_memory() -> None:
    loop = Loop("fp32", sharded=True, standard=True)
    local: Any = loop.bare.get_submodule("head").weight
    local._local_tensor = local._local_tensor.clone()
    loop.step(0)


class Parted(nn.Module):
    """Each rank calls another block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.blocks[dist.get_rank()](inputs)


def other_blocks() -> None:
    torch.manual_seed(0)
    precision = Precision.from_recipe("fp32")
    model = shard(precision.prepare(Parted()))
    optimizer = precision.wrap(adamw(model.parameters()))
    model(data(0)[0][0]).sum().backward()
    optimizer.step()


class Turning(nn.Module):
    """From its fifth call on, each rank calls its two blocks in another order: two micro-batches a step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        turned = self.calls > 4 and dist.get_rank() == 1
        first, second = reversed(self.blocks) if turned else self.blocks
        return second(torch.tanh(first(inputs)))


def other_blocks_later() -> None:
    """Step 3 is the first that differs, and its figures are there in step 4."""
    torch.manual_seed(0)
    precision = Precision.from_recipe("fp32")
    model = shard(precision.prepare(Turning()))
    optimizer = precision.wrap(adamw(model.parameters()))
    for step in range(4):
        for inputs in data(step)[0]:
            model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def of_fsdp1(original: bool) -> None:
    torch.manual_seed(0)
    precision = Precision.from_recipe("fp32")
    model = precision.prepare(nn.Sequential(nn.Linear(6, 32), nn.Linear(32, 3)))
    flat = FullyShardedDataParallel(model, use_orig_params=original, device_id=CPU)
    with precision.context():
        loss = flat(data(0)[0][0]).sum()
    precision.backward(loss)
    precision.step(adamw(flat.parameters()))


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "sharded before": (
        sharded_before,
        "prepare(): the model is sharded by fully_shard (FSDP2) already",
    ),
    "optimizer before": (
        optimizer_before,
        "AdamW holds 27 parameters that are not of the sharded model",
    ),
    "guard before": (guard_before, "the model was sharded after Guard.for_precision"),
    "wrapped before": (wrapped_before, "the model was sharded after wrap()"),
    "blocks alone": (blocks_alone, "trainable parameters are not sharded: first.weight"),
    "muon": (loop_of(make=muon), "Muon on a sharded model"),
    "bf16 weights": (
        loop_of(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
        "MixedPrecisionPolicy with param_dtype=torch.bfloat16",
    ),
    "bf16 gradients": (
        loop_of(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)),
        "MixedPrecisionPolicy with reduce_dtype=torch.bfloat16",
    ),
    "hybrid": (
        lambda: loop_of(mesh=two_dimensions())(),
        "parameters are not cut into rows over all ranks",
    ),
    "offload": (other_device, "the rows are not on the device that the model was prepared on"),
    "other weights": (
        lambda: other_weights(load=False),
        "the ranks gave prepare() different weights",
    ),
    "never exchanged": (never_exchanged, "parameters are each rank's own"),
    "not zeroed": (not_zeroed, "gradients were not zeroed after the last step()"),
    "clipped": (clipped_under_a_scale, "gradients were changed after backward()"),
    "stepped": (stepped_directly, "AdamW.step() was called directly"),
    "memory": (moved_memory, "weights have new memory since the model was sharded: head.weight"),
    "other blocks": (other_blocks, "the ranks called different blocks of the model"),
    "other blocks later": (other_blocks_later, "ranks called other blocks in step 3"),
    "fsdp1": (lambda: of_fsdp1(original=False), "FullyShardedDataParallel (FSDP1)"),
    "fsdp1 original": (lambda: of_fsdp1(original=True), "FullyShardedDataParallel (FSDP1)"),
}

BESIDE: dict[str, Callable[[bool], Any]] = {
    "guarded": guarded,
    "evaluated": evaluated_before_the_step,
    "dropped": dropped,
    "reentrant": reentrant,
    "no root": without_parameters_of_its_own,
    "clipped by torch": clipped_by_torch,
}


def rank_main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results: dict[str, Any] = {
        "fp32": beside_ddp("fp32", make=lambda weights: adamw(weights, fused=False)),
        "bf16": beside_ddp("bf16"),
        "fp8": beside_ddp("fp8_hybrid"),
        "fp8 standard": beside_ddp("fp8_hybrid", standard=True),
        "fp8 dynamic": beside_ddp("fp8_dynamic"),
        "fp16": beside_ddp("fp16_scaler"),
        "fp16 standard": beside_ddp("fp16_scaler", standard=True),
        "engine": beside_our_engine(),
        "resumed": resumed(),
        "kept": kept_casts(),
        "loaded": said_of(lambda: other_weights(load=True)),
    }
    for name, run in BESIDE.items():
        results[name] = [run(False), run(True)]
    results["refused"] = {name: said_of(call) for name, (call, _) in REFUSED.items()}
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__file__, tmp_path_factory.mktemp("loops"), 2)


RESOLVED = {
    "fp32": "autocast:fp32",
    "bf16": "autocast:bf16",
    "fp8": "native:fp8",
    "fp8 standard": "native:fp8",
    "fp8 dynamic": "torchao:fp8",
    "fp16": "autocast:fp16",
    "fp16 standard": "autocast:fp16",
}


@pytest.mark.parametrize("case", RESOLVED)
def test_every_bit_is_that_of_ddp(two_ranks: list[dict[str, Any]], case: str) -> None:
    for result in two_ranks:
        found = result[case]
        assert found["resolved"] == RESOLVED[case]
        assert found["figures"]
        assert found["state"] == []
        assert not found["applied"][2], "the fault fired"
        assert found["applied"][3:] == [True] * 4
        assert max(norm for norm in found["norms"][1] if math.isfinite(norm)) > CLIP
        moved = "blocks.02.up" in found["demoted"]
        assert moved == case.startswith("fp8")
        assert any(found["switched"]) == case.startswith("fp8"), "the fallback acted"
        assert found["advised"] == [0, case.startswith(("bf16", "fp16"))], (
            "of the sharded loop alone"
        )
    rows = [result[case]["rows"] for result in two_ranks]
    assert rows[0] - rows[1] < 300, "each rank holds half"


def test_every_bit_is_that_of_our_engine(two_ranks: list[dict[str, Any]]) -> None:
    assert all(result["engine"] for result in two_ranks)


def test_a_rollback_is_that_of_ddp(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        ddp, fsdp = result["guarded"]
        assert same(ddp, fsdp)
        assert "Rollback" in [step["guard"] for step in fsdp["steps"]]


@pytest.mark.parametrize("case", ["evaluated", "dropped", "reentrant", "no root"])
def test_odd_loops_have_the_bits_of_ddp(two_ranks: list[dict[str, Any]], case: str) -> None:
    for result in two_ranks:
        ddp, fsdp = result[case]
        assert same(ddp, fsdp)


def test_clipping_of_torch_is_that_under_ddp(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        ddp, fsdp = result["clipped by torch"]
        assert fsdp == pytest.approx(ddp, rel=1e-5, nan_ok=True)
        assert fsdp[-1] == pytest.approx(0.1, rel=1e-4)


def test_a_fresh_loop_goes_on_from_its_state(two_ranks: list[dict[str, Any]]) -> None:
    assert all(result["resumed"] == [True, True] for result in two_ranks)


def test_no_cast_of_a_whole_weight_is_kept(two_ranks: list[dict[str, Any]]) -> None:
    assert all(result["kept"] == 0 for result in two_ranks)


def test_weights_that_were_loaded_since_are_taken(two_ranks: list[dict[str, Any]]) -> None:
    assert all(result["loaded"] == "" for result in two_ranks)


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_give_other_numbers_is_refused(
    two_ranks: list[dict[str, Any]], case: str
) -> None:
    for result in two_ranks:
        assert REFUSED[case][1] in result["refused"][case]


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
