"""`harness sample` and `harness eval` on runs of a Hugging Face model with its tokenizer, and with adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.extras.tiny_models import save
from tests.support.runs import TEXT, harness, train

END = "<|endoftext|>"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=[END], show_progress=False
    )
    tokenizer.train([str(path) for path in sorted(TEXT.rglob("*")) if path.is_file()], trainer)
    save(folder / "base", "qwen3", vocab_size=320)
    tokenizer.save(str(folder / "base" / "tokenizer.json"))
    for name, args in (("full", "{}"), ("lora", "{lora: {r: 4}}")):
        done = train(
            folder,
            *("--recipe", "fp8_hybrid", "--name", name, "train.steps=6", "data.context=32"),
            *(f"model.target=hf:{folder}/base", f"model.args={args}"),
        )
        assert done.returncode == 0, done.stdout
    return folder


def test_the_tokenizer_beside_the_model_is_the_default(trained: Path) -> None:
    config = yaml.safe_load((trained / "runs" / "full" / "config.yaml").read_text())
    assert config["data"]["tokenizer"] == f"{trained}/base/tokenizer.json"
    beside = (trained / "runs" / "full" / "data" / "tokenizer.json").read_bytes()
    assert beside == (trained / "base" / "tokenizer.json").read_bytes()


def logits_of(folder: Path, name: str, ids: torch.Tensor) -> torch.Tensor:
    """By transformers alone; adapters are merged by hand."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    weights = load_file(folder / f"runs/{name}/checkpoints/step-00000006/model.safetensors")
    if name == "lora":
        state = model.state_dict()
        for key, factor in weights.items():
            if ".lora_A." in key:
                other = weights[key.replace(".lora_A.", ".lora_B.")]
                target = key.removeprefix("base_model.model.").replace(".lora_A.default", "")
                state[target] = state[target] + (16 / 4) * other @ factor
        weights = state
    model.load_state_dict(weights)
    with torch.no_grad():
        return model.eval()(ids).logits


@pytest.mark.parametrize("name", ["full", "lora"])
def test_eval_gives_the_loss_that_transformers_gives(
    name: str, trained: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(trained / "base/tokenizer.json"))
    text = "def add(one, other):\n    return one + other\n\n" * 30
    (tmp_path / "other.txt").write_text(text)
    done = harness(
        trained,
        "eval",
        f"runs/{name}",
        "--json",
        "--data",
        str(tmp_path / "other.txt"),
        "--samples",
        "999",
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    ids = torch.tensor(tokenizer.encode(text).ids)
    rows = ids[: (len(ids) - 1) // 32 * 32].view(-1, 32)
    logits = logits_of(trained, name, rows)
    loss = F.cross_entropy(logits.flatten(0, 1), ids[1 : rows.numel() + 1]).item()
    assert told["in_fp32"]["loss"] == pytest.approx(
        loss, rel=0.01
    )  # two splits: other pieces of a text that repeats
    assert 0 < abs(told["difference"]["nats"]) < 0.05
    recorded = json.loads((trained / f"runs/{name}/outcome.json").read_text())["val_loss"]
    own = json.loads(harness(trained, "eval", f"runs/{name}", "--json").stdout)
    assert own["in_precision"]["loss"] == pytest.approx(recorded, abs=2e-6)


@pytest.mark.parametrize("name", ["full", "lora"])
def test_the_likeliest_text_is_that_of_transformers(name: str, trained: Path) -> None:
    tokenizer = Tokenizer.from_file(str(trained / "base/tokenizer.json"))
    prompt = "import os"
    ids = tokenizer.encode(prompt).ids
    for _ in range(8):
        ids.append(int(logits_of(trained, name, torch.tensor([ids]))[0, -1].argmax()))
    words = ("--tokens", "8", "--temperature", "0", "--precision", "fp32")
    done = harness(trained, "sample", f"runs/{name}", prompt, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == tokenizer.decode(ids, skip_special_tokens=False) + "\n"


def test_another_tokenizer_is_refused(trained: Path, tmp_path: Path) -> None:
    content = json.loads((trained / "base/tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][:-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    done = harness(trained, "sample", "runs/full", "x", "--tokenizer", str(tmp_path))
    assert done.returncode == 2
    assert "is not the tokenizer that the run's data were made with" in done.stderr
