"""`model.args.loss_chunk` of Hugging Face models: the loss and gradients are those of the whole logits.

The oracle is `Task.loss` of the same model without chunks, whose loss other tests compare with transformers' own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from harness.core.errors import ConfigError
from harness.models import Task
from harness.models.task import training_flops
from harness.precision.api import Precision
from harness.precision.recipe import Recipe, load_recipe
from tests.extras.tiny_models import CONFIGS, VOCAB, batch, estimated, load, save
from tests.support.runs import metrics, train_ranks
from tests.support.wide import Wide

KINDS = sorted(CONFIGS)
# Three documents in the first sample, one in the second.
SEGMENTS = torch.tensor([[0] * 7 + [1] * 13 + [2] * 12, [0] * 32])
# Two that scale their logits after the head, and one that caps them.
SCALES = {
    "gemma2": lambda: transformers.Gemma2Config(**_SIZES, head_dim=16),
    "granite": lambda: transformers.GraniteConfig(**_SIZES, logits_scaling=8.0),
    "cohere": lambda: transformers.CohereConfig(**_SIZES),
}
_SIZES: Any = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def trained(model: nn.Module, tokens: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The loss, and each weight's gradient."""
    model.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        loss = Task(model, "hf").loss(model, tokens)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (found[name].double() - tensor.double()).norm()
        assert difference <= bound * tensor.double().norm(), name


@pytest.mark.parametrize(
    ("dtype", "packed"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True), (torch.float16, False)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_all_logits(
    kind: str, dtype: torch.dtype, packed: bool, tmp_path: Path
) -> None:
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    save(tmp_path, kind, **(no_dropout if kind == "gpt2" else {}))
    tokens = batch()
    tokens["targets"][0, 3:9] = -100
    if packed:
        tokens["segments"] = SEGMENTS
    expected = trained(load(tmp_path), tokens, dtype)
    bound = 2e-6 if dtype == torch.float32 else 2e-2
    # The last chunk of 7 is a short one; 1000 are more than there are.
    for chunk in (7, 1000):
        assert_alike(trained(load(tmp_path, loss_chunk=chunk), tokens, dtype), expected, bound)


@pytest.mark.parametrize(
    "args",
    [
        {"lora": {"r": 4}},
        {"gradient_checkpointing": True},
        {"config": {"tie_word_embeddings": True}, "weights": "fresh"},
    ],
)
def test_with_adapters_recomputed_blocks_and_a_tied_head(
    args: dict[str, Any], tmp_path: Path
) -> None:
    save(tmp_path, "llama")
    found: list[dict[str, Tensor]] = []
    for chunk in (0, 10):
        torch.manual_seed(3)
        found.append(trained(load(tmp_path, loss_chunk=chunk, **args), batch(), torch.float32))
    assert_alike(found[1], found[0], 2e-6)


@pytest.mark.parametrize("chunk", [10, 1000])
def test_dropout_of_an_adapter_on_the_head_is_the_same_in_backward(
    chunk: int, tmp_path: Path
) -> None:
    """By finite differences in float64: along its own gradient the loss grows by the gradient's squared norm."""
    save(tmp_path, "llama")
    lora = {"r": 4, "dropout": 0.5, "targets": ["lm_head"]}
    model = load(tmp_path, loss_chunk=chunk, lora=lora).double()
    task, tokens = Task(model, "hf"), batch()
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for param in trained:
            param.normal_(std=0.1)

    def loss() -> Tensor:
        torch.manual_seed(5)
        return task.loss(model, tokens)

    loss().backward()
    gradients = [p.grad.clone() for p in trained if p.grad is not None]
    squared = float(sum(gradient.square().sum() for gradient in gradients))
    ends: list[float] = []
    for sign in (1.0, -1.0):
        step = sign * 1e-3 / squared**0.5
        with torch.no_grad():
            for param, gradient in zip(trained, gradients, strict=True):
                param.add_(gradient, alpha=step)
            ends.append(float(loss()))
            for param, gradient in zip(trained, gradients, strict=True):
                param.sub_(gradient, alpha=step)
    assert (ends[0] - ends[1]) / 2e-3 == pytest.approx(squared**0.5, rel=1e-2)


def test_an_fp8_head_and_what_looks_at_it(tmp_path: Path) -> None:
    """Chunks go through the converted layer, and hooks see its logits. Scales are 1 in the first step."""
    save(tmp_path, "llama")
    given = load_recipe("fp8_hybrid").model_dump()
    given["layers"]["exclude_if_present"] = []
    found: list[dict[str, Tensor]] = []
    for chunk in (0, 16):
        precision = Precision(Recipe.model_validate(given))
        model = precision.prepare(load(tmp_path, loss_chunk=chunk))
        seen: list[torch.Size] = []
        head: Any = model.get_submodule("lm_head")
        head.register_forward_hook(lambda *args, seen=seen: seen.append(args[2].shape))
        with precision.context():
            loss = Task(model, "hf").loss(model, batch())
        assert {shape[-1] for shape in seen} == {VOCAB}
        precision.backward(loss)
        assert "lm_head" in precision.plan.fp8_layers()
        weight = model.get_parameter("lm_head.weight").grad
        assert weight is not None
        found.append({"loss": loss.detach(), "weight": weight})
    assert_alike(found[1], found[0], 2e-2)


def test_a_head_with_a_bias(tmp_path: Path) -> None:
    transformers.PhiConfig(**_SIZES | {"num_key_value_heads": 4}).save_pretrained(tmp_path)
    found: list[dict[str, Tensor]] = []
    for chunk in (0, 10):
        torch.manual_seed(3)
        model: Any = load(tmp_path, loss_chunk=chunk)
        nn.init.normal_(model.lm_head.bias)
        found.append(trained(model, batch(), torch.float32))
    assert "lm_head.bias" in found[0]
    assert_alike(found[1], found[0], 2e-6)


def test_without_a_target_the_loss_is_zero(tmp_path: Path) -> None:
    tokens = batch()
    tokens["targets"][:] = -100
    found = trained(load(save(tmp_path, "llama"), loss_chunk=10), tokens, torch.float32)
    assert all(not tensor.any() for tensor in found.values())


def test_a_loss_that_is_not_finite_is_shown(tmp_path: Path) -> None:
    """The 0 of a batch without targets must not stand for it."""
    model: Any = load(save(tmp_path, "llama"), loss_chunk=10)
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    assert not trained(model, batch(), torch.float32)["loss"].isfinite()


def test_the_routers_loss_is_added(tmp_path: Path) -> None:
    save(tmp_path, "mixtral")
    found = [
        Task(model, "hf").loss(model, batch())
        for model in (load(tmp_path, loss_chunk=10), load(tmp_path, loss_chunk=10, aux_loss=False))
    ]
    whole = load(tmp_path)
    torch.testing.assert_close(found[0], Task(whole, "hf").loss(whole, batch()))
    assert found[0] > found[1]


def test_no_more_logits_than_a_chunk_are_held(tmp_path: Path) -> None:
    vocab = 4096
    save(tmp_path, "llama", vocab_size=vocab, hidden_size=16)
    tokens = batch()
    largest: dict[int, int] = {}
    for chunk in (0, 24):
        with Wide(vocab) as seen:
            trained(load(tmp_path, loss_chunk=chunk), tokens, torch.float32)
        largest[chunk] = seen.largest
    assert largest == {0: 64 * vocab, 24: 24 * vocab}


def test_the_model_itself_returns_logits(tmp_path: Path) -> None:
    """After a loss, and after one that failed: a sample or an export of it needs them."""
    model: Any = load(save(tmp_path, "llama"), loss_chunk=10)
    tokens = batch()
    trained(model, tokens, torch.float32)
    assert model(tokens["inputs"]).logits.shape == (2, 32, VOCAB)
    with pytest.raises(RuntimeError):
        Task(model, "hf").loss(model, {**tokens, "targets": tokens["targets"][:, :3]})
    assert model(tokens["inputs"]).logits.shape == (2, 32, VOCAB)


@pytest.mark.parametrize("kind", sorted(SCALES))
def test_a_model_that_changes_its_logits_after_the_head_is_refused(
    kind: str, tmp_path: Path
) -> None:
    SCALES[kind]().save_pretrained(tmp_path)
    load(tmp_path)
    with pytest.raises(ConfigError, match="cannot compute its loss in chunks") as refused:
        load(tmp_path, loss_chunk=10)
    assert "model.args.loss_chunk" in str(refused.value)


def test_the_operations_of_a_step_are_counted(tmp_path: Path) -> None:
    """On tensors without values, through a module that holds the model: train/mfu is of them."""
    save(tmp_path, "llama")
    whole, chunked = load(tmp_path), load(tmp_path, loss_chunk=8)
    expected = training_flops(whole, Task(whole, "hf"), batch())
    assert training_flops(chunked, Task(chunked, "hf"), batch()) == expected > 0


@pytest.mark.nightly
def test_an_estimate_knows_what_chunks_save(tmp_path: Path) -> None:
    vocab = 2**16
    folder = save(tmp_path, "llama", vocab_size=vocab, max_position_embeddings=4096)
    whole, chunked = (
        estimated(folder, "H100", 4096, f"{{loss_chunk: {chunk}}}") for chunk in (0, 512)
    )
    # Logits and their gradient, in 16 bits.
    saved = 2 * (4096 - 512) * vocab * 2 / 2**30
    assert whole["peak_gib"] - chunked["peak_gib"] == pytest.approx(saved, rel=0.1)


@pytest.mark.nightly
def test_an_estimate_offers_chunks_where_the_logits_do_not_fit(tmp_path: Path) -> None:
    """On a T4, of 16 GiB. Gemma 2 would refuse them."""
    sizes: Any = {"vocab_size": 2**20, "max_position_embeddings": 4096, "hidden_size": 64}
    offered: dict[str, list[list[str]]] = {}
    save(tmp_path / "llama", "llama", **sizes)
    transformers.Gemma2Config(**_SIZES | sizes, head_dim=16).save_pretrained(tmp_path / "gemma2")
    for kind in ("llama", "gemma2"):
        found = estimated(tmp_path / kind, "T4", 4096)
        assert found["fits"] is False
        offered[kind] = [way["overrides"] for way in found["would_fit"]]
    chunk = ["model.args.loss_chunk=1024"]
    assert chunk in offered["llama"]
    assert chunk not in offered["gemma2"]


@pytest.mark.nightly
@pytest.mark.dist
@pytest.mark.parametrize(
    ("engine", "more"),
    [("fsdp", ()), ("deepspeed", ("engine.zero_stage=2",)), ("ddp", ())],
)
def test_ranks_train_as_without_chunks(engine: str, more: tuple[str, ...], tmp_path: Path) -> None:
    """Where the weight of the head is gathered for its forward alone."""
    save(tmp_path / "model", "llama")
    losses: list[list[float]] = []
    for chunk in (0, 10):
        folder = tmp_path / str(chunk)
        folder.mkdir()
        ran = train_ranks(
            folder,
            2,
            *("--recipe", "fp32", "--name", "r", f"model.target=hf:{tmp_path / 'model'}"),
            *(f"model.args={{loss_chunk: {chunk}}}", "data.context=32", "train.steps=4"),
            *(
                "train.global_batch=4",
                "train.micro_batch=1",
                "train.lr=0.01",
                f"engine.name={engine}",
                *more,
            ),
        )
        assert ran.returncode == 0, ran.stdout
        losses.append([loss for _, loss in metrics(folder / "runs" / "r")])
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][0] - losses[0][-1] > 0.05, "it learns"
