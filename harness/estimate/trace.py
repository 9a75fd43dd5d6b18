"""A run as `harness train` builds it, on a card on paper, and some of its steps under the recorder.

In here PyTorch has one CUDA card, and every new tensor is a fake: shapes, dtypes and addresses, no memory.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from harness.build import Worker, build_run
from harness.capability.cards import Card
from harness.capability.probe import Device, LibraryFacts, MachineFacts, library_facts
from harness.checkpoint.store import Store
from harness.core.config import RunConfig
from harness.core.facts import LayerPlan, Window, is_sampled, sampled_step
from harness.core.protocols import Batch
from harness.core.state import RunLedger
from harness.data.dataset import DatasetBatches
from harness.engines.process_group import Launch, ProcessGroup
from harness.estimate import device
from harness.estimate.recorder import Recorder, Transfer, Wait
from harness.estimate.roofline import Op
from harness.models import build_model
from harness.precision.backends.registry import BACKENDS
from harness.precision.plan import Plan, make_plan
from harness.precision.recipe import Recipe, Rung
from harness.run import Run, train_step
from harness.telemetry import Telemetry
from harness.tracking.console import Console
from harness.tracking.journal import Journal

# Kernels that CUDA has and a CPU-only build takes apart into many.
_ONLY_ON_CUDA = ("_fused_rms_norm", "silu_backward", "mish_backward")
# What FlashAttention-2 takes (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
_FLASH_CAPABILITY = (8, 0)
_FLASH_HEAD_DIM = 256


class PaperEvent:
    """torch.cuda.Event of a device that is always done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: PaperEvent) -> float:
        return 1.0


_ATTEND = F.scaled_dot_product_attention


class _Attention(TorchFunctionMode):
    """Which attention kernel a real card would take: flash from 8.0 on, memory-efficient below (not with grouped
    queries), else plain mathematics. A CPU-only build knows the last one alone.

    `attend` takes the place of torch's function: autograd knows of no mode when activation checkpointing computes
    forward again in backward. The mode is for those who have imported the function itself.
    """

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (self.attend if func is _ATTEND else func)(*args, **kwargs or {})

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """`F.scaled_dot_product_attention`."""
        return (self._attend if _on_cuda(args, kwargs) else _ATTEND)(*args, **kwargs)

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
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        half = query.dtype in (torch.bfloat16, torch.float16)
        kernels = torch.ops.aten
        flashes = self._card.capability >= _FLASH_CAPABILITY and query.shape[-1] <= _FLASH_HEAD_DIM
        if attn_mask is None and half and flashes:
            flash = kernels._scaled_dot_product_flash_attention
            return flash(
                query, key, value, dropout_p, is_causal, return_debug_mask=False, scale=scale
            )[0]
        if attn_mask is None and not enable_gqa:
            efficient = kernels._scaled_dot_product_efficient_attention
            trains = any(tensor.requires_grad for tensor in (query, key, value))
            return efficient(query, key, value, None, trains, dropout_p, is_causal, scale=scale)[0]
        return _ATTEND(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def _on_cuda(args: Any, kwargs: dict[str, Any]) -> bool:
    query = args[0] if args else kwargs.get("query")
    return isinstance(query, FakeTensor) and query.device.type == "cuda"


@contextmanager
def on_paper(card: Card) -> Iterator[FakeTensorMode]:
    """One CUDA device, `card`, and fake tensors. What is changed in torch is as before when the context ends.

    Call `device.load()` before torch is imported; raises MisuseError as that does.
    """
    device.load()
    properties = SimpleNamespace(
        name=card.name,
        major=card.capability[0],
        minor=card.capability[1],
        total_memory=card.memory,
        multi_processor_count=card.processors,
        gcnArchName="",
    )
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
        (torch.cuda, "Event", PaperEvent),
        (torch.version, "cuda", torch.version.cuda or "13.0"),
        # Fakes would otherwise start CUDA, to be sure that it can: a build with CUDA fails at that without a card.
        (FakeTensorMode, "avoid_device_init", property(lambda _: True)),
        (fake_tensor, "init_gpu_context", lambda *_: None),
    ]
    with ExitStack() as stack:
        for owner, name, value in answers:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(warnings.catch_warnings())
        # An address tells one weight from another; fakes have none, and one weight is not taken for another here.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        stack.enter_context(_cuda_kernels())
        attention = stack.enter_context(_Attention(card))
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention.attend))
        yield stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))


@contextmanager
def _cuda_kernels() -> Iterator[None]:
    """Where torch has no CUDA kernels, say that there are those which it would otherwise do without."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name in _ONLY_ON_CUDA:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
                library.impl(name, _never, "CUDA")
        yield
    finally:
        library._destroy()


def _never(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a device on paper was asked to compute")


# The first micro-batch is not as the others (weights are quantised in it), nor is what follows the last; those between
# are alike, so that one of them stands for all.
_MICRO_BATCHES = 3
_BETWEEN = 2
FIRST, USUAL, SAMPLED = "first", "usual", "sampled"


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """What some steps did. steps: operations of each, with all its micro-batches. static: bytes that live between
    steps. peak: at most, in any step; peak_kinds: what it is made of. parameters: elements of the model. routed: its
    router chose which rows an expert computes, evenly here."""

    rung: Rung
    layers: tuple[LayerPlan, ...]
    steps: dict[str, list[Op]]
    static: int
    peak: int
    peak_kinds: Counter[str]
    waits: tuple[Wait, ...]
    transfers: tuple[Transfer, ...]
    parameters: int
    routed: bool


def facts_of(card: Card, others: bool = True) -> MachineFacts:
    """A machine with one `card` and the libraries of this one. others: what cannot run on paper is installed there."""
    assumed = LibraryFacts(None, others, "taken to be installed" if others else "not looked at")
    libraries = library_facts() | {
        backend.library: assumed for backend in BACKENDS.values() if backend.stand_in
    }
    return MachineFacts(
        python=platform.python_version(),
        torch_version=str(torch.__version__),
        torch_cuda=torch.version.cuda or "13.0",
        cuda_available=True,
        devices=(Device(card.name, card.capability, card.memory),),
        libraries=libraries,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class PaperRun:
    """A run whose steps tell `recorder` their phases."""

    run: Run
    plan: Plan
    model: nn.Module
    recorder: Recorder

    def step(self, number: int, name: str) -> None:
        """Run step `number` (from 1); its operations are recorded under `name`."""
        self.recorder.step, self.recorder.micro = name, 0
        self.run.state.step = number - 1
        samples = np.zeros(self.run.config.train.global_batch, dtype=np.int64)
        with self.recorder.phased("step"):
            train_step(self.run, Window(number - 1, samples))


def trace(config: RunConfig, recipe: Recipe, card: Card, rung: Rung, ranks: int = 1) -> Trace:
    """A usual step and a sampled one of the run that `config`, `recipe` and `rung` make on `card`, after a first one.

    ranks: processes that share the global batch; what they say to each other is not part of the trace.
    Raises ConfigError as building the run does.
    """
    batches = config.train.global_batch // (config.train.micro_batch * ranks)
    traced = min(batches, _MICRO_BATCHES)
    with on_card(config, recipe, card, rung, traced) as made:
        recorder, run = made.recorder, made.run
        static = recorder.live
        made.step(1, FIRST)
        made.step(_step(run, sampled=False), USUAL)
        made.step(_step(run, sampled=True), SAMPLED)
        return Trace(
            rung=made.plan.rung,
            layers=made.plan.layers,
            steps={name: _whole(recorder, name, batches) for name in (USUAL, SAMPLED)},
            static=static,
            peak=recorder.peak,
            peak_kinds=recorder.kinds_at_peak,
            waits=tuple(recorder.waits),
            transfers=tuple(recorder.transfers),
            parameters=sum(parameter.numel() for parameter in made.model.parameters()),
            routed=recorder.routing.asked,
        )


@contextmanager
def on_card(
    config: RunConfig, recipe: Recipe, card: Card, rung: Rung, batches: int
) -> Iterator[PaperRun]:
    """The run on `card` on paper, with `batches` micro-batches a step; the recorder is on and knows nothing yet."""
    device, facts, recorder = (
        torch.device("cuda", 0),
        facts_of(card),
        Recorder(tf32=card.capability >= (8, 0)),
    )
    with (
        on_paper(card),
        recorder,
        built(config, recipe, facts, device, rung, batches, recorder) as made,
    ):
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
) -> Iterator[PaperRun]:
    """The run as `harness train` builds it on one process, with `batches` micro-batches a step of made-up tokens.

    Whether its tensors are fakes is up to the caller. It writes no file that outlives this context.
    """
    worker = Worker(Launch(), "single", device, facts, ProcessGroup(device))
    # Copies of the state on the host, for saves and rollbacks, are no memory of the card's.
    config = config.model_copy(
        update={
            "checkpoint": config.checkpoint.model_copy(update={"background": False}),
            "guard": config.guard.model_copy(update={"snapshot_every": 0}),
        }
    )
    torch.manual_seed(config.train.seed)
    # Made on the device: fake parameters cannot be moved and stay the same objects.
    with device:
        model = build_model(config.model)
    _bring(model, device)
    plan = make_plan(recipe, facts, rung, (), model)
    data = _Tokens(config, batches, recorder)
    with (
        tempfile.TemporaryDirectory(prefix="estimate-") as folder,
        open(os.devnull, "w") as nowhere,
    ):
        root = Path(folder)
        screen, store = Console(config.train.steps, stream=nowhere), Store(root, readonly=True)
        telemetry = Telemetry(None, Journal(Path(os.devnull)), screen, config.tracking)
        run = build_run(
            config, recipe, root, worker, plan, model, data, telemetry, RunLedger(), store
        )
        recorder.weights_are(model.parameters())
        recorder.label("buffers", model.buffers())
        optimizer: torch.optim.Optimizer = run.engine.optimizer  # type: ignore[attr-defined]
        state = (value for values in optimizer.state.values() for value in values.values())
        recorder.label("optimizer state", (value for value in state if isinstance(value, Tensor)))
        phased = dataclasses.replace(
            run, engine=_Engine(run.engine, recorder), task=_Loss(run.task, recorder)
        )
        yield PaperRun(phased, plan, model, recorder)


def _bring(model: nn.Module, device: torch.device) -> None:
    """What the model made elsewhere (of NumPy's arrays, say) to `device`, as `harness train` does; ties stay."""
    moved: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or tensor.device.type == device.type:
                    continue
                if tensor not in moved:
                    there = tensor.detach().to(device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    moved[tensor] = (
                        nn.Parameter(there, tensor.requires_grad) if is_parameter else there
                    )
                held[name] = moved[tensor]  # type: ignore[assignment]


def _step(run: Run, sampled: bool) -> int:
    """A step that measures FP8 statistics or not, as asked, and nothing else beyond what every step does, if there is
    one."""
    seed, every, measured = run.config.train.seed, run.stats_every, run.config.guard.measure_every
    steps = [sampled_step(seed, block, every) for block in range(2 * measured)]
    if not sampled:
        steps = [step for step in range(2, 2 + 4 * measured) if not is_sampled(seed, step, every)]
    return next((step for step in steps if (step - 1) % measured), next(iter(steps), 2))


def _whole(recorder: Recorder, step: str, batches: int) -> list[Op]:
    """Operations of a step with `batches` micro-batches, of which at most three were traced: the second is repeated."""
    ops = [op for op in recorder.ops if op.step == step]
    if batches <= _MICRO_BATCHES:
        return ops
    again = [
        op
        for op, micro in zip(recorder.ops, recorder.micros, strict=True)
        if op.step == step and micro == _BETWEEN
    ]
    return ops + again * (batches - _MICRO_BATCHES)


class _Tokens:
    """Batches of fake tokens on the host, or of what the config's own data set has: zeros of the shapes of its first
    micro-batch."""

    name = "tokens on paper"
    masked, unit = False, "loss"

    def __init__(self, config: RunConfig, batches: int, recorder: Recorder) -> None:
        train, shape = config.train, (config.train.micro_batch, config.data.context)
        self.tokens_per_sample = config.data.context
        self._shapes = dict.fromkeys(("inputs", "targets"), (shape, torch.int64))
        if config.data.target is not None:
            with recorder.paused(), unset_fake_temporarily():
                data = DatasetBatches(
                    config.data, train.seed, train.global_batch, train.micro_batch
                )
                first = data.micro_batches(
                    data.window(0), 0, train.global_batch // train.micro_batch
                )[0]
            self.tokens_per_sample = data.tokens_per_sample
            self._shapes = {
                name: (tuple(values.shape), values.dtype) for name, values in first.items()
            }
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
        shapes = self._shapes.items()
        return {
            name: torch.zeros(shape, dtype=dtype, device="cpu") for name, (shape, dtype) in shapes
        }


class _Engine:
    """An engine whose backward and update tell the recorder their phase, and each micro-batch its number."""

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

    def measure(self, shares: bool) -> Any:
        self._recorder.micro = 0
        with self._recorder.phased("update"):
            return self._engine.measure(shares)

    def apply(self, *args: Any) -> Any:
        with self._recorder.phased("update"):
            return self._engine.apply(*args)


class _Loss:
    """A task whose loss is the forward phase."""

    def __init__(self, task: Any, recorder: Recorder) -> None:
        self.vocab_size, self.classes, self.count = task.vocab_size, task.classes, task.count
        self._task, self._recorder = task, recorder

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        with self._recorder.phased("forward"):
            return self._task.loss(module, batch)
