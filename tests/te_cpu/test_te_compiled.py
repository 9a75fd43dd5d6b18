"""torch.compile around Transformer Engine's layers: they run eager, what lies between compiles, and no bit changes.

"aot_eager" compiles forward and backward graphs and runs torch's own kernels, so that eager training is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from te_cpu_support import WIDTH, Trainer, disagreements, inputs, plain
from te_fused_support import Pair
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from harness.core.errors import MisuseError

te: Any = import_module("transformer_engine.pytorch")
Sections = dict[str, dict[str, Any]]

# torch, compiling for the first time, and looking at tensors behind a graph break, which it hides by itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.gate_up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Recomputed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class RecomputedByTe(Block):
    def forward(self, x: Tensor) -> Tensor:
        return te.checkpoint(super().forward, x, use_reentrant=False)


class Model(nn.Module):
    def __init__(self, kind: type[Block] = Block, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def by_blocks(model: nn.Module) -> None:
    for block in model.get_submodule("blocks").children():
        block.compile(backend="aot_eager")


def whole(model: nn.Module) -> None:
    model.compile(backend="aot_eager")


def trained(
    compiled: Callable[[nn.Module], None] | None,
    kind: type[Block] = Block,
    sections: Sections | None = None,
    demoted: bool = False,
) -> Trainer:
    """Four steps of two micro-batches, every other one sampled, each followed by an evaluation."""
    trainer = Trainer("transformer_engine", lambda: Model(kind), sections or {})
    if compiled is not None:
        compiled(trainer.model)
    for number in range(4):
        if demoted and number in (1, 3):
            move = trainer.precision.demote if number == 1 else trainer.precision.promote
            move("blocks.*.down")
        plain(trainer, number)
        trainer.step()
        with trainer.precision.evaluating():
            trainer.log[-1]["evaluated"] = trainer.model(inputs(50)).sum().item()
    return trainer


CURRENT: Sections = {"fp8": {"scaling": "current", "roll": "step", "amax_history_len": 16}}


@pytest.mark.every_version
@pytest.mark.parametrize(
    ("compiled", "kind", "sections", "demoted"),
    [
        (by_blocks, Block, {}, False),
        (by_blocks, Block, {"fp8": {"roll": "step"}}, True),
        (by_blocks, Block, CURRENT, False),
        (whole, Block, {}, False),
        (by_blocks, Recomputed, {"fp8": {"roll": "step"}}, True),
        (by_blocks, RecomputedByTe, {}, False),
    ],
    ids=["rolls between", "demoted", "current", "whole", "recomputed", "recomputed by TE"],
)
def test_compiled_training_has_the_bits_of_eager(
    compiled: Callable[[nn.Module], None], kind: type[Block], sections: Sections, demoted: bool
) -> None:
    eager = trained(None, kind, sections, demoted)
    assert not counters["stats"]
    found = trained(compiled, kind, sections, demoted)
    assert disagreements(found.log, eager.log) == []
    for name, value in eager.precision.state_dict()["tensors"].items():
        other = found.precision.state_dict()["tensors"][name]
        assert torch.equal(value.nan_to_num(-1), other.nan_to_num(-1)), name
    for (name, one), (_, other) in zip(
        eager.model.named_parameters(), found.model.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name


def graphs(blocks: int) -> int:
    """How many graphs two steps of a model with so many blocks compile."""
    torch.compiler.reset()
    counters.clear()
    trainer = Trainer("transformer_engine", lambda: Model(blocks=blocks))
    by_blocks(trainer.model)
    for number in range(2):
        plain(trainer, number)
        trainer.step()
    return counters["stats"]["unique_graphs"]


def test_what_lies_between_is_compiled_once_for_all_blocks() -> None:
    few = graphs(2)
    assert few >= 3, "the norm, SwiGLU and the sum"
    assert graphs(12) == few, "more than torch._dynamo.config.recompile_limit"
    assert all("Transformer Engine" in why for why in counters["graph_break"]), "no other break"


def test_one_graph_is_refused_and_says_why() -> None:
    trainer = Trainer("transformer_engine", Model)
    trainer.model.compile(fullgraph=True)
    with pytest.raises(Unsupported, match="Transformer Engine runs eager: compile without"):
        trainer.loss(inputs(0))


class Late(nn.Module):
    """A layer, and after it a norm that is fused with another one."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(WIDTH, WIDTH, bias=False)
        self.pair = Pair()

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(self.plain(x))


def test_a_model_with_fused_layers_is_refused_by_name() -> None:
    trainer = Trainer("transformer_engine", Late, {"layers": {"fuse": True}})
    trainer.model.compile(backend="aot_eager")
    with pytest.raises(
        MisuseError, match=r"layers\.fuse does not go with torch\.compile"
    ) as caught:
        trainer.loss(inputs(0))
    (problem,) = caught.value.problems
    assert problem.where == "layer plain"
    assert "layers.fuse: false" in problem.fix
