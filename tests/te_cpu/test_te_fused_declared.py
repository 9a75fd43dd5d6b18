"""`layers.fuse` with a model that does more with a norm's output than it declares: right all the same, or refused."""

import pytest
import torch
from te_cpu_support import inputs
from te_fused_support import Pair, Unseen, blocks, gradients
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harness.core.errors import MisuseError


class Residual(Pair):
    """What the norm gives is used beside the layer too."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return h + self.linear(h) * h.sigmoid()


class Between(Pair):
    """The layer does not get what the norm gives."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(2 * self.norm(x) + x)
        return out


@pytest.mark.parametrize("make", [Residual, Between])
def test_what_is_declared_wrongly_is_right_all_the_same(make: type[Pair]) -> None:
    x = inputs(1, 32)
    trainer, fused = gradients(make, True, x)
    assert blocks(trainer.model) == ({"linear"} if make is Residual else set())
    _, apart = gradients(make, False, x)
    for ours, theirs in zip(fused, apart, strict=True):
        assert (ours - theirs).norm() <= (0.03 if make is Residual else 0) * theirs.norm()


class InPlace(Pair):
    """The norm's input is changed before its output is used."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        h = self.norm(x)
        x += 1
        out: Tensor = self.linear(h)
        return out


class Hooked(Pair):
    """A function of autograd stands between norm and layer."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(Unseen.apply(self.norm(x)))
        return out


class Reentrant(Pair):
    """The layer alone is computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.linear, self.norm(x), use_reentrant=True)
        return out


class Written(Pair):
    """What the norm gives is written to, by itself and through views."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h[:, 0].zero_()
        h.mul_(2)
        h[:, 1] += 1
        first = next(iter(self.norm(x)))
        out: Tensor = self.linear(h) * first
        return out


class Hooks(Pair):
    """A hook changes the gradient of the norm's output before the layer is called."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h.register_hook(lambda grad: 3 * grad)
        out: Tensor = self.linear(h)
        return out


@pytest.mark.parametrize("make", [Written, Hooks])
def test_what_has_a_hold_on_the_norms_output_makes_both_run_apart(make: type[Pair]) -> None:
    trainer, fused = gradients(make, True, inputs(1, 32))
    assert blocks(trainer.model) == set()
    assert all(map(torch.equal, fused, gradients(make, False, inputs(1, 32))[1]))


class Watched(Pair):
    """A hook waits for the gradient of the norm's output, put there after the layer was called."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        out: Tensor = self.linear(h)
        h.register_hook(lambda grad: grad)
        return out


@pytest.mark.parametrize("make", [InPlace, Hooked, Reentrant, Watched])
def test_a_wrong_result_is_refused_by_name(make: type[Pair]) -> None:
    with pytest.raises(MisuseError) as caught:
        gradients(make, True, inputs(1, 32))
    (problem,) = caught.value.problems
    assert problem.where == "layer linear"
    told = {InPlace: "changed in place", Watched: "a hook is put on the gradient"}.get(
        make, "did not arrive"
    )
    assert told in problem.what
    assert "fusible_norms" in problem.fix


def test_a_backward_hook_on_the_norm_runs_both_apart() -> None:
    seen: list[Tensor] = []

    def make() -> Pair:
        made = Pair()
        made.norm.register_full_backward_hook(
            lambda module, grads, outputs: seen.append(outputs[0])
        )
        return made

    trainer, _ = gradients(make, True, inputs(1, 32))
    assert blocks(trainer.model) == set()
    assert len(seen) == 2


class Teacher(Pair):
    """The norm runs without gradients, the layer with them."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.norm(x)
        out: Tensor = self.linear(h)
        return out


def test_a_norm_without_gradients_gets_none() -> None:
    for fuse in (True, False):
        trainer, found = gradients(Teacher, fuse, inputs(1, 32))
        assert trainer.model.get_parameter("norm.weight").grad is None
        assert len(found) == 2, "output, and the gradient of the layer's weight"
