"""Records every operation of a step: what it costs, which code called it, and how much memory is live.

PyTorch dispatches each ATen operation (`mm`, `add`, `_fused_adamw_`) through `Recorder.__torch_dispatch__` before it
reaches a kernel. At this point name, arguments and results are known, also for fake tensors. Two things follow:

- Work. Kernel launches, bytes read and written, and FLOPs depend only on the operation's name and its tensors'
  shapes. `kernels`, `traffic` and `flops` compute them. Launch counts are those of PyTorch's CUDA implementations,
  read from its sources (aten/src/ATen/native/cuda).
- Memory. A storage counts as live from the operation that made it until Python frees it, rounded up as the caching
  allocator does. One that is resized, as FSDP2 frees gathered weights, counts with its new size. The largest sum is
  the peak. Each storage has a kind, such as "gradients", by the phase in which it
  was made.

The recorder also notes where the host waits for the device, and copies between the two.
"""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from harness.core.sharded import local_of
from harness.estimate.memory import Change, Kept, Peak, as_compiled, peak
from harness.estimate.roofline import OPTIMIZER, Op, Piece, Unit
from harness.estimate.routing import Routing
from harness.precision.backends.registry import BACKENDS
from harness.profiling.kinds import CONVOLUTIONS, PRODUCTS

# Attention kernels, with the position of `is_causal` among their arguments. PyTorch omits trailing arguments that have
# their default, so a missing one means False.
_CAUSAL = {
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention_backward": 11,
}
ATTENTION = frozenset(_CAUSAL)
# The host waits for the device in these: the result, or its size, is a value that the device computes.
WAITING = frozenset(
    {
        "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select",
        "_unique", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave",
    }
)  # fmt: skip
_VIEWS = frozenset({"_unsafe_view", "_reshape_alias", "lift_fresh", "detach_", "reshape", "narrow"})
_FREE = frozenset(
    {
        "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_", "set_", "record_stream",
        "is_pinned", "is_same_size", "sym_size", "device", "_has_compatible_shallow_copy_type",
    }
)  # fmt: skip
_WRITE_ONLY = frozenset({"zero_", "fill_", "copy_"})
_OF_TWO_KERNELS = ("_fused_rms_norm_backward", "native_layer_norm_backward", "fp8_cast_sums")
_FRESH = frozenset(
    {
        "zeros",
        "ones",
        "full",
        "zeros_like",
        "ones_like",
        "full_like",
        "new_zeros",
        "new_full",
        "arange",
    }
    | {"scalar_tensor", "normal_", "uniform_"}
)

# aten/src/ATen/native/cuda/MultiTensorApply.cuh: how many tensors one launch takes, by number of lists, and how many
# blocks of how many elements.
_TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
_BLOCKS_PER_LAUNCH = 320
_CHUNK = 65536
# Fused optimizers pass a step counter beside each list, so fewer tensors fit.
_TENSORS_PER_FUSED_LAUNCH = 36
# aten/src/ATen/native/cuda/Embedding.cu: up to this many indices, one kernel counts them; more are sorted.
_EMBEDDING_SMALL = 3072
_CAT_PER_LAUNCH = 128


def touched(tensor: Tensor) -> int:
    """Bytes of the distinct elements: an expanded dimension counts once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        expanded = not stride
        elements *= min(size, 1) if expanded else size
    return elements * tensor.element_size()


def kernels(
    func: Any, name: str, args: Sequence[Any], ins: Sequence[Tensor], outs: Sequence[Tensor]
) -> int:
    """Kernel launches of `func` on CUDA; 0 for views and allocations."""
    # No launch: views, allocations, and a cast that returns its input.
    if name in _FREE or name in _VIEWS or (func.is_view and name != "_to_copy"):
        return 0
    if name == "_to_copy" and ins and outs and ins[0] is outs[0]:
        return 0

    # Operations on lists of tensors take many tensors in a launch.
    if name.startswith(("_foreach", "_fused_")) and args and isinstance(args[0], (list, tuple)):
        return _multi_tensor(name, args)

    # Operations of several kernels; all others are one.
    if name == "_scaled_dot_product_flash_attention_backward":
        return 3
    if name == "_scaled_dot_product_efficient_attention_backward":
        return 2
    if name == "embedding_dense_backward":
        return 2 if len(ins) > 1 and ins[1].numel() <= _EMBEDDING_SMALL else 9
    if name == "cat":
        return max(1, -(-len(args[0]) // _CAT_PER_LAUNCH))
    if name == "convolution_backward":
        return max(1, sum(args[10]))
    return 2 if name in _OF_TWO_KERNELS else 1


def _multi_tensor(name: str, args: Sequence[Any]) -> int:
    """Launches of an operation on lists of tensors, counted as multi_tensor_apply fills its launches.

    A launch is full at a number of tensors or of blocks. A tensor whose blocks do not all fit goes on in the next one.
    """
    if name.startswith("_fused"):
        most = _TENSORS_PER_FUSED_LAUNCH
    else:
        lists = 0
        for arg in args:
            if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor):
                lists += 1
        most = _TENSORS_PER_LAUNCH.get(lists, 30)

    launches = blocks = tensors = 0
    for tensor in args[0]:
        if not isinstance(tensor, Tensor) or not tensor.numel():
            continue
        tensors += 1
        chunks = -(-tensor.numel() // _CHUNK)
        for chunk in range(chunks):
            blocks += 1
            last = chunk == chunks - 1
            if blocks == _BLOCKS_PER_LAUNCH or (tensors == most and last):
                launches += 1
                blocks = 0
                tensors = 0 if last else 1
    if blocks:
        launches += 1
    # A second kernel adds up the norms of the chunks.
    if name == "_foreach_norm":
        launches += 1
    return launches


def traffic(
    name: str, args: Sequence[Any], ins: Sequence[Tensor], outs: Sequence[Tensor]
) -> tuple[int, int]:
    """Bytes read and written, as if no cache kept anything."""
    # An embedding reads only the rows that it returns, not its whole table.
    if name == "embedding":
        return touched(ins[1]) + touched(outs[0]), touched(outs[0])
    if name == "embedding_dense_backward":
        return touched(ins[0]) + touched(ins[1]), touched(outs[0])

    # Of each row of logits a gather reads one, and a scatter writes one.
    if name == "gather":
        return touched(args[2]) + touched(outs[0]), touched(outs[0])
    if name == "scatter_" and isinstance(args[3], Tensor):
        return touched(args[2]) + touched(args[3]), touched(args[3])

    # Reads: each input once, but not one that is only overwritten.
    distinct = {id(tensor): touched(tensor) for tensor in ins}
    if name in _WRITE_ONLY and ins:
        distinct.pop(id(ins[0]), None)
    reads = 0 if name in _FRESH else sum(distinct.values())

    # Writes: the results, or the lists that are updated in place.
    if name.startswith("_fused_") and args and isinstance(args[0], (list, tuple)):
        # Weights and moments are written back, gradients (the second list) are not.
        updated = [args[0], *args[2:4]]
    elif name.startswith("_foreach") and name.endswith("_"):
        updated = [args[0]]
    else:
        return reads, sum(touched(tensor) for tensor in outs)
    writes = 0
    for group in updated:
        if isinstance(group, (list, tuple)):
            writes += sum(touched(tensor) for tensor in group)
    return reads, writes


def flops(name: str, args: Sequence[Any], outs: Sequence[Tensor]) -> float:
    """FLOPs of a GEMM, convolution or attention; 0 for all else. A multiplication with its addition counts 2.

    Causal attention counts half.
    """
    if name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_scaled_mm_v2"):
        left, right = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
        return 2.0 * math.prod(left.shape) * right.shape[-1]
    if name == "_grouped_mm":
        left, right = args[0], args[1]
        groups = left.shape[0] if left.ndim == right.ndim == 3 else 1
        return 2.0 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1]
    if name in CONVOLUTIONS:
        return _of_convolution(name, args, outs)
    if name in ATTENTION:
        backward = name.endswith("_backward")
        query, key = args[1:3] if backward else args[:2]
        batch, heads, time, width = query.shape
        # Forward has two GEMMs. Backward has five, one of which computes the scores again.
        gemms = 5.0 if backward else 2.0
        whole = 2.0 * gemms * batch * heads * time * key.shape[2] * width
        # A causal mask leaves out half of the scores.
        causal = len(args) > _CAUSAL[name] and args[_CAUSAL[name]]
        return whole / 2 if causal else whole
    return 0.0


def _of_convolution(name: str, args: Sequence[Any], outs: Sequence[Tensor]) -> float:
    """FLOPs of a convolution: each weight is multiplied at each position of the output.

    A transposed convolution multiplies at each position of the input. Backward repeats the work for each of the two
    gradients (input, weight) that are wanted.
    """
    if name.endswith("_backward"):
        result, image, weight = args[:3]
        transposed = args[7]
        times = sum(args[10][:2])
    else:
        image, weight = args[:2]
        result = outs[0]
        transposed = args[6]
        times = 1
    positions = (image if transposed else result).shape
    return 2.0 * times * positions[0] * math.prod(positions[2:]) * weight.numel()


def unit(name: str, ins: Sequence[Tensor], tf32: bool) -> Unit:
    """Which arithmetic unit computes a GEMM, convolution or attention of these operands; "none" for all else.

    tf32: whether the card has TF32.
    """
    if name not in PRODUCTS and name not in ATTENTION and name not in CONVOLUTIONS:
        return "none"
    if name.startswith("_scaled_mm"):
        return "fp8"
    if ins[0].dtype != torch.float32:
        return "half"
    if name in CONVOLUTIONS:
        # Not allow_tf32: torch refuses to read it where a script has set the precision of one operation.
        conv: Any = torch.backends.cudnn.conv  # pyright: ignore[reportAttributeAccessIssue]
        return "tf32" if tf32 and conv.fp32_precision == "tf32" else "fp32"
    return "tf32" if tf32 and torch.get_float32_matmul_precision() != "highest" else "fp32"


# The caching allocator hands out multiples of this (c10/cuda/CUDACachingAllocator.h, kMinBlockSize).
_BLOCK = 512
# Frames of a call stack that are looked at, and those that a report shows.
_DEPTH = 80
_SHOWN_FRAMES = 8
_TORCH = str(Path(torch.__file__ or "").parent) + "/"
_HERE = str(Path(__file__).parent) + "/"
_OPTIM = _TORCH + "optim/"
FP8_CASTS = "FP8 casts and scales"
_GEMM_NAMES = {
    "fp8": "GEMMs in FP8",
    "half": "GEMMs in 16 bits",
    "tf32": "GEMMs in TF32",
    "fp32": "GEMMs in fp32",
}
WEIGHTS, COPIES, BUILT = "weights", "copies of weights", "state of the harness"
GATHERED, GRADIENTS = "gathered weights", "gradients"
OPTIMIZER_STATE, BUFFERS = "optimizer state", "buffers"
# What an update finds however small the micro-batches are. Copies of weights are not among it: they can be made again.
LASTING = (WEIGHTS, GRADIENTS, OPTIMIZER_STATE, BUFFERS, BUILT)
# Where FSDP2 gathers weights and reduces gradients: storages that are made in there are named by the function.
_EXCHANGE = "/fsdp/_fully_shard/_fsdp_collectives.py"
_REDUCES = "foreach_reduce"
# Collectives by the operations that start them, with the place of the argument that has the whole tensor.
_COLLECTIVES = {
    "_allgather_base_": ("all-gather", 0),
    "allgather_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "allreduce_": ("all-reduce", 0),
    "broadcast_": ("broadcast", 0),
}
# Fused optimizers cannot run on fakes: they have no meta kernel.
_NO_META = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
_PLAIN = (Tensor, FakeTensor, torch.nn.Parameter)
_COMPARISONS = ("lt", "le", "gt", "ge")
_COPIES = ("_to_copy", "copy_", "_copy_from")


@dataclass(frozen=True, slots=True)
class Wait:
    """A place where the host waits for the device.

    what: the operation.
    phase: the phase of the step, such as "forward".
    where: the call stack, innermost frame first.
    """

    what: str
    phase: str
    where: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """One exchange among ranks.

    name: such as "all-gather".
    bytes: of the whole tensor: what an all-gather gives, what a reduce-scatter or an all-reduce takes.
    phase: the phase of the step, such as "forward".
    step: the name of the step.
    micro: the number of its micro-batch from 1; 0 outside of them.
    """

    name: str
    bytes: int
    phase: str
    step: str
    micro: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One copy between host and device.

    direction: such as "cpu->cuda".
    bytes: size of the copy.
    pinned: whether the host's side is page-locked.
    non_blocking: whether the host goes on at once.
    phase, where: as in `Wait`.
    """

    direction: str
    bytes: int
    pinned: bool
    non_blocking: bool
    phase: str
    where: tuple[str, ...]


class _Storage(NamedTuple):
    """A storage that is live. reference: keeps its finalizer."""

    number: int
    bytes: int
    kind: str
    reference: weakref.ref[Any]


class Recorder(TorchDispatchMode):
    """Records the operations on one kind of device while this context is active, also those of autograd's threads.

    device: "cuda" (fakes) or "cpu" (fakes or real tensors).
    tf32: whether the card has TF32.
    ops: the operations since `forget`.
    waits, transfers, collectives: those since `forget`.
    changes: of the memory that is live, since `forget`, in order.
    phase, step, micro, block: set by the driver of a step; they apply to the operations that follow.
    live: bytes of storages now; each storage is rounded up to `_BLOCK`.
    kinds: the same bytes by kind (see `label`).
    lasting: the most bytes of `LASTING` kinds when an update began.
    routing: which rows go to which expert.

    Code that reads a fake value on the host gets an answer, so that it goes on: the value if it is known, else zero or
    True.
    """

    def __init__(self, device: str = "cuda", tf32: bool = True) -> None:
        super().__init__()
        self.device = device
        self.tf32 = tf32
        self.routing = Routing()

        # What was recorded since `forget`.
        self.ops: list[Op] = []
        self.waits: list[Wait] = []
        self.transfers: list[Transfer] = []
        self.collectives: list[Collective] = []
        self.changes: list[Change] = []

        # Set by the driver of a step.
        self.phase = "build"
        self.step = ""
        self.micro = 0
        self.block: int | None = None

        # Memory, by the storage's id.
        self.live = self.lasting = 0
        self.kinds: Counter[str] = Counter()
        self._before: Counter[str] = Counter()
        self._storages: dict[int, _Storage] = {}
        self._weight_shapes: frozenset[tuple[int, ...]] = frozenset()
        # A number for each storage that was ever seen: ids are used again.
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._numbered = count()

        # Facts about fakes that fakes themselves do not have.
        self._pinned: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._values = WeakIdKeyDictionary()
        self._paused = 0
        self._resizing = mock.patch.object(torch.UntypedStorage, "resize_", self._resized())

    def __enter__(self) -> Recorder:
        super().__enter__()
        self._resizing.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._resizing.stop()
        super().__exit__(*raised)

    def _resized(self) -> Callable[[torch.UntypedStorage, int], torch.UntypedStorage]:
        """`UntypedStorage.resize_`, recorded: FSDP2 frees gathered weights by it. No operation is dispatched there."""
        resize = torch.UntypedStorage.resize_

        def call(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            if id(storage) in self._storages:
                self._resize(id(storage), size)
            return resize(storage, size)

        return call

    def _resize(self, key: int, size: int) -> None:
        """The storage `key` takes `size` bytes from now on."""
        before = self._storages[key]
        after = self._storages[key] = before._replace(bytes=_rounded(size))
        self._count(after.number, after.kind, after.bytes - before.bytes)

    def _count(self, storage: int, kind: str, size: int) -> None:
        """More bytes are live, or fewer, by the storage of this number."""
        self.changes.append(Change(len(self.ops), storage, size, kind))
        self.live += size
        self.kinds[kind] += size

    def peak(self, kept: Iterable[Kept] = ()) -> Peak:
        """The most that was live since `forget`. kept: of steps with compiled blocks (`fusion.py`)."""
        return peak(self._before, as_compiled(self.changes, kept))

    def note_lasting(self) -> None:
        """Call it when an update begins: all gradients are there, and no activations."""
        self.lasting = max(self.lasting, sum(self.kinds[kind] for kind in LASTING))

    @contextmanager
    def phased(self, phase: str) -> Iterator[None]:
        """Operations in this context belong to `phase`."""
        before = self.phase
        self.phase = phase
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operations in this context are not recorded, because they are not part of the step."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def label(self, kind: str, tensors: Iterable[Tensor]) -> int:
        """Give the storages of these tensors the kind `kind`. Returns the bytes whose kind changed."""
        size = 0
        for tensor in tensors:
            key = id(tensor.untyped_storage())
            before = self._storages.get(key)
            if before is not None and before.kind != kind:
                self._storages[key] = before._replace(kind=kind)
                self._count(before.number, before.kind, -before.bytes)
                self._count(before.number, kind, before.bytes)
                size += before.bytes
        return size

    def weights_are(self, parameters: Iterable[Tensor]) -> None:
        """Label the weights, and keep their shapes: in backward, a tensor of such a shape counts as a gradient.

        Of sharded weights, those of the whole ones.
        """
        weights = list(parameters)
        shapes: set[tuple[int, ...]] = set()
        for weight in weights:
            shapes.add(tuple(weight.shape))
            # Some libraries compute the gradient of the transposed weight.
            shapes.add(tuple(weight.shape[::-1]))
        self._weight_shapes = frozenset(shapes)
        self.label(WEIGHTS, map(local_of, weights))

    def forget(self) -> None:
        """Drop what was recorded. The peak starts again from what is live now."""
        self.ops = []
        self.waits = []
        self.transfers = []
        self.collectives = []
        self.changes = []
        self._before = Counter(self.kinds)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Tensor subclasses, such as torchao's, first turn into plain operations, which come here again.
        if any(issubclass(kind, Tensor) and kind not in _PLAIN for kind in types):
            return NotImplemented

        kwargs = dict(kwargs or {})
        name = func._schema.name.partition("::")[2]
        ins = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fake = any(isinstance(tensor, FakeTensor) for tensor in ins)

        # Fakes cannot be page-locked: the recorder remembers which ones stand for page-locked memory.
        if name == "is_pinned" and fake:
            return ins[0].untyped_storage() in self._pinned
        if name == "_pin_memory" and fake:
            return self._pin(ins[0])
        if self._paused:
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            self._note_collective(name, args)
            return func(*args, **kwargs)

        # The host asks for a value. A fake has none, so the recorder answers.
        self._note_wait(func, name, args, ins)
        if fake and name in ("_local_scalar_dense", "item", "is_nonzero", "equal"):
            return self._answer(name, ins[0])

        # Run the operation. Fused optimizers work in place and return nothing, so skipping them is enough.
        if fake and name in _NO_META:
            out = None
        elif self.device == "cuda":
            out = self.routing.call(func, name, args, kwargs)
        else:
            out = func(*args, **kwargs)
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if kwargs.get("pin_memory"):
            self._pinned[outs[0].untyped_storage()] = True
        if fake:
            self._remember(func, name, args, outs)

        # Memory: what the operation made. A cast or transpose of a weight has as many elements as the weight.
        reads_weights = any(self._kind_of(tensor) in (WEIGHTS, GATHERED, COPIES) for tensor in ins)
        may_copy = name not in PRODUCTS and reads_weights
        for tensor in outs:
            same_size = any(tensor.numel() == source.numel() for source in ins)
            self._track(tensor, may_copy and same_size)

        self._note(func, name, args, kwargs, ins, outs)
        return out

    def _remember(self, func: Any, name: str, args: tuple[Any, ...], outs: list[Tensor]) -> None:
        """Keep the values of 0-d fakes that were made from numbers, such as a learning rate.

        Comparisons of such a fake with a number are kept too: code may branch on them.
        """
        source = args[0] if args and isinstance(args[0], FakeTensor) else None
        if source is None:
            return
        value = self._values.get(source, source.constant)
        if name.endswith("_") and source in self._values:
            # Written in place: its value is no longer known.
            del self._values[source]
        elif value is None or not outs:
            return
        elif name == "_to_copy":
            self._values[outs[0]] = value
        elif name in _COMPARISONS and not isinstance(args[1], Tensor):
            with unset_fake_temporarily():
                compare = getattr(value.item(), f"__{name}__")
                self._values[outs[0]] = torch.tensor(compare(args[1]))

    def _answer(self, name: str, tensor: Tensor) -> bool | float | int:
        """The value of `tensor` where it is known. Else True for a question, and zero for a number."""
        value = self._values.get(tensor)
        if value is None:
            value = self.routing.value(tensor)
        if value is not None:
            with unset_fake_temporarily():
                return value.item()
        if name in ("is_nonzero", "equal") or tensor.dtype == torch.bool:
            return True
        return 0.0 if tensor.dtype.is_floating_point else 0

    def _pin(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` that counts as page-locked."""
        with self.paused():
            copy = torch.empty_like(tensor)
        self._pinned[copy.untyped_storage()] = True
        return copy

    def _note_wait(self, func: Any, name: str, args: tuple[Any, ...], ins: list[Tensor]) -> None:
        """Record a wait if the host needs a value, or a size, that the device computes."""
        waits = name in WAITING
        if name in ("index", "index_put", "index_put_", "_index_put_impl_") and len(args) > 1:
            # A mask becomes indices, and the host must know how many. Writing one value through a mask needs none.
            masked = False
            for index in args[1] or ():
                if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                    masked = True
            waits = masked and (name == "index" or args[2].numel() != 1)
        if waits and any(tensor.device.type == self.device == "cuda" for tensor in ins):
            self.waits.append(Wait(str(func), self.phase, _where()))

    def _note(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: dict[str, Any],
        ins: list[Tensor],
        outs: list[Tensor],
    ) -> None:
        """Record the operation's work, if it runs on the device and launches a kernel."""
        devices = {tensor.device.type for tensor in (*ins, *outs)}
        if self.device not in devices:
            return
        # A copy between host and device is also traffic of the bus.
        if len(devices) > 1 and name in _COPIES and outs:
            self._note_transfer(name, args, kwargs, ins, outs)
        # Views and the like launch nothing.
        launches = kernels(func, name, args, ins, outs)
        if not launches:
            return
        read = [tensor for tensor in ins if tensor is not kwargs.get("out")]
        reads, writes = traffic(name, args, read, outs)

        # Where in the model and in the step the operation belongs.
        frames = _frames()
        kind = unit(name, ins, self.tf32)
        own = func.namespace == "hopper_harness"
        op = Op(
            name=name,
            phase=self.phase,
            purpose=_purpose(own, name, kind, self.phase, frames),
            reads=reads,
            writes=writes,
            flops=flops(name, args, outs),
            unit=kind,
            attention=name in ATTENTION,
            kernels=launches,
            shapes=tuple(tuple(tensor.shape) for tensor in (*ins[:4], *outs[:2])),
            where=_shown(frames),
            step=self.step,
            micro=self.micro,
            block=self.block,
            inputs=self._pieces(read),
            outputs=self._pieces(outs),
            own=own,
        )
        self.ops.append(op)

    def _pieces(self, tensors: Iterable[Tensor]) -> tuple[Piece, ...]:
        """What these tensors have of storages on the device; each once."""
        found: dict[Piece, None] = {}
        for tensor in tensors:
            if tensor.device.type != self.device:
                continue
            number = self._number(tensor.untyped_storage())
            size = tensor.element_size()
            piece = Piece(number, int(tensor.storage_offset()), touched(tensor) // size, size)
            found[piece] = None
        return tuple(found)

    def _number(self, storage: torch.UntypedStorage) -> int:
        number = self._numbers.get(storage)
        if number is None:
            number = self._numbers[storage] = next(self._numbered)
        return number

    def _note_collective(self, name: str, args: Sequence[Any]) -> None:
        """Record an exchange with other ranks."""
        if name not in _COLLECTIVES:
            return
        named, place = _COLLECTIVES[name]
        size = 0
        for tensor in tree_leaves(args[place]):
            if isinstance(tensor, Tensor):
                size += tensor.nbytes
        self.collectives.append(Collective(named, size, self.phase, self.step, self.micro))

    def _note_transfer(
        self, name: str, args: Any, kwargs: dict[str, Any], ins: list[Tensor], outs: list[Tensor]
    ) -> None:
        """Record a copy between host and device, and that the host waits for it unless it is non_blocking."""
        source = ins[1] if name == "copy_" else ins[0]
        target = outs[0]
        if source.device.type == target.device.type:
            return

        # `non_blocking` may be a positional argument of these two; of `_to_copy` it is always named.
        by_position = False
        if name in ("copy_", "_copy_from") and len(args) > 2:
            by_position = args[2]
        non_blocking = bool(kwargs.get("non_blocking", by_position))

        direction = f"{source.device.type}->{target.device.type}"
        on_host = source if source.device.type == "cpu" else target
        pinned = on_host.untyped_storage() in self._pinned
        where = _where()
        self.transfers.append(
            Transfer(direction, touched(target), pinned, non_blocking, self.phase, where)
        )
        if not non_blocking:
            self.waits.append(
                Wait(f"blocking copy {direction}, {tuple(target.shape)}", self.phase, where)
            )

    def _kind_of(self, tensor: Tensor) -> str:
        found = self._storages.get(id(tensor.untyped_storage()))
        return "" if found is None else found.kind

    def _track(self, tensor: Tensor, of_weights: bool) -> None:
        """Count the tensor's storage as live until it is freed. of_weights: it may be a copy of a weight."""
        if tensor.device.type != self.device:
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        size = _rounded(storage.nbytes())
        if key in self._storages or not size:
            return

        def freed(_: Any, key: int = key) -> None:
            gone = self._storages.pop(key)
            self._count(gone.number, gone.kind, -gone.bytes)

        # The finalizer runs when the last tensor over this memory is gone.
        number, kind = self._number(storage), self._kind(tensor, of_weights)
        self._storages[key] = _Storage(number, size, kind, weakref.ref(storage, freed))
        self._count(number, kind, size)

    def _kind(self, tensor: Tensor, of_weights: bool) -> str:
        """What a new storage is, by the phase in which it is made."""
        if self.phase == "build":
            return BUILT
        if exchange := _exchange():
            return GRADIENTS if exchange == _REDUCES else GATHERED
        if self.phase == "forward":
            return COPIES if of_weights else "activations"
        if self.phase == "backward":
            gradient = tensor.dtype == torch.float32 and tuple(tensor.shape) in self._weight_shapes
            return GRADIENTS if gradient else "backward's own"
        return "the update's own"


def _rounded(size: int) -> int:
    """Bytes that the caching allocator hands out for `size`."""
    return -(-size // _BLOCK) * _BLOCK


def _exchange() -> str:
    """The function of FSDP2 that gathers weights or reduces gradients, if one is running; else empty."""
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is None:
            break
        if frame.f_code.co_filename.endswith(_EXCHANGE):
            return frame.f_code.co_name
        frame = frame.f_back
    return ""


Frame = tuple[str, str, int]


def _frames() -> list[Frame]:
    """The call stack as (file, qualified name, line), innermost frame first.

    Frames of PyTorch (but not of its optimizers), of this package and of generated code say nothing about the step and
    are left out.
    """
    found: list[Frame] = []
    frame = sys._getframe(2)
    while frame is not None and len(found) < _DEPTH:
        path = frame.f_code.co_filename
        internal = path.startswith((_TORCH, _HERE)) and not path.startswith(_OPTIM)
        generated = path.startswith("<")
        plumbing = path.endswith(("/contextlib.py", "/threading.py"))
        if not (internal or generated or plumbing):
            found.append((path, frame.f_code.co_qualname, frame.f_lineno))
        frame = frame.f_back
    return found


def _where() -> tuple[str, ...]:
    return _shown(_frames())


def _shown(frames: list[Frame]) -> tuple[str, ...]:
    """The innermost frames as text: `file:line function`."""
    texts: list[str] = []
    for path, function, line in frames[:_SHOWN_FRAMES]:
        texts.append(f"{_short(path)}:{line} {function.rpartition('.')[2]}")
    return tuple(texts)


def _short(path: str) -> str:
    """`path` from the package's folder on, or from the working folder on."""
    _, found, after = path.rpartition("/site-packages/")
    if found:
        return after
    before, found, after = path.rpartition("/harness/")
    if found:
        return f"harness/{after}" if before else path
    return path.removeprefix(f"{os.getcwd()}/")


def _purpose(own: bool, name: str, kind: str, phase: str, frames: list[Frame]) -> str:
    """What an operation is for, as reports group it.

    GEMMs, attention and convolutions follow from the operation. Everything else follows from the calling code. Backward
    has no Python frames except those of our own autograd Functions, so there the phase decides.
    """
    if name in PRODUCTS:
        return _GEMM_NAMES[kind]
    if name in ATTENTION:
        return "attention"
    if name in CONVOLUTIONS:
        return "convolutions"

    # Statistics are called from FP8 code, so they are asked for first.
    for _, function, _ in frames:
        statistics = function in ("quantization_stats", "channel_stats")
        if statistics or function.startswith("SampledStats."):
            return "FP8 statistics"

    files = [_short(path) for path, _, _ in frames]
    libraries = [f"{backend.library}/" for backend in BACKENDS.values() if backend.library]
    fp8 = ("harness/precision/backends/", "harness/precision/scaling", *libraries)
    if own or any(file.startswith(fp8) for file in files):
        return FP8_CASTS
    if any(file.startswith(("torch/optim/", "harness/core/update")) for file in files):
        return OPTIMIZER
    if phase in ("forward", "backward"):
        return "rest of the model"
    return "norms, gate, facts"
