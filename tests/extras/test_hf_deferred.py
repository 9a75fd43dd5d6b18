"""Hugging Face's models without memory: the bits of a whole build, and what is refused before weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from harness.core import deferred
from harness.core.config import ModelConfig
from harness.core.errors import ConfigError
from harness.core.shards import Rows
from harness.core.state import seed_everything
from harness.models import Task, build_deferred, build_model
from harness.models.huggingface import causal_lm
from harness.models.stored import StoredTensor
from tests.extras.tiny_models import CONFIGS, batch, fresh, save

CPU = torch.device("cpu")


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def both(folder: Path, **args: Any) -> tuple[nn.Module, nn.Module]:
    """The model of the folder, built whole and without memory. Asserts that both are the same, bit for bit."""
    config = ModelConfig(target=f"hf:{folder}", args=args)
    seed_everything(3)
    whole = build_model(config)
    after = torch.get_rng_state()
    seed_everything(3)
    later = build_deferred(config, CPU)
    assert torch.equal(torch.get_rng_state(), after)

    recording: Any = deferred.recording_of(later)
    theirs, ours = tensors(whole), tensors(later)
    assert list(theirs) == list(ours)
    for name, expected in theirs.items():
        found = ours[name]
        assert found.requires_grad == expected.requires_grad
        assert found.dtype == expected.dtype
        if found.is_meta:
            found = recording.value(recording.view(found))
        assert torch.equal(found, expected), name
    found, expected = causal_lm(later), causal_lm(whole)
    assert found is not None
    assert expected is not None
    assert found.unpackable == expected.unpackable
    return whole, later


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_fresh_weights_are_those_of_a_whole_build(kind: str, tmp_path: Path) -> None:
    CONFIGS[kind]().save_pretrained(tmp_path)
    _, later = both(tmp_path)
    assert sum(tensor.is_meta for tensor in tensors(later).values()) > 5


LORA = {"r": 4, "targets": ["q_proj", "v_proj", "c_attn"]}


@pytest.mark.parametrize(
    ("kind", "dtype", "sizes", "args"),
    [
        ("llama", torch.float32, {}, {}),
        ("llama", torch.bfloat16, {"tie_word_embeddings": True}, {"lora": {"r": 128}}),
        ("gpt2", torch.bfloat16, {}, {"lora": LORA}),
        # Experts are several tensors in the file, and one in the model.
        ("mixtral", torch.bfloat16, {}, {"lora": LORA}),
        ("qwen3", torch.bfloat16, {}, {"gradient_checkpointing": True}),
    ],
)
def test_stored_weights_are_read_by_rows(
    kind: str, dtype: torch.dtype, sizes: dict[str, Any], args: dict[str, Any], tmp_path: Path
) -> None:
    save(tmp_path, kind, dtype, shard="50KB", **sizes)
    whole, later = both(tmp_path, **args)
    recording: Any = deferred.recording_of(later)
    stored = 0
    for name, expected in whole.named_parameters():
        if "lora_" in name:
            continue
        view = recording.view(later.get_parameter(name))
        assert recording.has_rows(view), name
        for rank in range(3):
            rows = Rows.of_rank(tuple(expected.shape), rank, 3)
            found = recording.rows(view, rows.begin, rows.end)
            assert torch.equal(found, expected[rows.begin : rows.end]), name
        stored += 1
    assert stored > 15


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_the_trial_reads_no_matrix(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it finds out is what the stored weights would say: `both` compares that."""
    save(tmp_path, kind, torch.bfloat16)
    read: list[int] = []
    real = StoredTensor.rows

    def rows(self: StoredTensor, begin: int, end: int) -> Tensor:
        found = real(self, begin, end)
        read.append(found.nbytes)
        return found

    monkeypatch.setattr(StoredTensor, "rows", rows)
    later = build_deferred(ModelConfig(target=f"hf:{tmp_path}"), CPU)
    task = Task(later, f"hf:{tmp_path}", "nats per token")
    tokens = batch()
    assert deferred.try_model(later, lambda: task.try_on(later, tokens, torch.bfloat16)) == ""

    # Norms, biases and routers are small.
    small = [tensor.numel() for tensor in later.state_dict().values() if tensor.numel() <= 4096]
    assert max(read, default=0) <= 2 * max(small)
    both(tmp_path)


def test_a_model_that_fails_the_trial_is_tried_with_its_stored_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a model of which random weights say that it sees later tokens, and its own do not."""
    save(tmp_path, "llama")
    stored = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    real = transformers.LlamaForCausalLM.forward
    own: list[bool] = []

    def forward(self: Any, input_ids: Tensor, **named: Any) -> Any:
        output = real(self, input_ids=input_ids, **named)
        own.append(torch.equal(self.lm_head.weight.clone(), stored))
        if not own[-1]:
            output.logits = output.logits + input_ids.sum()
        return output

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    build_deferred(ModelConfig(target=f"hf:{tmp_path}"), CPU)
    assert own[0] is False
    assert own[-1] is True


def test_a_head_that_is_stored_beside_its_tie_is_tied_as_in_a_whole_build(tmp_path: Path) -> None:
    save(tmp_path, "llama", tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, file, {"format": "pt"})
    whole, later = both(tmp_path)
    for model in (whole, later):
        assert model.get_parameter("lm_head.weight") is model.get_parameter(
            "model.embed_tokens.weight"
        )

    # Another one is no tie: transformers keeps both.
    weights["lm_head.weight"] += 1
    save_file(weights, file, {"format": "pt"})
    whole, later = both(tmp_path)
    assert later.get_parameter("lm_head.weight") is not later.get_parameter(
        "model.embed_tokens.weight"
    )


def test_weights_that_do_not_fit_are_named_before_any_is_read(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    head = weights.pop("lm_head.weight")
    weights["score.weight"] = head[:2].clone()
    weights["model.norm.weight"] = torch.ones(65)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        build_deferred(ModelConfig(target=f"hf:{tmp_path}"), CPU)
    told = str(caught.value)
    assert "1 weight missing: lm_head.weight" in told
    assert "1 weight would be left out: score.weight" in told
    assert "of another shape: model.norm.weight [65], not [64]" in told


def test_a_folder_that_only_transformers_can_read_is_built_whole(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(deferred.CannotDeferError, match="adapters beside the weights"):
        build_deferred(ModelConfig(target=f"hf:{tmp_path}"), CPU)


def test_the_file_without_an_index_is_the_one_that_is_read(tmp_path: Path) -> None:
    """transformers takes model.safetensors where a folder has shards, too."""
    save(tmp_path, "llama", shard="50KB")
    torch.manual_seed(1)
    other = fresh("llama")
    with torch.no_grad():
        other.lm_head.weight.add_(1)
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    whole, _ = both(tmp_path)
    assert torch.equal(whole.get_parameter("lm_head.weight"), state["lm_head.weight"])
