"""One forward of a model as a graph of its operations, on tensors without values.

Names of modules and functions say little: a softmax can be written as `exp(x) / exp(x).sum()` anywhere. So the lints
look at operations. The forward runs under the run's autocast on fake tensors, and `Recorder` keeps every ATen operation
that PyTorch dispatches, with what its inputs were made of. Nothing is computed, so a model of any size takes seconds.

A model that reads values (`if x.sum() > 0`) cannot run on fakes. It runs on two real samples instead.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.weak import WeakIdKeyDictionary

from harness.core.errors import HarnessError
from harness.core.health import LABELS, TOKENS
from harness.core.protocols import Batch

HALF = (torch.float16, torch.bfloat16)

# Operations that autocast computes in float32 on a GPU (PyTorch's "CUDA Ops that can autocast to float32"). A CPU's
# autocast leaves most of them in 16 bits, and the trace runs under that one.
_FLOAT32_ON_GPU = frozenset({
    "acos", "asin", "cosh", "cumprod", "cumsum", "erfinv", "exp", "expm1", "linalg_vector_norm", "log", "log10",
    "log1p", "log2", "logsumexp", "native_group_norm", "native_layer_norm", "norm", "pow", "prod", "reciprocal",
    "rsqrt", "sinh", "softplus", "sum", "tan", "_log_softmax", "_softmax",
})  # fmt: skip
# These give 16 bits whatever their inputs were.
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution"})
_ATTENTION = "_scaled_dot_product"
# The same values in another order, shape or number.
VIEWS = frozenset({
    "alias", "as_strided", "clone", "expand", "gather", "index", "index_select", "lift_fresh", "permute", "repeat",
    "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze",
    "view", "_reshape_alias", "_unsafe_view",
})  # fmt: skip


class Place(NamedTuple):
    """Where in the model's code an operation is. module: its name; line: `file.py:12`. Either may be empty."""

    module: str
    line: str


@dataclass(slots=True, eq=False)
class Node:
    """One tensor of the forward.

    op: the operation that made it, without overload and without the underscore of in-place operations; "input" for a
        tensor that came from outside.
    args: the operation's arguments; tensors as their nodes, other values as they are.
    dtype, shape: as traced.
    wide: float32 on a GPU, where autocast computes more operations in float32 than on a CPU.
    learns: a gradient flows through it to a weight.
    weight: name of the parameter that it is; empty if it is none.
    keys: names of the batch's tensors that it is: one tensor may be both inputs and targets.
    place: where it was made; kept for the few operations that a later one may blame.
    blamed: a fault names it already.
    """

    op: str
    args: Sequence[Any] = ()
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()
    wide: bool = False
    learns: bool = False
    weight: str = ""
    keys: tuple[str, ...] = ()
    place: Place | None = None
    blamed: bool = False

    @property
    def inputs(self) -> list[Node]:
        """The nodes among its arguments, those in lists included."""
        found: list[Node] = []
        for value in self.args:
            many = value if isinstance(value, list | tuple) else (value,)
            found += [each for each in many if isinstance(each, Node)]
        return found

    @property
    def half(self) -> bool:
        """Whether it is in 16 bits on every device."""
        return self.dtype in HALF and not self.wide

    def behind(self) -> Node:
        """The tensor whose values these are, behind views and casts."""
        node = self
        while node.op in VIEWS or node.op == "_to_copy":
            first = node.args[0]
            if not isinstance(first, Node):
                break
            node = first
        return node


@dataclass(frozen=True, slots=True)
class Fault:
    """What a rule found: `code`, `what`, `why` and `fix` as of a Finding. at: the node to blame, if an earlier one."""

    code: str
    what: str
    why: str
    fix: str
    at: Node | None = None


Rule = Callable[[Node], Fault | None]
"""Called with every node as it is made."""

# Later operations may blame these: their place is kept.
_PLACED = frozenset({"exp", "_to_copy"})


@dataclass(slots=True)
class Graph:
    """What one forward did.

    nodes: in the order in which they were made.
    faults: what the rules found, each with its place.
    error: why the forward could not be traced; empty if it was.
    failed: whether it failed on real values, too.
    """

    nodes: list[Node] = field(default_factory=list[Node])
    faults: list[tuple[Fault, Place]] = field(default_factory=list[tuple[Fault, "Place"]])
    error: str = ""
    failed: bool = False

    @property
    def classes(self) -> int | None:
        """The number of classes that a cross-entropy of the batch's labels chooses among; None without one."""
        for node in self.nodes:
            if node.op in ("nll_loss_forward", "nll_loss2d_forward"):
                shape = node.inputs[0].shape
                # One sample alone has no batch dimension.
                classes = shape[min(1, len(shape) - 1)]
            elif node.op == "gather":
                # A loss written by hand, or `sum_of_losses`: the logit of each label.
                classes = node.inputs[0].shape[node.args[1]]
            else:
                continue
            if set(_labels_behind(node.inputs[1]).keys) & set(LABELS):
                return classes
        return None

    @property
    def embedded(self) -> int | None:
        """Rows of the embedding that looks up the batch's token ids; None without one."""
        for node in self.nodes:
            # Positions and segments are looked up in tables of their own.
            if node.op != "embedding":
                continue
            if set(node.inputs[1].behind().keys) & set(TOKENS):
                return node.inputs[0].shape[0]
        return None


def _labels_behind(node: Node) -> Node:
    """The labels that `node` was made of, by a shift with padding (a causal loss) or by replacing masked ones."""
    node = node.behind()
    while node.op == "constant_pad_nd" or (node.op == "where" and len(node.inputs) > 1):
        # The first argument of `where` is its condition.
        kept = node.inputs[1 if node.op == "where" else 0]
        node = kept.behind()
    return node


class Recorder(TorchDispatchMode):
    """Keeps a Node for every tensor that an operation makes.

    names: of the model's modules.
    weights: parameters by name.
    batch: what the forward is given.
    rules: called with every node.
    """

    def __init__(
        self,
        names: dict[nn.Module, str],
        weights: dict[str, Tensor],
        batch: Batch,
        rules: Sequence[Rule],
    ) -> None:
        super().__init__()
        self._names = names
        self._rules = rules
        self._stack: list[str] = []
        self._nodes = WeakIdKeyDictionary()
        self.graph = Graph()
        for name, tensor in weights.items():
            node = Node("input", (), tensor.dtype, tuple(tensor.shape), weight=name)
            node.learns = tensor.requires_grad
            self._nodes[tensor] = node
        for name, tensor in batch.items():
            node = self._as_node(tensor)
            node.keys = (*node.keys, name)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In this context the recorder knows which module's forward runs."""

        def enter(module: nn.Module, _: Any) -> None:
            self._stack.append(self._names.get(module, ""))

        def leave(*_: Any) -> None:
            if self._stack:
                self._stack.pop()

        hooks = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.namespace != "aten":
            return made
        results = made if isinstance(made, list | tuple) else (made,)
        tensors = [each for each in results if isinstance(each, Tensor)]
        if tensors:
            self._keep(func, (*args, *(kwargs or {}).values()), tensors)
        return made

    def _keep(self, func: Any, args: tuple[Any, ...], made: list[Tensor]) -> None:
        """Add a node for each tensor that `func` returned."""
        name = func.overloadpacket.__name__
        # In-place operations end in one underscore, private ones begin with it.
        op = name
        if name.endswith("_") and not name.endswith("__"):
            op = name[:-1]
        given = tuple(self._as_node(value) for value in args)
        detached = op == "detach" or not torch.is_grad_enabled()
        for tensor in made:
            node = Node(op, given, tensor.dtype, tuple(tensor.shape))
            before = node.inputs
            node.learns = not detached and any(each.learns for each in before)
            node.wide = _is_wide(op, tensor, before)
            if op in _PLACED:
                node.place = self._place()
            self._nodes[tensor] = node
            self.graph.nodes.append(node)
            self._judge(node)

    def _judge(self, node: Node) -> None:
        """Ask every rule about a new node."""
        for rule in self._rules:
            fault = rule(node)
            if fault is not None:
                blamed = fault.at or node
                blamed.blamed = node.blamed = True
                self.graph.faults.append((fault, blamed.place or self._place()))

    def _as_node(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            node = self._nodes.get(value)
            if node is None:
                node = Node("input", (), value.dtype, tuple(value.shape))
                node.learns = value.requires_grad and value.is_leaf
                self._nodes[value] = node
            elif value.requires_grad:
                # A torch.autograd.Function computes without gradients, and gives its result one afterwards.
                node.learns = True
            return node
        if isinstance(value, list | tuple):
            return [self._as_node(each) for each in value]
        return value

    def _place(self) -> Place:
        module = self._stack[-1] if self._stack else ""
        return Place(module, _line_of(sys._getframe(1)))


def _is_wide(op: str, tensor: Tensor, inputs: Sequence[Node]) -> bool:
    """Whether a tensor of 16 bits would be float32 on a GPU."""
    if tensor.dtype not in HALF:
        return False
    # Products compute in the half dtype on a GPU, too, and a cast has the dtype that it asks for.
    if op in PRODUCTS or op.startswith(_ATTENTION) or op == "_to_copy":
        return False
    return op in _FLOAT32_ON_GPU or any(each.wide for each in inputs)


_LIBRARIES = tuple(
    {
        str(Path(torch.__file__).parent),
        str(Path(sysconfig.get_paths()["stdlib"])),
        str(Path(__file__).parent),
    }
)


def _line_of(frame: FrameType | None) -> str:
    """`file.py:12` of the innermost frame that is neither torch's, Python's own nor this package's."""
    while frame is not None:
        path = frame.f_code.co_filename
        # Packages installed beside torch, such as transformers, are the model's code.
        own = "site-packages" in path and "torch" not in Path(path).parts
        if own or not path.startswith(_LIBRARIES):
            return f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


Loss = Callable[[nn.Module, Batch], Tensor]
_FAKES = "torch._subclasses.fake_tensor"


def record(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    half: torch.dtype | None,
    make_rules: Callable[[], Sequence[Rule]],
) -> Graph:
    """Run one forward of `model` with its loss, and keep its operations.

    loss: called with a stand-in for the model and the batch.
    batch: a micro-batch on the CPU. Its values are not used unless the model reads values.
    half: the dtype of the run's autocast, None for float32.
    make_rules: gives new rules for each try.

    The model's weights may be on the meta device. Its parameters stay as they are.
    Raises HarnessError as `loss`.
    """
    if any(is_lazy(parameter) for parameter in model.parameters()):
        return Graph(error="lazy parameters have no size before the run's first forward")
    names = {module: name for name, module in model.named_modules()}
    with warnings.catch_warnings(), _quiet(_FAKES), _as_on_a_gpu(), _checkpoints_open():
        # What a library says about speed or dtypes it says again when the run starts.
        warnings.simplefilter("ignore")
        try:
            return _on_fakes(model, loss, batch, half, names, make_rules())
        except HarnessError:
            raise
        except Exception as error:
            # The model reads values, or an operation of it does not run on fakes.
            why = _text_of(error)
        if any(parameter.is_meta for parameter in model.parameters()):
            return Graph(error=why)
        try:
            # BatchNorm in training mode needs more than one sample.
            two = {name: values[:2] for name, values in batch.items()}
            return _on_values(model, loss, two, half, names, make_rules())
        except HarnessError:
            raise
        except Exception as error:
            return Graph(error=_text_of(error), failed=True)


def _text_of(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0][:200]
    return f"{type(error).__name__}: {first}"


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """In this context the logger of that name says nothing."""
    logger = logging.getLogger(name)
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """In this context autocast of "cuda" is that of the CPU, where the trace runs."""
    begin = torch.autocast.__init__

    def begin_here(self: torch.autocast, device_type: str, *args: Any, **named: Any) -> None:
        here = "cpu" if device_type == "cuda" else device_type
        begin(self, here, *args, **named)

    torch.autocast.__init__ = begin_here
    try:
        yield
    finally:
        torch.autocast.__init__ = begin


@contextmanager
def _checkpoints_open() -> Iterator[None]:
    """In this context a reentrant checkpoint calls its function with gradients, as its recomputation does."""

    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        return function(*args)

    # The class inherits its own `apply`.
    CheckpointFunction.apply = staticmethod(apply)
    try:
        yield
    finally:
        del CheckpointFunction.apply


class _Held(nn.Module):
    """The model with other tensors in the place of its parameters and buffers."""

    def __init__(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        super().__init__()
        # In a tuple, or the model would become a submodule.
        self._held = (model,)
        self._state = state

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return torch.func.functional_call(self._held[0], self._state, inputs, named)


def _on_fakes(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    half: torch.dtype | None,
    names: dict[nn.Module, str],
    rules: Sequence[Rule],
) -> Graph:
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        weights: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            fake = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            weights[name] = fake.requires_grad_(parameter.requires_grad)
        buffers: dict[str, Tensor] = {}
        for name, buffer in model.named_buffers():
            buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
        inputs: Batch = {name: fakes.from_tensor(values) for name, values in batch.items()}
        held = _Held(model, {**weights, **buffers})
        recorder = Recorder(names, weights, inputs, rules)
        with _autocast(half), recorder.watching(), recorder:
            loss(held, inputs)
    return recorder.graph


def _on_values(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    half: torch.dtype | None,
    names: dict[nn.Module, str],
    rules: Sequence[Rule],
) -> Graph:
    # A forward may change buffers, such as running means: copies of them are used.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    weights: dict[str, Tensor] = dict(model.named_parameters())
    recorder = Recorder(names, weights, batch, rules)
    held = _Held(model, dict(chain(weights.items(), buffers.items())))
    with torch.random.fork_rng([]), _autocast(half), recorder.watching(), recorder:
        loss(held, batch)
    return recorder.graph


def _autocast(half: torch.dtype | None) -> torch.autocast:
    return torch.autocast("cpu", dtype=half, enabled=half is not None, cache_enabled=False)
