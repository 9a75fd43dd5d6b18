"""`layers.fuse` with an MLP whose SwiGLU is written in other ways, is another function, or is looked into meanwhile.

What is no SwiGLU is computed as it is written, bit for bit as without the declaration; a wrong result is refused.
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
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.core.errors import MisuseError
from harness.precision.backends.te_fused import Hidden, Normed, Part


class Variant(FeedForward):
    """Another way to write what is between the layers."""

    between: ClassVar[Callable[[Tensor], Tensor]]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(type(self).between(self.gate_up(self.norm(x))))
        return out


def halves(h: Tensor) -> tuple[Tensor, Tensor]:
    first, second = torch.split(h, 2 * WIDTH, dim=1)
    return first, second


SWIGLU = {
    "split": lambda h: F.silu(halves(h)[0]) * halves(h)[1],
    "chunk": lambda h: torch.mul(torch.chunk(h, 2, -1)[1], nn.SiLU()(h.chunk(2, 1)[0])),
    "shape": lambda h: F.silu(h.split(h.shape[-1] // 2, dim=-1)[0]).mul(h.split(2 * WIDTH, -1)[1]),
}
OTHERS = {
    "gelu": lambda h: F.gelu(halves(h)[0]) * halves(h)[1],
    "second half first": lambda h: F.silu(halves(h)[1]) * halves(h)[0],
    "gate twice": lambda h: F.silu(halves(h)[0]) * halves(h)[0],
    "silu twice": lambda h: F.silu(halves(h)[0]) * F.silu(halves(h)[0]),
    "clamped": lambda h: F.silu(halves(h)[0].clamp(max=0.5)) * halves(h)[1],
    "scaled": lambda h: F.silu(halves(h)[0]) * halves(h)[1] * 0.5,
    "in fp32": lambda h: F.silu(halves(h)[0].float()) * halves(h)[1],
    "of all": lambda h: halves(F.silu(h))[0] * halves(h)[1],
    "without silu": lambda h: halves(h)[0] * halves(h)[1],
    "in place": lambda h: F.silu(halves(h)[0]).mul_(halves(h)[1]),
    "by a number": lambda h: F.silu(halves(h)[0]) * 2.0,
    "another dimension": lambda h: (
        F.silu(h.chunk(2, 0)[0]).repeat(2, 1)[:, : 2 * WIDTH] * halves(h)[1]
    ),
    "sigmoid": lambda h: F.sigmoid(halves(h)[0]) * halves(h)[0] * halves(h)[1],
}


def variant(name: str) -> type[FeedForward]:
    return type("Named", (Variant,), {"between": staticmethod((SWIGLU | OTHERS)[name])})


@pytest.mark.parametrize("name", SWIGLU)
def test_swiglu_is_known_however_it_is_written(name: str, calls: list[int]) -> None:
    _, written = gradients(variant(name), True, inputs(1, 32))
    assert len(calls) == 1
    assert all(map(torch.equal, written, gradients(FeedForward, True, inputs(1, 32))[1]))


@pytest.mark.parametrize("name", OTHERS)
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
        parts: dict[str, Any] = {"x": x * 1}
        self.extra: Any = 0.0
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
                self.extra = type(self).do(parts)
        return parts["out"] + self.extra


def meanwhile(when: str, do: Callable[[dict[str, Any]], Any]) -> type[FeedForward]:
    def done(parts: dict[str, Any]) -> Any:
        result = do(parts)
        return result if isinstance(result, Tensor) and result.ndim == 0 else 0.0

    return type("Meanwhile", (Meanwhile,), {"do": staticmethod(done), "when": when})


WRITES = {
    "the gate before": ("gate", lambda parts: parts["gate"].mul_(2)),
    "up after silu": ("silu", lambda parts: parts["up"].mul_(2)),
    "the gate after silu": ("silu", lambda parts: parts["gate"].zero_()),
    "the whole after silu": ("silu", lambda parts: parts["hidden"].zero_()),
    "silu after the product": ("gated", lambda parts: parts["silu"].zero_()),
    "the product": ("gated", lambda parts: parts["gated"].mul_(2)),
    "the norm's output after the first layer": ("hidden", lambda parts: parts["normed"].mul_(2)),
    "the norm's output after silu": ("silu", lambda parts: parts["normed"].zero_()),
    "a view of the whole": ("silu", lambda parts: parts["hidden"][:, :3].zero_()),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_meanwhile_is_seen_only_by_what_comes_after(
    name: str, calls: list[int]
) -> None:
    outs = []
    trained = after_a_window()
    del calls[:]
    make = meanwhile(*WRITES[name])
    # A norm whose output is written to is apart itself.
    for other, fuse in ((make, True), (without_mlp(make), "norm" not in name)):
        trainer = Trainer("transformer_engine", other, {"layers": {"fuse": fuse}})
        trainer.model.load_state_dict(trained.model.state_dict())
        trainer.precision.load_state_dict(trained.precision.state_dict())
        with torch.no_grad(), trainer.precision.context():
            outs.append(trainer.model(inputs(1, 32)))
    assert torch.equal(*outs)
    assert not calls


def hooked(parts: dict[str, Any], name: str) -> None:
    parts[name].register_hook(lambda grad: 3 * grad)


HOOKS = [
    ("hidden", "hidden"),
    ("hidden", "silu"),
    ("gate", "gated"),
    ("up", "gate"),
    ("silu", "silu"),
]
HOOKS += [("gated", "gated")]


@pytest.mark.parametrize(("name", "when"), HOOKS)
def test_a_hook_on_a_gradient_makes_all_run_apart(name: str, when: str, calls: list[int]) -> None:
    make = meanwhile(when, lambda parts: hooked(parts, name))
    _, found = gradients(make, True, inputs(1, 32))
    assert not calls
    assert all(map(torch.equal, found, gradients(without_mlp(make), True, inputs(1, 32))[1]))


@pytest.mark.parametrize("when", ["hidden", "gated"])
def test_a_hook_on_the_gradient_of_the_norms_output_too(when: str, calls: list[int]) -> None:
    """In a step that is sampled it comes too late."""
    found = []
    for fuse in (True, False):
        make = meanwhile(when, lambda parts: hooked(parts, "normed"))
        trainer = Trainer("transformer_engine", make, {"layers": {"fuse": fuse}}, lr=0.0)
        trainer.precision.load_state_dict(after_a_window().precision.state_dict())
        found.append(window(trainer, inputs(1, 32)))
    assert not calls
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", ["normed", "hidden", "gate", "up", "silu", "gated"])
def test_a_hook_that_comes_too_late_is_refused(name: str) -> None:
    with pytest.raises(MisuseError) as caught:
        gradients(meanwhile("out", lambda parts: hooked(parts, name)), True, inputs(1, 32))
    (problem,) = caught.value.problems
    assert problem.where == ("layer gate_up" if name == "normed" else "layer down")
    assert "a hook is put on the gradient" in problem.what


@pytest.mark.parametrize("name", ["hidden", "gate", "up", "silu", "gated", "normed"])
def test_what_lies_between_may_be_in_the_loss_too(name: str, calls: list[int]) -> None:
    """After the second layer it is computed for that once more."""
    make = meanwhile("out", lambda parts: parts[name].float().square().mean())
    _, found = gradients(make, True, inputs(1, 32))
    assert len(calls) == 1
    _, apart = gradients(make, False, inputs(1, 32))
    for ours, theirs in zip(found, apart, strict=True):
        assert (ours - theirs).norm() <= CLOSE * theirs.norm()


def test_what_is_written_after_the_second_layer_is_not_looked_at_then(calls: list[int]) -> None:
    def late(parts: dict[str, Any]) -> Tensor:
        parts["normed"].zero_()
        parts["up"].zero_()
        total: Tensor = parts["gated"].float().square().mean()
        return total

    trainer = Trainer("transformer_engine", meanwhile("out", late), {"layers": {"fuse": True}})
    with torch.no_grad(), trainer.precision.context():
        trainer.model(inputs(1, 32))
    model: Any = trainer.model
    assert len(calls) == 1
    assert model.extra > 0


def test_what_is_looked_at_after_the_context_is_refused() -> None:
    kept: list[Any] = []
    trainer = after_a_window(meanwhile("out", lambda parts: kept.append(parts["gated"])))
    with trainer.precision.context():
        trainer.model(inputs(1, 32))
    with pytest.raises(MisuseError, match="looked at after its forward"):
        kept[-1].float()


class Reentrant(FeedForward):
    """The second layer alone is computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        out: Tensor = checkpoint(self.down, F.silu(gate) * up, use_reentrant=True)
        return out


PAST = {
    "reentrant": Reentrant,
    "the product": meanwhile(
        "gated", lambda parts: parts.update(gated=Unseen.apply(parts["gated"]))
    ),
    "the whole": meanwhile(
        "hidden", lambda parts: parts.update(hidden=Unseen.apply(parts["hidden"]))
    ),
    "a half": meanwhile("gate", lambda parts: parts.update(up=Unseen.apply(parts["up"]))),
}


@pytest.mark.parametrize("name", PAST)
def test_a_gradient_that_would_be_lost_is_refused(name: str) -> None:
    with pytest.raises(MisuseError, match="did not arrive"):
        gradients(PAST[name], True, inputs(1, 32))


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


def test_names_of_what_is_deferred_are_none_of_tensors() -> None:
    own = {
        name for kind in (Normed, Hidden, Part) for each in kind.__mro__[:2] for name in vars(each)
    }
    own |= {
        name
        for kind in (Normed, Hidden, Part)
        for each in kind.__mro__[:2]
        for name in each.__annotations__
    }
    assert {name for name in own & set(dir(Tensor)) if not name.startswith("__")} == set()
