"""What `harness export` writes, read by transformers: the same bits as with our weights put in by hand."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

from harness.cli import app
from harness.models.gpt import build
from harness.models.llama import to_llama
from tests.support.runs import train

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 1, "rope_base": 500000.0},
    "tied": {"tied": True},
    "qwen3": {"qk_norm": True, "tied": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["fp8_hybrid", "bf16"])
def test_from_pretrained_gives_the_logits_of_our_weights(recipe: str, kind: str, tmp_path: Path) -> None:
    args = {"dim": 64, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 96, "tied": False, **KINDS[kind]}
    done = train(tmp_path, "--recipe", recipe, "--name", "r", "train.steps=4", f"model.args={json.dumps(args)}")
    assert done.returncode == 0, done.stdout
    run, out = tmp_path / "runs" / "r", tmp_path / "out"
    told = CliRunner().invoke(app, ["export", str(run), "--format", "hf", "--out", str(out)])
    assert told.exit_code == 0, told.output
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = transformers.AutoModelForCausalLM.from_pretrained(out).eval()

    own = load_file(run / "checkpoints" / "step-00000004" / "model.safetensors")
    model = build(**args)
    model.load_state_dict(own | ({"lm_head.weight": own["embed.weight"]} if model.settings.tied else {}))
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": args["kv_heads"], "head_dim": 32}
    rope = {"rope_type": "default", "rope_theta": args.get("rope_base", 10000.0)}
    others = {"rms_norm_eps": 1e-5, "rope_parameters": rope, "tie_word_embeddings": model.settings.tied}
    described, made = {
        False: (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        True: (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[kind == "qwen3"]
    expected: Any = made(described(**sizes, **others)).eval()
    expected.load_state_dict(to_llama(model.state_dict(), model.settings), strict=False)
    tokens = torch.arange(64).reshape(2, 32)
    with torch.no_grad():
        assert torch.equal(read(tokens).logits, expected(tokens).logits)
        torch.testing.assert_close(read(tokens).logits, model(tokens), rtol=0, atol=1e-5)
    assert type(read) is made
    assert (read.lm_head.weight is read.model.embed_tokens.weight) is model.settings.tied
    assert read.dtype == torch.float32


def test_a_sample_can_be_generated(tmp_path: Path) -> None:
    done = train(tmp_path, "--name", "r", "train.steps=2")
    assert done.returncode == 0, done.stdout
    out = tmp_path / "out"
    assert CliRunner().invoke(app, ["export", str(tmp_path / "runs" / "r"), "--out", str(out)]).exit_code == 0
    read = transformers.AutoModelForCausalLM.from_pretrained(out)
    prompt = torch.tensor([list(b"The ")])
    made: Any = read.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)  # type: ignore[operator]
    assert made.shape == (1, 9)
