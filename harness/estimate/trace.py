"""Traces a training step on fake tensors: what a run would do on a card that this machine does not have.

A fake tensor has a shape, a dtype and a device, but no memory and no values. PyTorch knows for nearly every operation
which shapes come out of which shapes, so a whole training step runs on fakes in seconds. What the step does is not
guessed: the real model, engine, precision backend and optimizer are called.

The method, from a config to a `Trace`:

1. `fake_card` gives this process one fake CUDA card. The questions that code asks of CUDA (how many devices, which
   compute capability, how much memory) are answered from the card's datasheet. So the run takes the same branches as
   on the real card.
2. `built` builds the run as `harness train` does, with made-up tokens instead of data.
3. `trace` runs three steps under the `Recorder`, which sees every ATen operation and every allocation. The first step
   also creates what is made at its first use and kept. The second is a usual step. The third also samples the FP8
   statistics.
4. `fusion.py` says what compiled blocks make of these operations.
5. `prediction.py` turns the trace into memory and time. Memory is the peak of live storages. Time comes from
   `roofline.py`, which says how long each operation takes.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from harness.build import ENGINES, Worker, build_run, kept_copies
from harness.capability.cards import Card
from harness.capability.probe import Device, LibraryFacts, MachineFacts, library_facts
from harness.checkpoint.overlapped import copy_bytes
from harness.checkpoint.store import Store
from harness.core.blocks import blocks_of
from harness.core.config import RunConfig
from harness.core.facts import Window, is_sampled, sampled_step
from harness.core.protocols import Batch
from harness.core.state import RunLedger
from harness.data.dataset import DatasetBatches
from harness.engines.process_group import ProcessGroup, read_launch
from harness.estimate import device
from harness.estimate.fusion import Fusion
from harness.estimate.memory import Kept, Peak
from harness.estimate.ranks import buckets, imagined
from harness.estimate.recorder import (
    BUFFERS,
    OPTIMIZER_STATE,
    Collective,
    Recorder,
    Transfer,
    Wait,
)
from harness.estimate.roofline import Op
from harness.models import build_model
from harness.precision.backends.registry import BACKENDS
from harness.precision.plan import Plan, make_plan
from harness.precision.recipe import Recipe, Rung
from harness.run import Run, train_step
from harness.telemetry import Telemetry
from harness.tracking.console import Console
from harness.tracking.journal import Journal

# CUDA has a fused kernel for each of these operations. A CPU-only build decomposes them into many others.
_ONLY_ON_CUDA = ("_fused_rms_norm", "silu_backward", "mish_backward")
# What FlashAttention-2 takes (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
_FLASH_CAPABILITY = (8, 0)
_FLASH_HEAD_DIM = 256


class FakeEvent:
    """Stands for torch.cuda.Event. The fake device has always finished its work."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1.0


class FakeStream:
    """Stands for torch.cuda.Stream, and for the context `torch.cuda.stream`. Everything runs in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> FakeEvent:
        return FakeEvent()


_ATTEND = F.scaled_dot_product_attention


class _Attention(TorchFunctionMode):
    """Chooses the attention kernel that PyTorch would choose on the real card.

    FlashAttention: compute capability 8.0 or higher, 16 bits, heads of at most 256 features, values as wide as keys, no
        mask.
    Memory-efficient attention: no grouped queries, heads of a multiple of some features (`_aligned`).
    Plain mathematics: everything else, and operands that either kernel would have to broadcast. A CPU-only build would
        always choose this one.

    `attend` replaces torch's function, because no mode is active when activation checkpointing recomputes the forward
    pass in backward. The mode covers callers that imported the function before it was replaced.
    """

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        chosen = self.attend if func is _ATTEND else func
        return chosen(*args, **kwargs or {})

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """Takes the arguments of `F.scaled_dot_product_attention`."""
        if _on_cuda(args, kwargs):
            return self._attend(*args, **kwargs)
        return _ATTEND(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        # Autocast acts on torch's function, which is not called here.
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(dtype)

        # Flash attention comes first, as in PyTorch. It takes 16 bits and no mask.
        half = query.dtype in (torch.bfloat16, torch.float16)
        kernels = torch.ops.aten
        flashes = (
            self._card.capability >= _FLASH_CAPABILITY
            and query.shape[-1] <= _FLASH_HEAD_DIM
            and query.shape[-1] == value.shape[-1]
            and _pairs(query, key, value, enable_gqa)
        )
        if attn_mask is None and half and flashes:
            flash = kernels._scaled_dot_product_flash_attention
            return flash(
                query, key, value, dropout_p, is_causal, return_debug_mask=False, scale=scale
            )[0]

        # Memory-efficient attention takes a mask.
        if _pairs(query, key, value, grouped=False) and self._aligned(query, value):
            efficient = kernels._scaled_dot_product_efficient_attention
            trains = any(tensor.requires_grad for tensor in (query, key, value))
            bias = None if attn_mask is None else _bias(attn_mask, query, key)
            return efficient(query, key, value, bias, trains, dropout_p, is_causal, scale=scale)[0]

        return _ATTEND(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    def _aligned(self, query: Tensor, value: Tensor) -> bool:
        """Whether memory-efficient attention takes heads of so many features: multiples of 16 bytes for tensor cores.

        Source: PyTorch's sdp_utils.cpp, the check of head sizes for this kernel.
        """
        multiple = 1
        if query.element_size() == 2:
            multiple = 8
        elif self._card.capability >= _FLASH_CAPABILITY:
            multiple = 4
        return query.shape[-1] % multiple == 0 and value.shape[-1] % multiple == 0


def _pairs(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> bool:
    """Whether a fused kernel takes these shapes: [batch, heads, time, features], none of them broadcast.

    grouped: whether several query heads may share a key head.
    """
    if not query.ndim == key.ndim == value.ndim == 4:
        return False
    if not len(query) == len(key) == len(value):
        return False
    return grouped or query.shape[1] == key.shape[1] == value.shape[1]


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as PyTorch gives it to memory-efficient attention: added to the scores, and of their shape."""
    if mask.dtype == torch.bool:
        added = torch.zeros_like(mask, dtype=query.dtype)
        mask = added.masked_fill_(mask.logical_not(), -torch.inf)
    return mask.expand(*query.shape[:-1], key.shape[-2])


def _on_cuda(args: Any, kwargs: dict[str, Any]) -> bool:
    query = args[0] if args else kwargs.get("query")
    return isinstance(query, FakeTensor) and query.device.type == "cuda"


@contextmanager
def fake_card(card: Card) -> Iterator[FakeTensorMode]:
    """In this context torch has one CUDA device, `card`, and every new tensor is a fake.

    All changes to torch are undone when the context ends. Call `device.load()` before torch is imported; otherwise
    this raises MisuseError, as `device.load()` does.
    """
    device.load()

    # What `torch.cuda.get_device_properties` returns.
    properties = SimpleNamespace(
        name=card.name,
        major=card.capability[0],
        minor=card.capability[1],
        total_memory=card.memory,
        multi_processor_count=card.processors,
        gcnArchName="",
    )

    # Everything that code asks of CUDA before and during a step: (owner, name, replacement).
    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "set_device", lambda *_: None),
        (torch.cuda, "is_initialized", lambda: True),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "manual_seed_all", lambda *_: None),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "get_device_properties", lambda *_: properties),
        (torch.cuda, "get_device_capability", lambda *_: card.capability),
        (torch.cuda, "get_device_name", lambda *_: card.name),
        (torch.cuda, "Event", FakeEvent),
        (torch.cuda, "Stream", FakeStream),
        (torch.cuda, "stream", FakeStream),
        (torch.cuda, "current_stream", FakeStream),
        (torch.version, "cuda", torch.version.cuda or "13.0"),
        # Without these two, fake tensors initialise CUDA first. A CUDA build of torch fails at that without a card.
        (FakeTensorMode, "avoid_device_init", property(lambda _: True)),
        (fake_tensor, "init_gpu_context", lambda *_: None),
    ]

    with ExitStack() as stack:
        for owner, name, value in answers:
            stack.enter_context(mock.patch.object(owner, name, value))

        # Code compares addresses to tell weights apart, and fakes have no address. Nothing here relies on it.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")

        stack.enter_context(_cuda_kernels())
        attention = stack.enter_context(_Attention(card))
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention.attend))
        yield stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))


@contextmanager
def _cuda_kernels() -> Iterator[None]:
    """Register a CUDA kernel for each of `_ONLY_ON_CUDA` that this build of torch lacks.

    PyTorch then calls the fused operation, as a CUDA build does. The kernel itself is never run on fakes.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for name in _ONLY_ON_CUDA:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
                library.impl(name, _never, "CUDA")
        yield
    finally:
        library._destroy()


def _never(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a kernel was called on a fake CUDA device, which computes nothing")


# At most three micro-batches of a step are traced. The first one also quantises the weights, and the update follows the
# last one. All between are alike, so the second one is traced and counted as often as needed.
_MICRO_BATCHES = 3
# Number of that second micro-batch, counted from 1.
_BETWEEN = 2
# Names of the traced steps.
FIRST, USUAL, SAMPLED = "first", "usual", "sampled"


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """What the traced steps did.

    rung: the rung of the recipe that was traced.
    plan: the plan of `harness train` on the card. Where `rung` is a stand-in, it has the rung that `rung` stands for.
    eager: the operations of each step by the step's name, for all micro-batches.
    fused: the same with compiled blocks (`fusion.py`).
    compiled: whether the run compiles its blocks.
    static: bytes that live between steps.
    state: bytes of a copy of the state on the card.
    lasting: bytes that an update needs whatever the micro-batch is: weights, optimizer state, gradients.
    eager_peak: the most memory that was live at one time.
    fused_peak: the same with compiled blocks.
    waits: places where the host waits for the device, in all three traced steps.
    transfers: copies between host and device, in all three traced steps.
    collectives: exchanges with other ranks in a usual step, for all micro-batches.
    parameters: number of elements of the model's parameters, over all ranks.
    routed: whether the model routes tokens to experts; the trace spreads them evenly.
    advice: as `build.kept_copies`.
    """

    rung: Rung
    plan: Plan
    eager: dict[str, list[Op]]
    fused: dict[str, list[Op]]
    compiled: bool
    static: int
    state: int
    lasting: int
    eager_peak: Peak
    fused_peak: Peak
    waits: tuple[Wait, ...]
    transfers: tuple[Transfer, ...]
    collectives: tuple[Collective, ...]
    parameters: int
    routed: bool
    advice: str

    @property
    def steps(self) -> dict[str, list[Op]]:
        """The operations of each step as it runs."""
        return self.fused if self.compiled else self.eager

    @property
    def peak(self) -> int:
        """The most bytes that are live at one time, as the steps run."""
        return self._peak.bytes

    @property
    def peak_kinds(self) -> Counter[str]:
        """The bytes at that time, by kind."""
        return self._peak.kinds

    @property
    def _peak(self) -> Peak:
        return self.fused_peak if self.compiled else self.eager_peak


def facts_of(card: Card, replaced: bool = True) -> MachineFacts:
    """A machine with one `card` and the libraries of this one.

    replaced: whether the libraries whose backends have a stand-in count as installed there.
    """
    reason = "taken to be installed" if replaced else "not looked at"
    assumed = LibraryFacts(None, replaced, reason)
    libraries = library_facts()

    # Transformer Engine cannot run on fake tensors, so this machine need not have it: its stand-in is traced.
    for backend in BACKENDS.values():
        if backend.stand_in:
            libraries = libraries | {backend.library: assumed}
    return MachineFacts(
        python=platform.python_version(),
        torch_version=str(torch.__version__),
        torch_cuda=torch.version.cuda or "13.0",
        cuda_available=True,
        devices=(Device(card.name, card.capability, card.memory),),
        libraries=libraries,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class FakeRun:
    """A run on fake tensors. Its steps tell `recorder` which phase they are in.

    plan: the plan of what runs here.
    intended: the plan for the real card. It differs from `plan` where a backend is replaced by its stand-in.
    advice: as `build.kept_copies`.
    """

    run: Run
    plan: Plan
    model: nn.Module
    recorder: Recorder
    intended: Plan
    advice: str

    def step(self, number: int, name: str) -> None:
        """Run step `number` (from 1) and record its operations under `name`."""
        self.recorder.step = name
        self.recorder.micro = 0
        self.run.state.step = number - 1
        samples = np.zeros(self.run.config.train.global_batch, dtype=np.int64)
        with self.recorder.phased("step"):
            train_step(self.run, Window(number - 1, samples))


Policy = tuple[Recipe, Rung]
"""A recipe, and the rung of it that is taken."""


def trace(
    config: RunConfig,
    recipe: Recipe,
    card: Card,
    rung: Rung,
    ranks: int = 1,
    intended: Policy | None = None,
) -> Trace:
    """Trace the run that `config`, `recipe` and `rung` make on `card`: a first step, a usual one and a sampled one.

    The first step only warms up; the trace has the operations of the other two.
    ranks: processes that share the global batch. What they exchange is counted, and takes no time in the trace.
    intended: what `recipe` and `rung` stand in for; None: they are the real ones.
    Raises ConfigError as building the run does.
    """
    # Few micro-batches are traced: the others of a step do the same.
    batches = config.train.global_batch // (config.train.micro_batch * ranks)
    traced = min(batches, _MICRO_BATCHES)
    engine = engine_of(config)
    with on_card(config, recipe, card, rung, traced, engine, ranks, intended) as made:
        recorder, run = made.recorder, made.run
        # Before the first step only the state is live that is kept from step to step.
        static = recorder.live
        made.step(1, FIRST)
        made.step(_step(run, sampled=False), USUAL)
        made.step(_step(run, sampled=True), SAMPLED)
        eager: dict[str, list[Op]] = {}
        fused: dict[str, list[Op]] = {}
        kept: list[Kept] = []
        first = 0
        for name in (FIRST, USUAL, SAMPLED):
            ops = [op for op in recorder.ops if op.step == name]
            fusion = Fusion(ops)
            kept.append(fusion.kept(first))
            first += len(ops)
            if name != FIRST:
                eager[name] = _repeated(ops, batches)
                fused[name] = _repeated(fusion.fused(), batches)
        return Trace(
            rung=made.plan.rung,
            plan=made.intended,
            eager=eager,
            fused=fused,
            compiled=False,
            static=static,
            state=_state_on_card(run),
            lasting=recorder.lasting,
            eager_peak=recorder.peak(),
            fused_peak=recorder.peak(kept),
            waits=tuple(recorder.waits),
            transfers=tuple(recorder.transfers),
            collectives=_exchanged(made, batches, ranks),
            parameters=sum(parameter.numel() for parameter in made.model.parameters()),
            routed=recorder.routing.asked,
            advice=made.advice,
        )


def _state_on_card(run: Run) -> int:
    # The state of random generators is in host memory, and fakes have none.
    parts = [name for name in run.state.parts if name != "rng"]
    tensors, _ = run.state.state_dict(parts)
    return copy_bytes(tensors, lambda tensor: tensor.device.type == "cuda")


def engine_of(config: RunConfig) -> str:
    """The key in `build.ENGINES` of the engine that is traced.

    DistributedDataParallel holds and computes on each rank what one process does: `single` stands for it.
    """
    return config.engine.name if config.engine.name == "fsdp" else "single"


def _exchanged(made: FakeRun, batches: int, ranks: int) -> tuple[Collective, ...]:
    """What a rank exchanges with the others in a usual step."""
    if ranks == 1:
        return ()
    if made.run.engine.sharded:
        usual = [each for each in made.recorder.collectives if each.step == USUAL]
        return tuple(_repeated(usual, batches))
    sizes = buckets(made.model)
    return tuple(Collective("all-reduce", size, "backward", USUAL, batches) for size in sizes)


@contextmanager
def on_card(
    config: RunConfig,
    recipe: Recipe,
    card: Card,
    rung: Rung,
    batches: int,
    engine: str = "single",
    ranks: int = 1,
    intended: Policy | None = None,
) -> Iterator[FakeRun]:
    """The run on a fake `card`, with `batches` micro-batches a step; the recorder is active and empty.

    engine, ranks: this is one of `ranks` processes under that engine; the others are imagined.
    intended: as for `trace`.
    """
    device = torch.device("cuda", 0)
    facts = facts_of(card)
    recorder = Recorder(tf32=card.capability >= (8, 0))
    with (
        imagined(ranks) if ENGINES[engine].sharded else nullcontext(),
        fake_card(card),
        recorder,
        built(config, recipe, facts, device, rung, batches, recorder, engine, intended) as made,
    ):
        # Operations of building the run are not part of a step.
        recorder.forget()
        yield made


@contextmanager
def built(
    config: RunConfig,
    recipe: Recipe,
    facts: MachineFacts,
    device: torch.device,
    rung: Rung,
    batches: int,
    recorder: Recorder,
    engine: str = "single",
    intended: Policy | None = None,
) -> Iterator[FakeRun]:
    """The run as `harness train` builds it on one process, with `batches` micro-batches a step of made-up tokens.

    engine: its key in `build.ENGINES`. One that shards the model needs a process group, real or imagined
        (`ranks.imagined`).
    intended: as for `trace`.

    The caller decides whether tensors are fakes. No file outlives this context.
    """
    worker = Worker(read_launch(), engine, device, facts, ProcessGroup(device))

    # Background saves and snapshots copy the state to host memory. They are off: what overlapped snapshots take of the
    # card follows from the state's size (`Trace.state`).
    checkpoint = config.checkpoint.model_copy(update={"background": False})
    guard = config.guard.model_copy(update={"snapshot_every": 0})
    config = config.model_copy(update={"checkpoint": checkpoint, "guard": guard})

    # Built on the device: a fake parameter cannot move to it and stay the same object.
    torch.manual_seed(config.train.seed)
    with device, _conversions():
        model = build_model(config.model)
    _bring(model, device)

    plan = make_plan(recipe, facts, rung, (), model)
    real_plan = plan
    if intended is not None:
        real_recipe, real_rung = intended
        real_plan = make_plan(real_recipe, facts, real_rung, (), model)
    advice = kept_copies(config, engine, real_plan.rung, model)
    if advice:
        real_plan = dataclasses.replace(real_plan, notes=(*real_plan.notes, advice))

    data = _Tokens(config, batches, recorder)
    with (
        tempfile.TemporaryDirectory(prefix="estimate-") as folder,
        open(os.devnull, "w") as nowhere,
    ):
        # Journal and screen write to /dev/null; the store may only read.
        root = Path(folder)
        screen = Console(config.train.steps, stream=nowhere)
        store = Store(root, readonly=True)
        telemetry = Telemetry(None, Journal(Path(os.devnull)), screen, config.tracking)
        run = build_run(
            config, recipe, root, worker, plan, model, data, telemetry, RunLedger(), store
        )

        # Name what is live now, so that the estimate can say what the peak consists of.
        recorder.weights_are(model.parameters())
        recorder.label(BUFFERS, model.buffers())
        optimizer: torch.optim.Optimizer = run.engine.optimizer  # type: ignore[attr-defined]
        state = (value for values in optimizer.state.values() for value in values.values())
        recorder.label(OPTIMIZER_STATE, (value for value in state if isinstance(value, Tensor)))

        phased = dataclasses.replace(
            run, engine=_Engine(run.engine, recorder), task=_Loss(run.task, recorder)
        )
        with _blocks_told(model, recorder):
            yield FakeRun(phased, plan, model, recorder, real_plan, advice)


@contextmanager
def _blocks_told(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """In this context the recorder knows which of the model's repeated blocks runs, in forward and in backward.

    The gradient of a block's output comes before its backward, and that of its input after it.
    """
    marked = WeakIdKeyDictionary()

    def mark(tensors: Any, block: int | None) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor not in marked:
                marked[tensor] = True
                tensor.register_hook(lambda _: setattr(recorder, "block", block))

    def enter(block: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        # What is not the output of another block.
        mark((args, kwargs), None)
        recorder.block = block

    def leave(block: int, _: nn.Module, args: Any, out: Any) -> None:
        # A forward that backward computes again is part of the block's backward.
        if recorder.phase == "forward":
            recorder.block = None
        mark(out, block)

    handles: list[RemovableHandle] = []
    for number, block in enumerate(blocks_of(model)):
        handles.append(
            block.register_forward_pre_hook(partial(enter, number), prepend=True, with_kwargs=True)
        )
        handles.append(block.register_forward_hook(partial(leave, number)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _conversions() -> Iterator[None]:
    """Let a model that is being built convert its parameters (`.float()`, or peft of its adapters).

    torch converts a fake parameter by exchanging two objects, and refuses objects with weak references, which fakes
    have. On one device the new data can be taken instead, as torch does with real tensors.
    """
    exchange = torch.utils.swap_tensors

    def take(old: Tensor, new: Tensor) -> None:
        if isinstance(old, FakeTensor) and old.device == new.device:
            old.data = new.data
        else:
            exchange(old, new)

    with mock.patch.object(torch.utils, "swap_tensors", take):
        yield


def _bring(model: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers to `device` that the model made elsewhere, such as from NumPy arrays.

    Tied weights stay tied: each tensor is moved once.
    """
    moved: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or tensor.device.type == device.type:
                    continue
                if tensor not in moved:
                    there = tensor.detach().to(device)
                    if isinstance(tensor, nn.Parameter):
                        there = nn.Parameter(there, tensor.requires_grad)
                    moved[tensor] = there
                held[name] = moved[tensor]  # type: ignore[assignment]


def _step(run: Run, sampled: bool) -> int:
    """The number of a step that samples FP8 statistics, or of one that does not.

    The guard measures extra facts in some steps. A step without them is chosen if there is one among the candidates.
    """
    # The guard measures in one of `measured` steps. FP8 statistics are sampled in one step of each block of `every`.
    # The candidates cover several such periods, so nearly always one of them does not measure. If none is found, as
    # where the guard measures in every step, the first candidate is taken.
    seed, every = run.config.train.seed, run.stats_every
    measured = run.config.guard.measure_every
    if sampled:
        steps = [sampled_step(seed, block, every) for block in range(2 * measured)]
    else:
        steps = [step for step in range(2, 2 + 4 * measured) if not is_sampled(seed, step, every)]
    for step in steps:
        if (step - 1) % measured:
            return step
    return steps[0] if steps else 2


_Seen = TypeVar("_Seen", Op, Collective)


def _repeated(of_step: Sequence[_Seen], batches: int) -> list[_Seen]:
    """All of a step with `batches` micro-batches; copies of the second one stand for those not traced."""
    between = [each for each in of_step if each.micro == _BETWEEN]
    return [*of_step, *between * max(batches - _MICRO_BATCHES, 0)]


class _Tokens:
    """Batches of zeros on the host: tokens, or tensors like those of the config's own data set.

    For a data set, one real micro-batch is read for the shapes and dtypes.
    """

    name = "tokens on fake tensors"
    masked, unit = False, "loss"

    def __init__(self, config: RunConfig, batches: int, recorder: Recorder) -> None:
        train = config.train
        shape = (train.micro_batch, config.data.context)
        self.tokens_per_sample = config.data.context
        names = ["inputs", "targets"]
        if config.data.packing == "documents":
            names.append("segments")
        self._shapes = dict.fromkeys(names, (shape, torch.int64))
        if config.data.target is not None:
            # With as many ranks as micro-batches, rank 0 has exactly one to read.
            ranks = train.global_batch // train.micro_batch
            with recorder.paused(), unset_fake_temporarily():
                data = DatasetBatches(
                    config.data, train.seed, train.global_batch, train.micro_batch
                )
                first = data.micro_batches(data.window(0), 0, ranks)[0]
            self.tokens_per_sample = data.tokens_per_sample
            self._shapes = {}
            for name, values in first.items():
                self._shapes[name] = (tuple(values.shape), values.dtype)
        self._batches = batches
        self._recorder = recorder

    def window(self, index: int) -> Window:
        return Window(index, np.zeros(1, dtype=np.int64))

    def micro_batches(self, window: Window, rank: int, world_size: int) -> Sequence[Batch]:
        with self._recorder.paused():
            return [self._batch() for _ in range(self._batches)]

    def validation(self, rank: int, world_size: int) -> Sequence[Batch]:
        return []

    def _batch(self) -> Batch:
        batch: dict[str, Tensor] = {}
        for name, (shape, dtype) in self._shapes.items():
            batch[name] = torch.zeros(shape, dtype=dtype, device="cpu")
        return batch


class _Engine:
    """An engine that tells the recorder when backward and update run, and the number of each micro-batch."""

    def __init__(self, engine: Any, recorder: Recorder) -> None:
        self._engine, self._recorder = engine, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self._recorder.micro += 1
        with self._engine.micro_batch(last):
            yield

    def backward(self, loss: Tensor) -> None:
        with self._recorder.phased("backward"):
            self._engine.backward(loss)

    def measure(self, thorough: bool, hunts: bool) -> Any:
        self._recorder.micro = 0
        self._recorder.note_lasting()
        with self._recorder.phased("update"):
            return self._engine.measure(thorough, hunts)

    def apply(self, *args: Any) -> Any:
        with self._recorder.phased("update"):
            return self._engine.apply(*args)


class _Loss:
    """A loss adapter that tells the recorder that the model's forward runs."""

    def __init__(self, task: Any, recorder: Recorder) -> None:
        self.vocab_size, self.classes, self.count = task.vocab_size, task.classes, task.count
        self._task, self._recorder = task, recorder

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        with self._recorder.phased("forward"):
            return self._task.loss(module, batch)
