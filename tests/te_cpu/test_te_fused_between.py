"""`layers.fuse` with an MLP whose SwiGLU is written in other ways, is another function, or is looked into meanwhile.

What is no SwiGLU is computed as it is written, bit for bit as without the declaration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from te_cpu_support import WIDTH, Trainer, inputs
from te_fused_support import (
    CLOSE,
    FeedForward,
    Unseen,
    after_a_window,
    blocks,
    gradients,
    window,
    without_mlp,
)
from test_swiglu import OTHERS, SWIGLU
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Variant(FeedForward):
    """Another way to write what is between the layers."""

    between: ClassVar[Callable[[Tensor], Tensor]]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(type(self).between(self.gate_up(self.norm(x))))
        return out


def variant(name: str) -> type[FeedForward]:
    return type("Named", (Variant,), {"between": staticmethod((SWIGLU | OTHERS)[name])})


@pytest.mark.parametrize("name", SWIGLU)
def test_swiglu_is_known_however_it_is_written(name: str, calls: list[int]) -> None:
    _, written = gradients(variant(name), True, inputs(1, 32))
    assert len(calls) == 1
    assert all(map(torch.equal, written, gradients(FeedForward, True, inputs(1, 32))[1]))


@pytest.mark.parametrize("name", ["clamped", "second half first", "in place"])
def test_what_is_no_swiglu_is_computed_as_it_is_written(name: str, calls: list[int]) -> None:
    _, found = gradients(variant(name), True, inputs(1, 32))
    assert not calls
    assert all(
        map(torch.equal, found, gradients(without_mlp(variant(name)), True, inputs(1, 32))[1])
    )


class Meanwhile(FeedForward):
    """Something happens to what lies between; the parts as they are named here."""

    do: ClassVar[Callable[[dict[str, Any]], Any]]
    when: ClassVar[str]

    def forward(self, x: Tensor) -> Tensor:
        parts: dict[str, Any] = {"x": x}
        extra: Any = 0.0
        for step in ("normed", "hidden", "gate", "silu", "gated", "out"):
            if step == "normed":
                parts[step] = self.norm(parts["x"])
            elif step == "hidden":
                parts[step] = self.gate_up(parts["normed"])
            elif step == "gate":
                parts["gate"], parts["up"] = parts["hidden"].chunk(2, dim=-1)
            elif step == "silu":
                parts[step] = F.silu(parts["gate"])
            elif step == "gated":
                parts[step] = parts["silu"] * parts["up"]
            else:
                parts[step] = self.down(parts["gated"])
            if step == type(self).when:
                extra = type(self).do(parts)
        return parts["out"] if isinstance(extra, float) else parts["out"] + extra


def meanwhile(when: str, do: Callable[[dict[str, Any]], Any]) -> type[FeedForward]:
    def done(parts: dict[str, Any]) -> Any:
        result = do(parts)
        return result if isinstance(result, Tensor) and result.ndim == 0 else 0.0

    return type("Meanwhile", (Meanwhile,), {"do": staticmethod(done), "when": when})


def test_if_nothing_happens_it_is_fused(calls: list[int]) -> None:
    gradients(meanwhile("out", lambda parts: None), True, inputs(1, 32))
    assert len(calls) == 1


WRITES = {
    "the whole after silu": ("silu", lambda parts: parts["hidden"].zero_()),
    "a view of the whole": ("silu", lambda parts: parts["hidden"][:, :3].zero_()),
    "up after the second layer": ("out", lambda parts: parts["up"].zero_()),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_meanwhile_is_seen_only_by_what_comes_after(
    name: str, calls: list[int]
) -> None:
    outs = []
    trained = after_a_window()
    del calls[:]
    make = meanwhile(*WRITES[name])
    for other in (make, without_mlp(make)):
        trainer = Trainer("transformer_engine", other, {"layers": {"fuse": True}})
        trainer.model.load_state_dict(trained.model.state_dict())
        trainer.precision.load_state_dict(trained.precision.state_dict())
        with torch.no_grad(), trainer.precision.context():
            outs.append(trainer.model(inputs(1, 32)))
    assert torch.equal(*outs)
    assert not calls


def hooked(parts: dict[str, Any], name: str) -> None:
    parts[name].register_hook(lambda grad: 3 * grad)


HOOKS = [("gate", "gated"), ("silu", "silu"), ("hidden", "out")]


@pytest.mark.parametrize(("name", "when"), HOOKS)
def test_a_hook_on_a_gradient_makes_all_run_apart(name: str, when: str, calls: list[int]) -> None:
    make = meanwhile(when, lambda parts: hooked(parts, name))
    _, found = gradients(make, True, inputs(1, 32))
    assert not calls
    assert all(map(torch.equal, found, gradients(without_mlp(make), True, inputs(1, 32))[1]))


LATE = {
    "in the loss": lambda parts: parts["gated"].float().square().mean(),
    "past PyTorch": lambda parts: parts.update(out=Unseen.apply(parts["hidden"])[:, :WIDTH]),
    "kept": lambda parts: KEPT.append(parts["up"]),
}
KEPT: list[Tensor] = []


@pytest.mark.parametrize("name", LATE)
def test_what_lies_between_may_be_used_after_the_second_layer(name: str, calls: list[int]) -> None:
    make = meanwhile("out", LATE[name])
    _, found = gradients(make, True, inputs(1, 32))
    assert not calls
    assert all(map(torch.equal, found, gradients(without_mlp(make), True, inputs(1, 32))[1]))


class Reentrant(FeedForward):
    """The second layer alone is computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        out: Tensor = checkpoint(self.down, F.silu(gate) * up, use_reentrant=True)
        return out


def test_an_mlp_in_a_reentrant_checkpoint_is_computed_as_it_is_written(calls: list[int]) -> None:
    _, found = gradients(Reentrant, True, inputs(1, 32))
    assert not calls
    _, straight = gradients(without_mlp(FeedForward), True, inputs(1, 32))
    assert all(map(torch.equal, found, straight))


def limited(model: Any) -> None:
    model.limit = 0.0


def with_other_first(model: Any) -> None:
    model.gate_up = nn.Sequential(model.gate_up, nn.Tanh())


@pytest.mark.parametrize("change", [limited, with_other_first])
def test_an_mlp_that_was_changed_afterwards_is_computed_as_it_is_now(
    change: Callable[[Any], None], calls: list[int]
) -> None:
    class Limited(FeedForward):
        def forward(self, x: Tensor) -> Tensor:
            gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
            if hasattr(self, "limit"):
                gate = gate.clamp(max=self.limit)
            out: Tensor = self.down(F.silu(gate) * up)
            return out

    found = []
    for make in (Limited, without_mlp(Limited)):
        trainer = after_a_window(make)
        change(trainer.model)
        del calls[:]
        found.append(window(trainer, inputs(1, 32)))
        assert not calls
    # Their scales differ by the roundings of the window before.
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= CLOSE * theirs.norm()


@pytest.mark.parametrize("layer", ["gate_up", "down", "norm"])
def test_a_backward_hook_on_a_part_is_called_and_runs_its_parts_unfused(
    layer: str, calls: list[int]
) -> None:
    seen: list[Any] = []

    def make() -> FeedForward:
        made = FeedForward()
        made.get_submodule(layer).register_full_backward_hook(
            lambda module, into, out: seen.append((into, out))
        )
        return made

    _, found = gradients(make, True, inputs(1, 32))
    assert len(seen) == 2
    assert not calls
    _, apart = gradients(FeedForward, False, inputs(1, 32))
    for ours, theirs in zip(found, apart, strict=True):
        assert (ours - theirs).norm() <= CLOSE * theirs.norm()


class Nested(nn.Module):
    """Each part in a module of its own."""

    fusible_norms: ClassVar = {"first.layer": "before.norm"}
    fusible_swiglu: ClassVar = {"first.layer": "then.layer"}

    def __init__(self) -> None:
        super().__init__()
        of = FeedForward()
        self.before, self.first, self.then = nn.Sequential(), nn.Sequential(), nn.Sequential()
        self.before.add_module("norm", of.norm)
        self.first.add_module("layer", of.gate_up)
        self.then.add_module("layer", of.down)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.first(self.before(x)).chunk(2, dim=-1)
        out: Tensor = self.then(F.silu(gate) * up)
        return out


@pytest.mark.parametrize("outer", ["before", "first", "then", ""])
def test_a_backward_hook_on_a_module_around_a_part_does_the_same(
    outer: str, calls: list[int]
) -> None:
    seen: list[Any] = []

    def make() -> Nested:
        made = Nested()
        made.get_submodule(outer).register_full_backward_hook(
            lambda module, into, out: seen.append(out)
        )
        return made

    _, found = gradients(make, True, inputs(1, 32))
    assert len(seen) == 2
    assert len(calls) == (0 if outer else 1)
    for ours, theirs in zip(found, gradients(Nested, False, inputs(1, 32))[1], strict=True):
        assert (ours - theirs).norm() <= CLOSE * theirs.norm()


def test_a_backward_hook_on_all_modules_takes_all_apart(calls: list[int]) -> None:
    seen: list[Any] = []
    handle = nn.modules.module.register_module_full_backward_hook(
        lambda module, into, out: seen.append(module)
    )
    try:
        trainer, found = gradients(Nested, True, inputs(1, 32))
    finally:
        handle.remove()
    assert len(seen) > 6
    assert not calls
    assert blocks(trainer.model) == set()
    assert all(map(torch.equal, found, gradients(Nested, False, inputs(1, 32))[1]))


def test_forward_hooks_see_what_they_would_see_apart(calls: list[int]) -> None:
    seen: list[Tensor] = []

    def make() -> FeedForward:
        made = FeedForward()
        made.gate_up.register_forward_hook(
            lambda module, args, out: seen.append(out.detach().float())
        )
        made.down.register_forward_pre_hook(
            lambda module, args: seen.append(args[0].detach().float())
        )
        return made

    first = gradients(make, True, inputs(1, 32))[1]
    assert not calls
    fused, seen[:] = list(seen), []
    second = gradients(without_mlp(make), True, inputs(1, 32))[1]
    assert len(fused) == len(seen) == 4
    assert all(map(torch.equal, [*fused, *first], [*seen, *second]))
