"""What costs less memory computes the same: recomputed blocks under every backend, and the loss in chunks."""

from __future__ import annotations

import copy
import weakref
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness import Precision
from harness.models import Task
from harness.models.gpt import GPT, build
from harness.models.task import training_flops
from tests.support.matrix import rest_nightly

RECIPES = ("fp32", "bf16", "fp16_scaler", "fp8_hybrid", "fp8_dynamic", "fp8_block")
ASKED = ({"recompute": "mlp"}, {"recompute": "block"}, {"recompute": "block", "recompute_every": 2})


def small(**args: Any) -> GPT:
    torch.manual_seed(0)
    return build(
        **{"vocab": 96, "dim": 64, "layers": 3, "heads": 2, "kv_heads": 1, "ffn": 96, **args}
    )


def trained(
    recipe: str, steps: int = 3, **args: Any
) -> tuple[list[float], dict[str, Tensor], list[Any]]:
    """Losses, last weights, and after each step the precision state with its statistics."""
    precision = Precision.from_recipe(recipe)
    model = precision.prepare(small(**args))
    assert any(layer.precision == "fp8" for layer in precision.plan.layers) is recipe.startswith(
        "fp8"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    generator = torch.Generator().manual_seed(3)
    losses: list[float] = []
    state: list[Any] = []
    for _ in range(steps):
        for _ in range(2):
            drawn = torch.randint(0, 96, (2, 33), generator=generator)
            with precision.context():
                loss = model(drawn[:, :-1], drawn[:, 1:])
            precision.backward(loss / 2)
            losses.append(loss.item())
        precision.step(optimizer, max_grad_norm=1.0)
        optimizer.zero_grad()
        state += tree_leaves(copy.deepcopy(precision.state_dict()))
    return losses, dict(model.state_dict()), state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "args"),
    rest_nightly(product(RECIPES, ASKED), *zip(RECIPES, cycle(ASKED), strict=False)),
)
def test_recomputing_leaves_every_bit(recipe: str, args: dict[str, Any]) -> None:
    losses, weights, state = trained(recipe)
    again, same_weights, same_state = trained(recipe, **args)
    assert again == losses
    assert losses[0] != losses[-1]
    for name, tensor in weights.items():
        assert torch.equal(tensor, same_weights[name]), name
    assert len(state) == len(same_state)
    for mine, theirs in zip(same_state, state, strict=True):
        if isinstance(mine, Tensor):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        else:
            assert mine == theirs


class Peak(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, of those made inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage(), before)
        return out

    def _add(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        if storage.data_ptr() in before or storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self._now += size
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._gone, size)

    def _gone(self, size: int) -> None:
        self._now -= size


def peak(tokens: int = 512, **args: Any) -> int:
    """Bytes at the peak of one forward and backward in fp32, of weights' gradients and activations."""
    model = small(**args)
    drawn = torch.randint(0, 96, (1, tokens + 1))
    with Peak() as counted:
        model(drawn[:, :-1], drawn[:, 1:]).backward()
    return counted.most


def test_a_large_vocabulary_does_not_own_the_memory() -> None:
    """512 tokens of a vocabulary of 16,384: logits of all of them take 32 MiB, of 32 of them 2 MiB."""
    sizes = {"vocab": 16384, "dim": 32, "layers": 1}
    logits, weights = 512 * 16384 * 4, 16384 * 32 * 4
    plain, chunked = peak(**sizes), peak(**sizes, loss_chunk=32)
    assert plain > 2 * logits, "the measure sees them: the softmax and its gradient at least"
    assert chunked < 6 * weights, (
        "what is left: gradients of embedding and head, and one more while they are summed"
    )
    assert chunked < plain / 4


class Copies(TorchDispatchMode):
    """Shapes of the tensors that are copied into another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default:
            self.shapes.append(tuple(out.shape))
        return out


def test_gradients_of_queries_keys_and_values_are_joined_without_a_copy() -> None:
    model = small(layers=1)
    drawn = torch.randint(0, 96, (1, 33))
    loss = model(drawn[:, :-1], drawn[:, 1:])
    with Copies() as counted:
        loss.backward()
    heads = 2 + 2 * 1
    assert (1, 32, heads, 32) not in counted.shapes, counted.shapes


def test_recomputing_keeps_fewer_activations() -> None:
    none, mlp, block = (peak(layers=6, recompute=kind) for kind in ("none", "mlp", "block"))
    every_other = peak(layers=6, recompute="block", recompute_every=2)
    assert block < mlp < none
    assert block < every_other < none


@pytest.mark.parametrize("recipe", ["bf16", "fp16_scaler", "fp8_hybrid"])
def test_packed_documents_train_in_16_bits(recipe: str) -> None:
    """Close to fp32, where tests/unit/models/test_gpt_options.py has them exact."""
    drawn = torch.randint(0, 96, (2, 33), generator=torch.Generator().manual_seed(3))
    segments = (torch.arange(32) // 12).expand(2, 32).contiguous()
    found = {}
    for name in ("fp32", recipe):
        precision = Precision.from_recipe(name)
        model = precision.prepare(small(recompute="block", loss_chunk=10, qk_norm=True))
        with precision.context():
            loss = model(drawn[:, :-1], drawn[:, 1:], segments)
        precision.backward(loss)
        found[name] = loss.item()
    assert found[recipe] == pytest.approx(found["fp32"], rel=0.01)
    assert found[recipe] != found["fp32"]


@pytest.mark.parametrize(
    "args", [{}, {"loss_chunk": 40}, {"recompute": "block"}, {"recompute": "mlp"}]
)
def test_operations_are_counted_whatever_is_asked_for(args: dict[str, Any]) -> None:
    """Recomputing is no more of the model, and a chunk no less: MFU stays what it was."""
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    batch = {"inputs": tokens, "targets": tokens}
    model, plain = small(**args), small()
    expected = training_flops(plain, Task(plain, "gpt"), batch)
    assert expected > 0
    assert training_flops(model, Task(model, "gpt"), batch) == expected
    packed = training_flops(model, Task(model, "gpt"), {**batch, "segments": tokens})
    assert packed == expected


@pytest.mark.parametrize("recompute", ["block", "mlp"])
def test_dropout_within_what_is_recomputed_is_the_same_in_backward(recompute: str) -> None:
    """As an adapter brings it. The blocks themselves have none."""
    found: list[list[torch.Tensor]] = []
    for way in ("none", recompute):
        model = small(recompute=way)
        for block in model.blocks:
            mlp: Any = block.get_submodule("mlp")
            mlp.down = nn.Sequential(mlp.down, nn.Dropout(0.5))
        torch.manual_seed(3)
        ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
        model(ids, ids).backward()
        found.append([param.grad for param in model.parameters() if param.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
