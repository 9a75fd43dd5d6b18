"""What `harness export` writes, read by transformers: the same bits as with our weights put in by hand."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

from harness.cli import app
from harness.models.gpt import build
from harness.models.llama import to_llama
from tests.extras.tiny_models import load, save
from tests.support.runs import train

TEXT = "the quick brown fox jumps over the lazy dog and then the dog sleeps\n"

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 1, "rope_base": 500000.0},
    "tied": {"tied": True},
    "qwen3": {"qk_norm": True, "tied": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["fp8_hybrid", "bf16"])
def test_from_pretrained_gives_the_logits_of_our_weights(
    recipe: str, kind: str, tmp_path: Path
) -> None:
    args = {
        "dim": 64,
        "layers": 2,
        "heads": 2,
        "kv_heads": 2,
        "ffn": 96,
        "tied": False,
        **KINDS[kind],
    }
    done = train(
        tmp_path,
        "--recipe",
        recipe,
        "--name",
        "r",
        "train.steps=4",
        f"model.args={json.dumps(args)}",
    )
    assert done.returncode == 0, done.stdout
    run, out = tmp_path / "runs" / "r", tmp_path / "out"
    told = CliRunner().invoke(app, ["export", str(run), "--format", "hf", "--out", str(out)])
    assert told.exit_code == 0, told.output
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = transformers.AutoModelForCausalLM.from_pretrained(out).eval()

    own = load_file(run / "checkpoints" / "step-00000004" / "model.safetensors")
    model = build(**args)
    model.load_state_dict(
        own | ({"lm_head.weight": own["embed.weight"]} if model.settings.tied else {})
    )
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": args["kv_heads"], "head_dim": 32}
    rope = {"rope_type": "default", "rope_theta": args.get("rope_base", 10000.0)}
    others = {
        "rms_norm_eps": 1e-5,
        "rope_parameters": rope,
        "tie_word_embeddings": model.settings.tied,
    }
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
    assert (
        CliRunner()
        .invoke(app, ["export", str(tmp_path / "runs" / "r"), "--out", str(out)])
        .exit_code
        == 0
    )
    read = transformers.AutoModelForCausalLM.from_pretrained(out)
    prompt = torch.tensor([list(b"The ")])
    made: Any = read.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False
    )  # type: ignore[operator]
    assert made.shape == (1, 9)


def trained(folder: Path, kind: str, *more: str, **args: Any) -> tuple[Path, Any]:
    """The run folder of a few steps on a model of transformers, and that model with the run's last weights."""
    base = save(folder / "base", kind)
    given = [
        f"model.target=hf:{base}",
        f"model.args={json.dumps(args)}",
        "train.steps=4",
        "data.context=32",
        *more,
    ]
    config = folder / "hf.yaml"
    config.write_text("train: {global_batch: 4, micro_batch: 2}\ndata: {val_samples: 8}\n")
    done = train(folder, "--config", str(config), "--recipe", "fp8_hybrid", "--name", "r", *given)
    assert done.returncode == 0, done.stdout
    run = folder / "runs" / "r"
    own = load_file(run / "checkpoints" / "step-00000004" / "model.safetensors")
    model: Any = load(base, **args)
    before = {
        name: tensor.clone() for name, tensor in own.items() if tensor.ndim == 1 or "lora" in name
    }
    assert any(
        not torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items()
    ), "nothing trained"
    model.load_state_dict(own, strict=False)
    return run, model.eval()


def export(run: Path, out: Path) -> Path:
    told = CliRunner().invoke(app, ["export", str(run), "--out", str(out)])
    assert told.exit_code == 0, told.output
    return out


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_a_model_of_theirs_goes_out_as_it_came_in(kind: str, tmp_path: Path) -> None:
    run, model = trained(tmp_path, kind)
    out = export(run, tmp_path / "out")
    base = json.loads((tmp_path / "base" / "config.json").read_text())
    made = json.loads((out / "config.json").read_text())
    assert {key for key in base if made.get(key) != base[key]} <= {
        "transformers_version",
        "output_router_logits",
    }
    read = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="sdpa").eval()
    tokens = torch.arange(64).reshape(2, 32)
    with torch.no_grad():
        assert torch.equal(read(tokens).logits, model(tokens).logits)
    card = (out / "README.md").read_text()
    assert "| `lm_head` | " in card
    assert "| `hf:base`, args `{}` |" in card, "and not where it lies on this machine"


def test_of_lora_the_adapters_alone_go_out(tmp_path: Path) -> None:
    run, model = trained(tmp_path, "llama", lora={"r": 4})
    out = export(run, tmp_path / "out")
    assert {path.name for path in out.iterdir()} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert {name.split(".")[-2] for name in load_file(out / "adapter_model.safetensors")} == {
        "lora_A",
        "lora_B",
    }
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", attn_implementation="sdpa"
    )
    read = peft.PeftModel.from_pretrained(plain, str(out)).eval()
    tokens = torch.arange(64).reshape(2, 32)
    with torch.no_grad():
        assert torch.equal(read(tokens).logits, model(tokens).logits)
        assert not torch.equal(read(tokens).logits, read.unload()(tokens).logits)
    assert "Adapters of 8,192 parameters for base" in (out / "README.md").read_text()


def test_the_tokenizer_of_the_data_goes_with_the_weights(tmp_path: Path) -> None:
    words = {
        word: number
        for number, word in enumerate(["<|endoftext|>", "<unk>", *sorted(set(TEXT.split()))])
    }
    made: Any = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path / "words"
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|endoftext|>", unk_token="<unk>"
    ).save_pretrained(folder)
    (tmp_path / "text.txt").write_text(TEXT * 400)
    given = [
        f"data.path={tmp_path / 'text.txt'}",
        f"data.tokenizer={folder}",
        "data.context=16",
        "train.steps=2",
    ]
    done = train(tmp_path, "--name", "r", *given)
    assert done.returncode == 0, done.stdout
    out = export(tmp_path / "runs" / "r", tmp_path / "out")
    read = transformers.AutoTokenizer.from_pretrained(out)
    assert read("the lazy dog").input_ids == [words[word] for word in ("the", "lazy", "dog")]
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 0
    assert f"`tokenizer.json` of {len(words)} ids, SHA-256 `" in (out / "README.md").read_text()
    assert f"as it was given in `{folder / 'tokenizer.json'}`" in (out / "README.md").read_text()
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n")
    kept = tmp_path / "runs" / "r" / "data" / "tokenizer.json"
    own = export(tmp_path / "runs" / "r", tmp_path / "own")
    assert (own / "tokenizer.json").read_bytes() == kept.read_bytes(), (
        "the one that made the data, not what is there now"
    )
    assert "the run's own copy" in (own / "README.md").read_text()
    kept.unlink()
    told = CliRunner().invoke(
        app, ["export", str(tmp_path / "runs" / "r"), "--out", str(tmp_path / "other")]
    )
    assert told.exit_code == 0
    assert "gone or changed" in told.output
    assert not (tmp_path / "other" / "tokenizer.json").exists()
    assert "gone or changed" in (tmp_path / "other" / "README.md").read_text()


@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_tokenizer_that_came_alone_is_read_as_it_is(qk_norm: bool, tmp_path: Path) -> None:
    """For lack of a class transformers takes that of the model's kind, some of which split text in their own way."""
    made: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    text = "the year 2024, and 20245:\n\n  def it's():  pass\n"
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [text] * 9, tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters)
    )
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text(text * 400)
    given = [
        f"data.path={tmp_path / 'text.txt'}",
        f"data.tokenizer={tmp_path / 'tokenizer.json'}",
        "data.context=16",
    ]
    done = train(
        tmp_path,
        "--name",
        "r",
        *given,
        "train.steps=1",
        f"model.args.qk_norm={str(qk_norm).lower()}",
    )
    assert done.returncode == 0, done.stdout
    read = transformers.AutoTokenizer.from_pretrained(
        export(tmp_path / "runs" / "r", tmp_path / "out")
    )
    assert read(text).input_ids == made.encode(text).ids
    assert read.decode(read(text).input_ids) == text
