"""`layers.fuse` with a model that does more with a norm's output than it declares: refused by name, or right."""

from typing import Any

import pytest
import torch
from te_cpu_support import WIDTH, Trainer, inputs
from te_fused_support import Pair, blocks, gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.core.errors import MisuseError
from harness.precision.backends.te_fused import Placeholder


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


class Decides(Pair):
    """What the norm gives decides, and no gradient flows through that."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        out: Tensor = self.linear(h)
        return torch.where((h > 0).any(), out, -out)


class Written(Pair):
    """What the norm gives is written to."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h[:, 0].zero_()
        out: Tensor = self.linear(h)
        return out


class Watched(Pair):
    """A hook waits for the gradient of the norm's output, put there after the layer was called."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        out: Tensor = self.linear(h)
        h.register_hook(lambda grad: grad)
        return out


class Returned(Pair):
    """The model returns what the norm gives, too."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return torch.cat([self.linear(h), h], dim=-1)


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
        out: Tensor = self.linear(Past.apply(self.norm(x)))
        return out


class Past(torch.autograd.Function):
    """Hands on other values of the same shape, and asks PyTorch nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Reentrant(Pair):
    """The layer alone is computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.linear, self.norm(x), use_reentrant=True)
        return out


REFUSED: dict[type[Pair], str] = {
    Residual: "read elsewhere too, by torch.Tensor.sigmoid",
    Between: "read elsewhere too, by torch.Tensor.mul",
    Decides: "read elsewhere too, by torch.Tensor.gt",
    Written: "read elsewhere too, by torch.Tensor.__getitem__",
    Watched: "read elsewhere too, by torch.Tensor.register_hook",
    Returned: "read elsewhere too, by torch.cat",
    InPlace: "changed in place",
    Hooked: "did not reach it",
    Reentrant: "read elsewhere too, by torch.Tensor.requires_grad",
}


@pytest.mark.parametrize("make", REFUSED)
def test_a_norm_that_is_declared_wrongly_is_refused_by_name(make: type[Pair]) -> None:
    with pytest.raises(MisuseError) as caught:
        gradients(make, True, inputs(1, 32))
    (problem,) = caught.value.problems
    assert problem.where == "layer linear"
    assert REFUSED[make] in problem.what
    assert "fusible_norms" in problem.fix


@pytest.mark.parametrize("make", [Residual, Decides, Written, Returned])
def test_it_is_refused_in_evaluation_too(make: type[Pair]) -> None:
    trainer = Trainer("transformer_engine", make, {"layers": {"fuse": True}})
    with (
        torch.no_grad(),
        trainer.precision.context(),
        pytest.raises(MisuseError, match="read elsewhere too"),
    ):
        trainer.model(inputs(1, 32))


class Asks(Pair):
    """The shape of the norm's output is known."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        out: Tensor = self.linear(h)
        return out.view(h.shape) * h.dim() + torch.zeros(h.size(-1), device=h.device)


def test_the_shape_may_be_asked() -> None:
    trainer, _ = gradients(Asks, True, inputs(1, 32))
    assert blocks(trainer.model) == {"linear"}


def test_attributes_of_a_placeholder_have_no_name_of_a_tensors() -> None:
    own = {*vars(Placeholder), *Placeholder.__annotations__}
    assert {name for name in own & set(dir(Tensor)) if not name.startswith("__")} == set()


@pytest.mark.parametrize("part", ["norm", "linear"])
def test_a_forward_hook_sees_the_tensors_of_both_apart(part: str) -> None:
    seen: list[Tensor] = []

    def see(module: nn.Module, args: Any, out: Any) -> None:
        seen.extend([args[0], out])

    def make() -> Pair:
        made = Pair()
        made.get_submodule(part).register_forward_hook(see)
        return made

    trainer, found = gradients(make, True, inputs(1, 32))
    assert blocks(trainer.model) == set()
    assert len(seen) == 4
    assert all(type(each) is Tensor for each in seen)
    assert all(map(torch.equal, found, gradients(Pair, False, inputs(1, 32))[1]))


def test_a_norm_that_is_called_by_itself_is_computed() -> None:
    """In a loop of torch's own, where any module may be the one that is called from outside."""
    trainer = Trainer("transformer_engine", Pair, {"layers": {"fuse": True}})
    trainer.precision.wrap(trainer.optimizer)
    model: Any = trainer.model
    x = inputs(1, 32)
    h = model.norm(x)
    assert type(h) is Tensor
    torch.testing.assert_close(h, torch.rms_norm(x, (WIDTH,), model.norm.weight, 1e-3))
    model.linear(h).square().mean().backward()
    assert model.norm.weight.grad is not None
    assert blocks(model) == set()


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
