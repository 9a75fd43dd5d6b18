"""Builds a model without its weights, and computes the weights one tensor at a time.

For models that no device holds whole. Building such a model takes three steps:

1. `build` calls the model's constructor. Tensors of more than a few thousand elements have a shape there and no memory.
   What the constructor does to them is recorded: `normal_(0, 0.02)`, `mul_(0.5)`, `zero_` of a row. Random operations
   really run, each on one tensor that is thrown away. So the random generator goes through the same states as when the
   model is built whole, and the state before each operation is part of the record.
2. `build` then returns the model on torch's meta device.
3. `Recording.value` repeats what was recorded of one tensor. The values are those of a model that is built whole, bit
   for bit. `computing` does this within a forward, for each operation that reads a weight.

Values may also come from a file (`Source`). `Recording.rows` then reads some rows of a tensor without the others, also
where the constructor has converted them, or merged several tensors of the file. `try_model` runs such a model without
reading its matrices.

A constructor may read a value (`while mask.any()`): it is computed then. Whatever cannot be recorded raises
`CannotDeferError`, and the caller builds the model whole. During construction tensors without memory look like
those of a CPU, because some of torch's initialisers (truncated normal) do nothing on the meta device.

A few calls still fail on a tensor without memory, or give another answer: `numpy()`, `data_ptr()`, a pickle. A
constructor may catch such an error, or compare such an answer, and then initialise the model in another way. So the
first such call is noted (`_Differences`), and the model is built whole. So it is where the constructor compares the
exact type of a tensor (`core/exact_types.py`).
"""

from __future__ import annotations

import gc
import math
import warnings
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from harness.core.exact_types import comparing, functions_called

SMALL = 4096
"""Tensors that are made with at most this many elements have memory from the start."""

_T = TypeVar("_T")
_META = torch.device("meta")
_CPU = torch.device("cpu")
# These write every element of their first argument and read none of them.
_REWRITES = (
    "aten::normal_",
    "aten::uniform_",
    "aten::random_",
    "aten::exponential_",
    "aten::log_normal_",
    "aten::cauchy_",
    "aten::geometric_",
    "aten::zero_",
    "aten::fill_",
    "aten::copy_",
)
# These give a tensor other memory, or memory of another size.
_MOVES = ("aten::set_", "aten::resize_", "aten::resize_as_", "aten::_resize_output_")
# These show or walk the memory itself, which is not there: an address, the bytes, a pickle of them, each element.
_SHOW_MEMORY = (
    Tensor.apply_,
    Tensor.__repr__,
    Tensor.data_ptr,
    Tensor.storage,
    Tensor.untyped_storage,
    Tensor._typed_storage,
    Tensor.__dlpack__,
    Tensor.__reduce_ex__,
)
# A matrix is made up of this many random numbers, over and over. A prime, so its rows are not alike.
_RANDOM = 131_071
# Operators with these tags return what depends on values: they are computed at once.
_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class CannotDeferError(Exception):
    """The constructor does what cannot be recorded, or the model holds what cannot be computed later."""


class Source(ABC):
    """A tensor whose values can be had at any time, such as one of a file; see `later`.

    place: names the bytes that are read. Ranks whose sources have the same place read the same values.
    """

    place: str

    @abstractmethod
    def __call__(self) -> Tensor:
        """The whole tensor, on the CPU."""

    @abstractmethod
    def rows(self, begin: int, end: int) -> Tensor:
        """Its rows [begin, end), on the CPU."""


@dataclass(slots=True, eq=False)
class _Memory:
    """The memory that a tensor would have: its size in bytes, and every operation that writes it, in order."""

    size: int
    log: list[_Operation] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _View:
    """Where in a memory a tensor's elements are."""

    memory: _Memory
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def is_all(self) -> bool:
        """Whether the elements cover all of the memory."""
        elements = 1
        for size in self.shape:
            elements *= size
        return 0 not in self.stride and elements * self.dtype.itemsize == self.memory.size

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are in memory from its begin, row after row."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if stride != step and size > 1:
                return False
            step *= size
        return self.offset == 0

    def over(self, base: Tensor) -> Tensor:
        """The tensor, over the real memory of `base`."""
        empty = torch.empty(0, dtype=self.dtype, device=_CPU)
        return empty.set_(base.untyped_storage(), self.offset, self.shape, self.stride)


@dataclass(slots=True, eq=False)
class _Operation:
    """One recorded operation.

    number: counts the operations of a recording.
    function: an operator of torch.
    arguments: flattened; tensors without memory as a `_View`.
    layout: to unflatten them with.
    rewrites: whether all that was in the memory before is lost.
    random: the state of the generator before it; None: it draws no random numbers.
    results: new tensors that it returned, in order; None for other results.
    """

    number: int
    function: Callable[..., Any]
    arguments: list[Any]
    layout: Any
    rewrites: bool
    random: Tensor | None
    results: list[_View | None]

    def run(self, tensor_of: Callable[[_View], Tensor]) -> list[Any]:
        """Run it on real tensors; returns its results, flattened."""
        arguments: list[Any] = []
        for value in self.arguments:
            if isinstance(value, _View):
                value = tensor_of(value)
            elif isinstance(value, torch.Generator):
                value = torch.Generator()
                assert self.random is not None
                value.set_state(self.random)
            arguments.append(value)
        args, kwargs = tree_unflatten(arguments, self.layout)
        if self.random is None:
            return tree_flatten(self.function(*args, **kwargs))[0]

        # The operation draws what it would have drawn; the caller's generator is restored.
        before = torch.get_rng_state()
        torch.set_rng_state(self.random)
        try:
            return tree_flatten(self.function(*args, **kwargs))[0]
        finally:
            torch.set_rng_state(before)


class Recording:
    """What a constructor did to the tensors of a model that have no memory.

    device: where `computing` computes.
    small: tensors that are made with at most this many elements have memory from the start.

    places: those of all sources that values are read from.
    made_up: whether the values of large sources are made up, instead of being read.
    """

    def __init__(self, device: torch.device, small: int = SMALL) -> None:
        self.device = device
        self.places: set[str] = set()
        self.made_up = False
        self._small = small
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._count = 0
        # By the address of what stands for the memory. The tensors are kept, so no address is used twice.
        self._memories: dict[int, _Memory] = {}
        self._kept: list[Tensor] = []
        # In a list: sets compare their elements, and tensors compare by value.
        self._living: list[ReferenceType[FakeTensor]] = []
        self._scratch = torch.empty(0, dtype=torch.uint8, device=_CPU)
        self._finished = False
        # Why it cannot be recorded, if a constructor catches the error and goes on.
        self.refused = ""

    # ---- Looking at tensors

    def holds(self, tensor: object) -> bool:
        """Whether `tensor` is one without memory, whose values can be computed."""
        if isinstance(tensor, FakeTensor):
            return _address(tensor) in self._memories
        if not self._finished or not isinstance(tensor, Tensor) or tensor.device != _META:
            return False
        return _address(tensor) in self._memories

    def view(self, tensor: Tensor) -> _View:
        """Where the elements of a tensor that `holds` are."""
        memory = self._memories[_address(tensor)]
        return _View(
            memory,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
        )

    # ---- Recording

    def record(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run one operation of the constructor, on tensors with and without memory."""
        flat, layout = tree_flatten((args, kwargs))
        tensors = [each for each in flat if isinstance(each, Tensor)]
        if not any(map(self.holds, tensors)):
            if _moves_from_meta(function, tensors, kwargs):
                return self._make_like(tensors[0], kwargs.get("dtype"))
            if tensors or not _makes_on_cpu(function, kwargs):
                return function(*args, **kwargs)
            return self._make(function, args, kwargs)

        # An operation whose results depend on values, or that writes real memory, needs real values.
        written = _written(function, args, kwargs)
        writes_real = any(not self.holds(each) for each in written)
        if writes_real or any(tag in function.tags for tag in _READS):
            if any(map(self.holds, written)):
                raise self.refusal(f"{_name(function)} writes tensors of two kinds")
            return self._at_once(function, flat, layout)

        if _name(function) in _MOVES or len(written) > 1:
            raise self.refusal(f"{_name(function)} cannot be repeated for one tensor")
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            raise self.refusal(f"{_name(function)} copies a tensor to {device}")

        with self._fakes:
            made = function(*args, **kwargs)
        return self._note(function, flat, layout, written, made)

    def later(self, source: Source, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor whose values are read from `source` when they are needed."""
        with self._fakes:
            made = torch.empty(shape, dtype=dtype, device=_CPU)
        self.places.add(source.place)
        flat, layout = tree_flatten(((), {}))
        return self._note(source, flat, layout, [], made)

    def refusal(self, why: str) -> CannotDeferError:
        """The error for what cannot be recorded. A constructor that catches it does not go unnoticed."""
        self.refused = self.refused or why
        return CannotDeferError(why)

    def record_write(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Record an operation that writes a tensor of the finished model."""
        flat, layout = tree_flatten((args, kwargs))
        written = _written(function, args, kwargs)
        return self._note(function, flat, layout, written, None)

    def _make(self, function: Any, args: Any, kwargs: Any) -> Any:
        """A new tensor, with memory if it is small."""
        try:
            with self._fakes:
                made = function(*args, **{**kwargs, "device": _CPU})
        except (RuntimeError, NotImplementedError, TypeError):
            # It has no version without values.
            return function(*args, **kwargs)
        if not isinstance(made, Tensor) or made.numel() <= self._small:
            return function(*args, **kwargs)
        # Stated explicitly: the defaults may have changed when it is repeated.
        kwargs = {**kwargs, "device": _CPU, "dtype": made.dtype}
        flat, layout = tree_flatten((args, kwargs))
        return self._note(function, flat, layout, [], made)

    def _make_like(self, tensor: Tensor, dtype: torch.dtype | None) -> Any:
        """A new tensor on the CPU in the form of one of the meta device. Both have no values."""
        form = (tuple(tensor.shape), tuple(tensor.stride()))
        kwargs = {"dtype": dtype or tensor.dtype, "device": _CPU}
        return self._make(torch.ops.aten.empty_strided.default, form, kwargs)

    def _at_once(self, function: Any, flat: list[Any], layout: Any) -> Any:
        """What the operation gives on real values."""
        seen: dict[tuple[int, int], Tensor] = {}
        real = [self._real(self.view(x), seen) if self.holds(x) else x for x in flat]
        args, kwargs = tree_unflatten(real, layout)
        return function(*args, **kwargs)

    def _note(
        self, function: Any, flat: list[Any], layout: Any, written: list[Tensor], made: Any
    ) -> Any:
        """Record an operation with its results; returns these."""
        random = None
        if torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
            random = self._draw(function, flat, layout, written)

        # Real arguments are copied: the constructor may change them later.
        arguments: list[Any] = []
        for value in flat:
            if self.holds(value):
                value = self.view(value)
            elif isinstance(value, Tensor):
                value = value.detach().to(_CPU, copy=True)
            arguments.append(value)
        target = self.view(written[0]) if written else None
        rewrites = False
        if target is not None:
            rewrites = target.is_all and _name(function) in _REWRITES
        operation = _Operation(
            self._count, function, arguments, layout, rewrites, random, results=[]
        )
        self._count += 1
        if target is not None:
            target.memory.log.append(operation)
            return written[0]

        # What shares memory with an argument is a view, and nothing was computed.
        given = {_address(each) for each in flat if isinstance(each, Tensor)}
        for result in tree_flatten(made)[0]:
            if isinstance(result, FakeTensor):
                self._living.append(ref(result))
            if not isinstance(result, Tensor) or _address(result) in given:
                operation.results.append(None)
                continue
            assert isinstance(result, FakeTensor)
            memory = _Memory(result.untyped_storage().nbytes(), [operation])
            self._memories[_address(result)] = memory
            operation.results.append(self.view(result))
        return made

    def _draw(self, function: Any, flat: list[Any], layout: Any, written: list[Tensor]) -> Tensor:
        """Take the same random numbers as the operation does; returns the generator's state before."""
        generator = torch.default_generator
        seen: dict[tuple[int, int], Tensor] = {}
        real: list[Any] = []
        for value in flat:
            if isinstance(value, torch.Generator):
                generator = value
            elif self.holds(value):
                view = self.view(value)
                unread = any(value is each for each in written) and _name(function) in _REWRITES
                value = self._thrown_away(view) if unread else self._real(view, seen)
            real.append(value)
        # The state that the operation begins with is kept, and the generator moves on as if it had run.
        state = generator.get_state()
        args, kwargs = tree_unflatten(real, layout)
        with torch.no_grad():
            function(*args, **kwargs)
        return state

    def _thrown_away(self, view: _View) -> Tensor:
        """A tensor of any values with the layout of `view`, whose values nobody will read."""
        last = sum((size - 1) * step for size, step in zip(view.shape, view.stride, strict=True))
        needed = (last + 1) * view.dtype.itemsize if 0 not in view.shape else 0
        # One memory for all: new ones would leave holes in the heap, as large as the model together.
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8, device=_CPU)
        return replace(view, offset=0).over(self._scratch)

    # ---- Computing

    @torch.no_grad()
    def value(self, view: _View) -> Tensor:
        """The values of a tensor, on the CPU."""
        return self._real(view, {})

    def _real(self, view: _View, seen: dict[tuple[int, int], Tensor]) -> Tensor:
        return view.over(self._base(view.memory, self._count, seen))

    def _base(self, memory: _Memory, before: int, seen: dict[tuple[int, int], Tensor]) -> Tensor:
        """The memory as it was before the operation of number `before`. seen: what was computed already."""
        log = memory.log[: bisect_left(memory.log, before, key=lambda each: each.number)]
        key = (id(memory), len(log))
        if key in seen:
            return seen[key]

        # Begin at the last operation that overwrites all of the memory.
        start = 0
        for index, operation in enumerate(log):
            if operation.rewrites:
                start = index

        base: Tensor | None = None
        # Replay the rest in their order.
        for operation in log[start:]:
            if any(each is not None and each.memory is memory for each in operation.results):
                base = self._created(operation, memory, seen)
                continue
            if base is None:
                base = torch.empty(memory.size, dtype=torch.uint8, device=_CPU)
            written, number = base, operation.number

            # Bound now, as the loop goes on.
            def tensor_of(view: _View, written: Tensor = written, number: int = number) -> Tensor:
                if view.memory is memory:
                    return view.over(written)
                return view.over(self._base(view.memory, number, seen))

            operation.run(tensor_of)
        assert base is not None
        seen[key] = base
        return base

    def _created(
        self, operation: _Operation, memory: _Memory, seen: dict[tuple[int, int], Tensor]
    ) -> Tensor:
        """The memory of a new tensor, as the operation that made it left it."""
        if self.made_up and self._can_make_up(operation):
            return _made_up(operation)
        results = operation.run(
            lambda view: view.over(self._base(view.memory, operation.number, seen))
        )
        # The views of the record are those of the layout that was expected.
        base = torch.empty(memory.size, dtype=torch.uint8, device=_CPU)
        for view, result in zip(operation.results, results, strict=True):
            if view is None or view.memory is not memory:
                continue
            same = tuple(result.stride()) == view.stride and result.storage_offset() == view.offset
            if same and result.untyped_storage().nbytes() == memory.size:
                return result
            view.over(base).copy_(result)
        return base

    def _can_make_up(self, operation: _Operation) -> bool:
        """Whether it reads a large matrix of weights. Small tensors cost little; integers may be indices or masks."""
        view = operation.results[0]
        if not isinstance(operation.function, Source) or view is None:
            return False
        is_matrix = len(view.shape) > 1 and math.prod(view.shape) > self._small
        return is_matrix and view.dtype.is_floating_point

    # ---- Rows

    def has_rows(self, view: _View) -> bool:
        """Whether `rows` can read some rows of a tensor without the others."""
        return _row_reader(view) is not None

    @torch.no_grad()
    def rows(self, view: _View, begin: int, end: int) -> Tensor:
        """The rows [begin, end) of a tensor that `has_rows`, on the CPU. Nothing else of it is read."""
        if begin >= end:
            return torch.empty((0, *view.shape[1:]), dtype=view.dtype, device=_CPU)
        read = _row_reader(view)
        assert read is not None, "has_rows was not asked"
        return read(begin, end)

    # ---- The finished model

    def finish(self, model: nn.Module) -> None:
        """Replace the model's tensors without memory by tensors of the meta device.

        Raises CannotDeferError if something besides the model still holds one of them.
        """
        if self.refused:
            raise CannotDeferError(self.refused)
        memories = self._put_on_meta(model)

        # A tensor that the model keeps in a list, or that a function refers to, would stay without values.
        gc.collect()
        shapes: set[str] = set()
        for reference in self._living:
            tensor = reference()
            if tensor is not None:
                shapes.add(str(list(tensor.shape)))
        if shapes:
            why = f"tensors are neither parameters nor buffers: {', '.join(sorted(shapes)[:3])}"
            raise CannotDeferError(why)
        self._memories = memories
        self._finished = True
        self._scratch = torch.empty(0, dtype=torch.uint8, device=_CPU)

    def _put_on_meta(self, model: nn.Module) -> dict[int, _Memory]:
        """Replace the model's tensors without memory; returns the memories by the addresses of the new ones."""
        moved: dict[int, Tensor] = {}
        names: dict[_Memory, str] = {}
        memories: dict[int, _Memory] = {}
        # Alive until all are replaced: a tensor that is made meanwhile must not get the id of one in `moved`.
        replaced: list[Tensor] = []
        for name, table, key in _tables(model):
            tensor = table[key]
            if is_lazy(tensor):
                raise CannotDeferError(f"{name} gets its shape in the first forward")
            if tensor.device == _META:
                raise CannotDeferError(f"{name} has no values")
            if not isinstance(tensor, FakeTensor):
                tensor.data = tensor.data.to(self.device)
                continue

            # The first place of this tensor, or another one of a tied tensor.
            if id(tensor) not in moved:
                memory = self.view(tensor).memory
                if memory in names:
                    raise CannotDeferError(f"{name} and {names[memory]} share memory")
                names[memory] = name
                on_meta = _on_meta(tensor)
                memories[_address(on_meta)] = memory
                moved[id(tensor)] = on_meta
                # Kept, or a second tensor might get the same address.
                self._kept.append(on_meta)
                replaced.append(tensor)
            table[key] = moved[id(tensor)]
        return memories

    @contextmanager
    def stand_ins(self, model: nn.Module) -> Iterator[None]:
        """Context in which the model's tensors without memory look like those of `device`: autocast asks for that."""
        before: list[tuple[dict[str, Any], str, Tensor]] = []
        made: dict[int, Tensor] = {}
        try:
            for _, table, key in _tables(model):
                tensor = table[key]
                if not self.holds(tensor):
                    continue
                if id(tensor) not in made:
                    fake: Tensor = FakeTensor(self._fakes, tensor.detach(), self.device)
                    # A tensor that two modules share stays one.
                    if isinstance(tensor, nn.Parameter):
                        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = fake
                before.append((table, key, tensor))
                table[key] = made[id(tensor)]
            yield
        finally:
            for table, key, tensor in before:
                table[key] = tensor


def _made_up(operation: _Operation) -> Tensor:
    """Random values of a usual size instead of a source's own; the same at each call, on every rank."""
    view = operation.results[0]
    assert view is not None
    generator = torch.Generator().manual_seed(operation.number)
    numbers = torch.randn(_RANDOM, generator=generator, device="cpu") * view.shape[-1] ** -0.5
    values = torch.empty(view.shape, dtype=view.dtype, device=_CPU)
    # Copied over and over: to draw all of them would take longer than to read a file.
    flat = values.view(-1)
    whole = flat.numel() // _RANDOM * _RANDOM
    flat[:whole].view(-1, _RANDOM).copy_(numbers)
    flat[whole:].copy_(numbers[: flat.numel() - whole])
    return values


_RowReader = Callable[[int, int], Tensor]
"""Returns the rows [begin, end) of one tensor, where begin < end."""

# These compute each element from the one in its place.
_ELEMENTWISE = ("aten::_to_copy", "aten::clone")
_MERGING = ("aten::cat", "aten::stack")


def _row_reader(view: _View) -> _RowReader | None:
    """What reads some rows of a tensor from its sources; None if it can only be computed whole."""
    # One operation made the tensor as it is, and nothing was written into it afterwards.
    log = view.memory.log
    if len(log) != 1 or log[0].random is not None or log[0].results != [view]:
        return None
    operation = log[0]
    if not view.shape or not view.is_contiguous:
        return None
    if isinstance(operation.function, Source):
        return operation.function.rows

    args, kwargs = tree_unflatten(operation.arguments, operation.layout)
    if _name(operation.function) in _ELEMENTWISE:
        read = _row_reader(args[0])
        if read is not None:
            return lambda begin, end: operation.function(read(begin, end), **kwargs)
    if _name(operation.function) in _MERGING:
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        # With other dtypes, the dtype of the result would depend on which rows are read.
        if all(isinstance(each, _View) and each.dtype == view.dtype for each in args[0]):
            return _merged_rows(operation.function, args[0], dim % len(view.shape))
    return None


def _merged_rows(function: Any, views: list[_View], dim: int) -> _RowReader | None:
    """What reads rows of torch.cat or torch.stack along `dim`; None if it has to be computed whole."""
    readers: list[_RowReader] = []
    for view in views:
        read = _row_reader(view)
        if read is None:
            return None
        readers.append(read)

    # Along another dimension, a row of the result is made of the same row of each tensor.
    if dim > 0:
        return lambda begin, end: function([read(begin, end) for read in readers], dim)
    stacked = _name(function) == "aten::stack"

    def rows(begin: int, end: int) -> Tensor:
        pieces: list[Tensor] = []
        first = 0
        for read, view in zip(readers, views, strict=True):
            # In a stack each tensor is one row. In a concatenation its rows follow those before it.
            count = 1 if stacked else view.shape[0]
            low, high = max(begin, first), min(end, first + count)
            if low < high and stacked:
                pieces.append(read(0, view.shape[0])[None])
            elif low < high:
                pieces.append(read(low - first, high - first))
            first += count
        return torch.cat(pieces)

    return rows


def _tables(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Each parameter and buffer of `model`: its name, and the mapping and key under which a module has it."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for table in (module._parameters, module._buffers):
            for key in list(table):
                if table[key] is not None:
                    yield prefix + key, table, key


@contextmanager
def _converting() -> Iterator[None]:
    """Context in which `Module.to` and its kind convert tensors without memory.

    They replace the old tensor by the new one with `swap_tensors`, which refuses tensors with weak references.
    Every fake tensor has some.
    """
    real = torch.utils.swap_tensors

    def swap(first: Tensor, second: Tensor) -> None:
        if not isinstance(first, FakeTensor):
            return real(first, second)
        first.data = second
        return None

    torch.utils.swap_tensors = swap
    try:
        yield
    finally:
        torch.utils.swap_tensors = real


class _Record(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What the recording itself asks of its tensors is no difference.
        with torch._C.DisableTorchFunction():
            return self._recording.record(func, args, kwargs or {})


class _Differences(TorchFunctionMode):
    """Notes calls that answer differently on tensors without memory: those that fail, and those that show the memory.

    An error goes on to the constructor, which may expect it. Whether it is caught there or not, the recording is
    refused: the same call on a real tensor may have succeeded.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recording, kwargs = self._recording, kwargs or {}
        if not any(map(recording.holds, tree_flatten((args, kwargs))[0])):
            return func(*args, **kwargs)
        if func in _SHOW_MEMORY:
            raise recording.refusal(f"{resolve_name(func)} asks for memory that is not there yet")
        try:
            return func(*args, **kwargs)
        except Exception as error:
            recording.refusal(f"{resolve_name(func) or func}: {_short(error)}")
            raise


class _Compute(TorchDispatchMode):
    """Gives every operation the values of the model's tensors without memory, for as long as it runs."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recording, kwargs = self._recording, kwargs or {}
        flat, layout = tree_flatten((args, kwargs))
        if not any(map(recording.holds, flat)) or func.is_view:
            return func(*args, **kwargs)
        if any(map(recording.holds, _written(func, args, kwargs))):
            return recording.record_write(func, args, kwargs)
        real: list[Any] = []
        for value in flat:
            if recording.holds(value):
                value = recording.value(recording.view(value)).to(recording.device)
            real.append(value)
        args, kwargs = tree_unflatten(real, layout)
        return func(*args, **kwargs)


_RECORDINGS: WeakKeyDictionary[nn.Module, Recording] = WeakKeyDictionary()
_active: list[Recording] = []


def build(
    make: Callable[[], nn.Module],
    device: torch.device,
    small: int | None = None,
    final: type[Exception] | tuple[()] = (),
) -> nn.Module:
    """The model that `make` returns, with its large tensors on the meta device. See this file's docstring.

    device: where `computing` is to compute.
    final: errors of `make` that would come again if the model were built whole. They are raised as they are.

    Raises CannotDeferError if it has to be built whole, or if `make` fails. The random generators have moved on then:
    seed them again.
    """
    recording = Recording(device, SMALL if small is None else small)
    _active.append(recording)
    try:
        with (
            _Record(recording),
            _Differences(recording),
            _converting(),
            functions_called() as called,
            warnings.catch_warnings(),
        ):
            # torch copies such a tensor as it should, and warns of how it looks at it.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            model = make()
    except final:
        raise
    except Exception as error:
        # It may be an error of the model. Then it comes again when the model is built whole.
        raise CannotDeferError(recording.refused or _short(error)) from error
    finally:
        _active.pop()
    if asks := comparing(called.values()):
        raise CannotDeferError(f"{asks} compares the exact type of a tensor")
    recording.finish(model)
    _RECORDINGS[model] = recording
    return model


def is_building() -> bool:
    """Whether `build` is at work: new tensors have no memory."""
    return bool(_active)


def recording_of(model: nn.Module) -> Recording | None:
    """The recording of a model that `build` returned; None for every other model."""
    return _RECORDINGS.get(model)


def forget(model: nn.Module) -> None:
    """Drop the recording of a model whose tensors have got their memory."""
    _RECORDINGS.pop(model, None)


def device_of(model: nn.Module) -> torch.device:
    """Where `model` computes: the device of its first parameter, or that of `computing`."""
    recording = recording_of(model)
    return next(model.parameters()).device if recording is None else recording.device


@contextmanager
def computing(model: nn.Module) -> Iterator[None]:
    """Context in which a model of `build` computes, without gradients. Other models are left as they are.

    Each operation that reads a weight computes the whole weight, and drops it afterwards: a forward takes as long as
    the model's initialisation, and the memory of one weight.
    """
    recording = recording_of(model)
    if recording is None:
        yield
        return
    with recording.stand_ins(model), _Compute(recording):
        yield


def try_model(model: nn.Module, trial: Callable[[], _T]) -> _T:
    """What `trial` returns, which runs `model` to find out how it computes. Raises what it raises.

    A model of `build` whose weights are in files is tried with random values for its large matrices, so that none is
    read. The values may be why the trial fails, or returns something true (a complaint). Then it is tried once more
    with the stored ones, and that counts. Other models are tried as they are.
    """
    recording = recording_of(model)
    if recording is not None and recording.places:
        recording.made_up = True
        try:
            # Whatever a model raises.
            with suppress(Exception), computing(model):
                found = trial()
                if not found:
                    return found
        finally:
            recording.made_up = False
    with computing(model):
        return trial()


def later(source: Source, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor of `source`. Within `build` it has no memory, and is read when needed; elsewhere it is read now."""
    if not _active:
        return source()
    with torch._C.DisableTorchFunction():  # as in `_Record`
        return _active[-1].later(source, shape, dtype)


def refuse(why: str) -> None:
    """Within `build`, raise CannotDeferError: what follows cannot be recorded."""
    if _active:
        raise _active[-1].refusal(why)


def _short(error: Exception) -> str:
    """The error in one line."""
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}"


def _on_meta(tensor: Tensor) -> Tensor:
    """A tensor of the meta device with the layout of `tensor`; a Parameter if it is one."""
    made = torch.empty_strided(
        tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device=_META
    )
    if not isinstance(tensor, nn.Parameter):
        return made
    param = nn.Parameter(made, requires_grad=tensor.requires_grad)
    # Marks that the model's code has set on its parameter.
    own = {"_is_param", *vars(_fake())}
    marks = {key: value for key, value in vars(tensor).items() if key not in own}
    vars(param).update(marks)
    return param


def _fake() -> Tensor:
    """A tensor without memory that belongs to no recording."""
    with FakeTensorMode():
        return torch.empty(0)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _name(function: Any) -> str:
    return function._schema.name


def _makes_on_cpu(function: Any, kwargs: Any) -> bool:
    """Whether the operator makes a tensor from nothing, on the CPU."""
    device = kwargs.get("device")
    takes_device = any(each.name == "device" for each in function._schema.arguments)
    return takes_device and (device is None or torch.device(device).type == "cpu")


def _moves_from_meta(function: Any, tensors: list[Tensor], kwargs: Any) -> bool:
    """Whether the operator makes a tensor without values, on the CPU, in the form of one of the meta device."""
    if _name(function) != "aten::empty_like" or tensors[0].device != _META:
        return False
    same_form = kwargs.get("memory_format") in (None, torch.preserve_format)
    # Without a device the new tensor is on the meta device, too.
    return same_form and kwargs.get("device") is not None and _makes_on_cpu(function, kwargs)


def _written(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that the operator writes."""
    written: list[Tensor] = []
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        written += [each for each in tree_flatten(value)[0] if isinstance(each, Tensor)]
    return written
