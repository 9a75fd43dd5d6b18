"""The built-in GPT against transformers' Llama and Qwen3: the same weights, the same logits, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from harness.core.errors import ConfigError
from harness.models.gpt import GPT, build
from harness.models.llama import build as build_llama
from harness.models.llama import config_of, from_llama, to_llama

SMALL: dict[str, Any] = {"vocab": 160, "dim": 64, "layers": 2, "heads": 4, "ffn": 112}
LLAMA_31 = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
KINDS = {
    "untied": {},
    "tied": {"tied": True},
    "grouped": {"kv_heads": 2},
    "one_kv_head": {"kv_heads": 1, "tied": True},
    "rope_base": {"rope_base": 500000.0, "kv_heads": 2},
    "rope_scaling": {"rope_base": 500000.0, "rope_scaling": LLAMA_31},
    "eps": {"norm_eps": 1e-3},
    "qwen3": {"qk_norm": True, "kv_heads": 2, "rope_base": 1000000.0},
    "qwen3_tied": {"qk_norm": True, "tied": True},
}
CONTEXT = 64


def fresh(**args: Any) -> GPT:
    """With norms' weights that are not all 1, which would hide a norm in the wrong place."""
    torch.manual_seed(0)
    model = build(**SMALL | args)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def theirs(model: GPT) -> Any:
    """transformers' model as our config.json describes it, with its own fresh weights."""
    config = transformers.AutoConfig.for_model(**config_of(model.settings, CONTEXT))
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def tokens() -> torch.Tensor:
    return torch.randint(0, 160, (2, CONTEXT), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", KINDS)
def test_our_weights_give_their_logits(kind: str) -> None:
    model = fresh(**KINDS[kind])
    other = theirs(model)
    assert type(other).__name__ == ("Qwen3ForCausalLM" if "qwen3" in kind else "LlamaForCausalLM")
    with torch.no_grad():
        before = other(tokens()).logits
        loaded = other.load_state_dict(to_llama(model.state_dict(), model.settings), strict=False)
        assert loaded.unexpected_keys == []
        assert loaded.missing_keys == (["lm_head.weight"] if model.settings.tied else [])
        found, expected = other(tokens()).logits, model(tokens())
    assert not torch.allclose(before, expected, atol=1e-2), "the weights were not loaded"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_their_weights_give_our_logits(kind: str) -> None:
    model = fresh(**KINDS[kind])
    other = theirs(model)
    model.load_state_dict(from_llama(other.state_dict(), model.settings))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()), other(tokens()).logits, rtol=0, atol=1e-5)


def test_gradients_agree_too() -> None:
    model = fresh(kv_heads=2, loss_chunk=10, recompute="block")
    other = theirs(model)
    other.load_state_dict(to_llama(model.state_dict(), model.settings))
    drawn = tokens()
    model(drawn[:, :-1], drawn[:, 1:]).backward()
    other(drawn, labels=drawn).loss.backward()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    wanted = dict(other.named_parameters())
    made = to_llama(gradients, model.settings)
    assert made.keys() == wanted.keys()
    for name, gradient in made.items():
        torch.testing.assert_close(gradient, wanted[name].grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", ["grouped", "tied", "rope_scaling", "qwen3"])
def test_a_folder_of_theirs_becomes_a_gpt(kind: str, sharded: bool, tmp_path: Path) -> None:
    other = theirs(fresh(**KINDS[kind]))
    other.save_pretrained(tmp_path, max_shard_size="60KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() is sharded
    model = build_llama(str(tmp_path), z_loss=1e-4, recompute="mlp")
    assert (model.settings.z_loss, model.settings.recompute) == (1e-4, "mlp")
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()), other(tokens()).logits, rtol=0, atol=1e-5)


def test_weights_in_bf16_become_fp32(tmp_path: Path) -> None:
    theirs(fresh()).bfloat16().save_pretrained(tmp_path)
    assert {parameter.dtype for parameter in build_llama(str(tmp_path)).parameters()} == {
        torch.float32
    }


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, attention_bias=True),
            "attention_bias",
        ),
        (
            transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, hidden_act="gelu"),
            "hidden_act gelu",
        ),
        (
            transformers.Qwen3Config(hidden_size=64, num_attention_heads=4, head_dim=32),
            "head_dim 32",
        ),
        (
            transformers.LlamaConfig(
                rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
            ),
            "rope_type linear",
        ),
        (transformers.GPT2Config(), "'gpt2' is neither llama nor qwen3"),
    ],
)
def test_what_the_gpt_does_not_compute_is_refused(config: Any, named: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=named):
        build_llama(str(tmp_path))
