"""Every operation on its way to a device: what it costs, where it comes from, and how much memory is allocated.

Launches, bytes and FLOPs of an ATen operation follow from its name and its tensors' shapes. Kernel counts are those of
PyTorch's CUDA implementations, read from its sources (aten/src/ATen/native/cuda).
"""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from harness.estimate.roofline import Op, Unit
from harness.estimate.routing import Routing
from harness.precision.backends.registry import BACKENDS

GEMMS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm"})
CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})
# And where `is_causal` stands among their arguments; PyTorch leaves out the last ones that are as by default: False.
_CAUSAL = {
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention_backward": 11,
}
ATTENTION = frozenset(_CAUSAL)
# The host waits for the device: the result, or its size, is a value that the device has computed.
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

# aten/src/ATen/native/cuda/MultiTensorApply.cuh: tensors and blocks that one launch takes, by number of lists.
_TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
_BLOCKS_PER_LAUNCH = 320
_CHUNK = 65536
# Of the fused optimizers, which pass a step counter beside each list.
_TENSORS_PER_FUSED_LAUNCH = 36
# aten/src/ATen/native/cuda/Embedding.cu: up to here one kernel counts the indices, else they are sorted.
_EMBEDDING_SMALL = 3072
_CAT_PER_LAUNCH = 128


def touched(tensor: Tensor) -> int:
    """Bytes of the distinct elements: an expanded dimension counts once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return (
        math.prod(size if stride else min(size, 1) for size, stride in sizes)
        * tensor.element_size()
    )


def kernels(
    func: Any, name: str, args: Sequence[Any], ins: Sequence[Tensor], outs: Sequence[Tensor]
) -> int:
    """Launches of `func` on CUDA, 0 for views and allocations."""
    if name in _FREE or name in _VIEWS or (func.is_view and name != "_to_copy"):
        return 0
    if name == "_to_copy" and ins and outs and ins[0] is outs[0]:
        return 0
    if name.startswith(("_foreach", "_fused_")) and args and isinstance(args[0], (list, tuple)):
        return _multi_tensor(name, args)
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
    return 2 if name in ("_fused_rms_norm_backward", "native_layer_norm_backward") else 1


def _multi_tensor(name: str, args: Sequence[Any]) -> int:
    lists = sum(
        1 for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor)
    )
    most = (
        _TENSORS_PER_FUSED_LAUNCH
        if name.startswith("_fused")
        else _TENSORS_PER_LAUNCH.get(lists, 30)
    )
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
                blocks, tensors = 0, 0 if last else 1
    return launches + bool(blocks) + (name == "_foreach_norm")


def traffic(
    name: str, args: Sequence[Any], ins: Sequence[Tensor], outs: Sequence[Tensor]
) -> tuple[int, int]:
    """Bytes read and written, were nothing kept in a cache."""
    if name == "embedding":
        return touched(ins[1]) + touched(outs[0]), touched(outs[0])
    if name == "embedding_dense_backward":
        return touched(ins[0]) + touched(ins[1]), touched(outs[0])
    distinct = {id(tensor): touched(tensor) for tensor in ins}
    if name in _WRITE_ONLY and ins:
        distinct.pop(id(ins[0]), None)
    reads = 0 if name in _FRESH else sum(distinct.values())
    if name.startswith("_fused_") and args and isinstance(args[0], (list, tuple)):
        # Weights and moments are written back, gradients (the second list) are not.
        written = [args[0], *args[2:4]]
    elif name.startswith("_foreach") and name.endswith("_"):
        written = [args[0]]
    else:
        return reads, sum(touched(tensor) for tensor in outs)
    return reads, sum(
        touched(t) for group in written if isinstance(group, (list, tuple)) for t in group
    )


def flops(name: str, args: Sequence[Any], outs: Sequence[Tensor]) -> float:
    """Of GEMMs, convolutions and attention, 2 for a multiplication with its addition; causal attention has half."""
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
        # Two GEMMs forward, five backward (one of them makes the scores again), half of each under a causal mask.
        whole = (10.0 if backward else 4.0) * batch * heads * time * key.shape[2] * width
        return whole / 2 if len(args) > _CAUSAL[name] and args[_CAUSAL[name]] else whole
    return 0.0


def _of_convolution(name: str, args: Sequence[Any], outs: Sequence[Tensor]) -> float:
    """Every weight meets every position of the output, of the input if transposed; backward does it again for each of
    the gradients of input and weight that are wanted."""
    backward = name.endswith("_backward")
    image, weight = args[1:3] if backward else args[:2]
    transposed, result = (args[7], args[0]) if backward else (args[6], outs[0])
    positions = (image if transposed else result).shape
    times = sum(args[10][:2]) if backward else 1
    return 2.0 * times * positions[0] * math.prod(positions[2:]) * weight.numel()


def unit(name: str, ins: Sequence[Tensor], tf32: bool) -> Unit:
    """What computes a GEMM, convolution or attention of these operands. tf32: the card has it."""
    if name not in GEMMS and name not in ATTENTION and name not in CONVOLUTIONS:
        return "none"
    if name.startswith("_scaled_mm"):
        return "fp8"
    if ins[0].dtype != torch.float32:
        return "half"
    if name in CONVOLUTIONS:
        return "tf32" if tf32 and torch.backends.cudnn.allow_tf32 else "fp32"
    return "tf32" if tf32 and torch.get_float32_matmul_precision() != "highest" else "fp32"


# The caching allocator hands out multiples of this (c10/cuda/CUDACachingAllocator.h, kMinBlockSize).
_BLOCK = 512
_DEPTH = 80
_SHOWN_FRAMES = 8
_TORCH = str(Path(torch.__file__ or "").parent) + "/"
_HERE = str(Path(__file__).parent) + "/"
_OPTIM = _TORCH + "optim/"
_GEMM_NAMES = {
    "fp8": "GEMMs in FP8",
    "half": "GEMMs in 16 bits",
    "tf32": "GEMMs in TF32",
    "fp32": "GEMMs in fp32",
}
WEIGHTS, COPIES, BUILT = "weights", "copies of weights", "state of the harness"
_NO_META = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
_PLAIN = (Tensor, FakeTensor, torch.nn.Parameter)
_COMPARISONS = ("lt", "le", "gt", "ge")
_COPIES = ("_to_copy", "copy_", "_copy_from")


@dataclass(frozen=True, slots=True)
class Wait:
    """A place where the host waits for the device. what: the operation. where: innermost frame first."""

    what: str
    phase: str
    where: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One copy between host and device. direction: such as "cpu->cuda". pinned: the host's side is page-locked."""

    direction: str
    bytes: int
    pinned: bool
    non_blocking: bool
    phase: str
    where: tuple[str, ...]


class Recorder(TorchDispatchMode):
    """Records the operations on one kind of device, from all threads that autograd starts, while it is entered.

    device: "cuda" (fakes) or "cpu" (fakes or real tensors). tf32: the card has it. live, peak: bytes of storages in
    `_BLOCK` roundings, now and at most; kinds, kinds_at_peak: the same by kind (see `label`). ops, waits, transfers:
    what was seen since `forget`. phase, step, micro: what the driver of a step says of the operations that follow.

    A host read of a fake value is answered, by zero or true unless it is known, so that the code that asked goes on.
    routing: which rows go to which expert.
    """

    def __init__(self, device: str = "cuda", tf32: bool = True) -> None:
        super().__init__()
        self.device, self.tf32 = device, tf32
        self.ops: list[Op] = []
        self.micros: list[int] = []
        self.waits: list[Wait] = []
        self.transfers: list[Transfer] = []
        self.phase, self.step, self.micro = "build", "", 0
        self.live = self.peak = 0
        self.kinds: Counter[str] = Counter()
        self.kinds_at_peak: Counter[str] = Counter()
        self._shapes: frozenset[tuple[int, ...]] = frozenset()
        self._storages: dict[int, tuple[int, str, weakref.ref[Any]]] = {}
        self._pinned: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._values = WeakIdKeyDictionary()
        self.routing = Routing()
        self._paused = 0

    @contextmanager
    def phased(self, phase: str) -> Iterator[None]:
        """Operations in here belong to `phase`."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operations in here are not recorded: they stand for work that is not the step's."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def label(self, kind: str, tensors: Iterable[Tensor]) -> int:
        """Call the storages of these tensors `kind`; returns their bytes."""
        size = 0
        for tensor in tensors:
            key = id(tensor.untyped_storage())
            if key in self._storages and self._storages[key][1] != kind:
                old_size, old_kind, ref = self._storages[key]
                self._storages[key] = (old_size, kind, ref)
                self.kinds[old_kind] -= old_size
                self.kinds[kind] += old_size
                size += old_size
        return size

    def weights_are(self, parameters: Iterable[Tensor]) -> None:
        """What gradients are told by: their shapes. Labels the weights themselves."""
        weights = list(parameters)
        # Some libraries compute the gradient of the transposed weight.
        self._shapes = frozenset(
            shape for w in weights for shape in (tuple(w.shape), tuple(w.shape[::-1]))
        )
        self.label(WEIGHTS, weights)

    def forget(self) -> None:
        """Drop what was recorded; the peak starts from what lives now."""
        self.ops, self.micros, self.waits, self.transfers = [], [], [], []
        self.peak, self.kinds_at_peak = self.live, Counter(self.kinds)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, Tensor) and kind not in _PLAIN for kind in types):
            return NotImplemented  # torchao's tensors: they say of what plain operations theirs are made
        kwargs = dict(kwargs or {})
        name = func._schema.name.partition("::")[2]
        ins = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fake = any(isinstance(tensor, FakeTensor) for tensor in ins)
        if name == "is_pinned" and fake:
            return ins[0].untyped_storage() in self._pinned
        if name == "_pin_memory" and fake:
            return self._pin(ins[0])
        if self._paused:
            return func(*args, **kwargs)
        self._note_wait(func, name, args, ins)
        if fake and name in ("_local_scalar_dense", "item", "is_nonzero", "equal"):
            return self._answer(name, ins[0])
        # Fused optimizers have no meta kernel; they work in place and return nothing.
        if fake and name in _NO_META:
            out = None
        elif self.device == "cuda":
            out = self.routing.call(func, name, args, kwargs)
        else:
            out = func(*args, **kwargs)
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if fake:
            self._remember(func, name, args, outs)
        of_weights = name not in GEMMS and any(
            self._kind_of(tensor) in (WEIGHTS, COPIES) for tensor in ins
        )
        for tensor in outs:
            self._track(
                tensor, of_weights and any(tensor.numel() == source.numel() for source in ins)
            )
        self._note(func, name, args, kwargs, ins, outs)
        return out

    def _remember(self, func: Any, name: str, args: tuple[Any, ...], outs: list[Tensor]) -> None:
        """Values of 0-d fakes that code gave as numbers, such as a learning rate, and of comparisons with them."""
        source = args[0] if args and isinstance(args[0], FakeTensor) else None
        known = None if source is None else self._values.get(source, source.constant)
        if source is not None and name.endswith("_") and source in self._values:
            del self._values[source]  # written in place
        elif known is not None and outs and name == "_to_copy":
            self._values[outs[0]] = known
        elif (
            known is not None and outs and name in _COMPARISONS and not isinstance(args[1], Tensor)
        ):
            with unset_fake_temporarily():
                self._values[outs[0]] = torch.tensor(getattr(known.item(), f"__{name}__")(args[1]))

    def _answer(self, name: str, tensor: Tensor) -> bool | float | int:
        known = self._values.get(tensor)
        if known is None:
            known = self.routing.value(tensor)
        if known is not None:
            with unset_fake_temporarily():
                return known.item()
        if name in ("is_nonzero", "equal") or tensor.dtype == torch.bool:
            return True
        return 0.0 if tensor.dtype.is_floating_point else 0

    def _pin(self, tensor: Tensor) -> Tensor:
        with self.paused():
            copy = torch.empty_like(tensor)
        self._pinned[copy.untyped_storage()] = True
        return copy

    def _note_wait(self, func: Any, name: str, args: tuple[Any, ...], ins: list[Tensor]) -> None:
        waits = name in WAITING
        if name in ("index", "index_put", "index_put_", "_index_put_impl_") and len(args) > 1:
            # A mask is turned into indices, whose number the host must know; one value for all of them is not.
            masked = any(
                isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)
                for i in args[1] or ()
            )
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
        devices = {tensor.device.type for tensor in (*ins, *outs)}
        if self.device not in devices:
            return
        if len(devices) > 1 and name in _COPIES and outs:
            self._note_transfer(name, args, kwargs, ins, outs)
        count = kernels(func, name, args, ins, outs)
        if not count:
            return
        reads, writes = traffic(name, args, ins, outs)
        frames = _frames()
        kind = unit(name, ins, self.tf32)
        op = Op(
            name=name,
            phase=self.phase,
            purpose=_purpose(func, name, kind, self.phase, frames),
            reads=reads,
            writes=writes,
            flops=flops(name, args, outs),
            unit=kind,
            attention=name in ATTENTION,
            kernels=count,
            shapes=tuple(tuple(tensor.shape) for tensor in (*ins[:4], *outs[:2])),
            where=_told(frames),
            step=self.step,
        )
        self.ops.append(op)
        self.micros.append(self.micro)

    def _note_transfer(
        self, name: str, args: Any, kwargs: dict[str, Any], ins: list[Tensor], outs: list[Tensor]
    ) -> None:
        source, target = (ins[1] if name == "copy_" else ins[0]), outs[0]
        if source.device.type == target.device.type:
            return
        position = 2 if name in ("copy_", "_copy_from") else len(args)
        non_blocking = bool(
            kwargs.get("non_blocking", args[position] if len(args) > position else False)
        )
        direction = f"{source.device.type}->{target.device.type}"
        pinned = (
            source if source.device.type == "cpu" else target
        ).untyped_storage() in self._pinned
        where = _where()
        self.transfers.append(
            Transfer(direction, touched(target), pinned, non_blocking, self.phase, where)
        )
        if not non_blocking:
            self.waits.append(
                Wait(f"blocking copy {direction}, {tuple(target.shape)}", self.phase, where)
            )

    def _kind_of(self, tensor: Tensor) -> str:
        return self._storages.get(id(tensor.untyped_storage()), (0, "", None))[1]

    def _track(self, tensor: Tensor, of_weights: bool) -> None:
        if tensor.device.type != self.device:
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        if key in self._storages or not size:
            return

        def freed(_: Any, key: int = key) -> None:
            size, kind, _ref = self._storages.pop(key, (0, "", None))
            self.live -= size
            self.kinds[kind] -= size

        kind = self._kind(tensor, of_weights)
        self._storages[key] = (size, kind, weakref.ref(storage, freed))
        self.live += size
        self.kinds[kind] += size
        if self.live > self.peak:
            self.peak, self.kinds_at_peak = self.live, Counter(self.kinds)

    def _kind(self, tensor: Tensor, of_weights: bool) -> str:
        if self.phase == "build":
            return BUILT
        if self.phase == "forward":
            return COPIES if of_weights else "activations"
        if self.phase == "backward":
            gradient = tensor.dtype == torch.float32 and tuple(tensor.shape) in self._shapes
            return "gradients" if gradient else "backward's own"
        return "the update's own"


Frame = tuple[str, str, int]


def _frames() -> list[Frame]:
    """(file, qualified name, line) of what is not PyTorch's (but its optimizers) nor this recorder, innermost first."""
    found: list[Frame] = []
    frame = sys._getframe(2)
    while frame is not None and len(found) < _DEPTH:
        path = frame.f_code.co_filename
        own = path.startswith((_TORCH, _HERE)) and not path.startswith(_OPTIM)
        if (
            not own
            and not path.startswith("<")
            and not path.endswith(("/contextlib.py", "/threading.py"))
        ):
            found.append((path, frame.f_code.co_qualname, frame.f_lineno))
        frame = frame.f_back
    return found


def _where() -> tuple[str, ...]:
    return _told(_frames())


def _told(frames: list[Frame]) -> tuple[str, ...]:
    return tuple(
        f"{_short(path)}:{line} {function.rpartition('.')[2]}"
        for path, function, line in frames[:_SHOWN_FRAMES]
    )


def _short(path: str) -> str:
    for mark in ("/site-packages/", "/harness/"):
        before, found, after = path.rpartition(mark)
        if found:
            return after if mark == "/site-packages/" else f"harness/{after}" if before else path
    return path.removeprefix(f"{os.getcwd()}/")


def _purpose(func: Any, name: str, kind: str, phase: str, frames: list[Frame]) -> str:
    """What an operation is for, by where it is called from. Backward's kernels have no frames but of own Functions."""
    if name in GEMMS:
        return _GEMM_NAMES[kind]
    if name in ATTENTION:
        return "attention"
    if name in CONVOLUTIONS:
        return "convolutions"
    files = [_short(path) for path, _, _ in frames]
    sums = ("quantization_stats", "channel_stats")
    if any(function in sums or function.startswith("SampledStats.") for _, function, _ in frames):
        return "FP8 statistics"
    libraries = (f"{backend.library}/" for backend in BACKENDS.values() if backend.library)
    fp8 = ("harness/precision/backends/", "harness/precision/scaling", *libraries)
    if func.namespace == "hopper_harness" or any(file.startswith(fp8) for file in files):
        return "FP8 casts and scales"
    if any(file.startswith(("torch/optim/", "harness/core/update")) for file in files):
        return "optimizer"
    if phase in ("forward", "backward"):
        return "rest of the model"
    return "norms, gate, facts"
