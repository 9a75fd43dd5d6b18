"""`harness sample` and `harness eval` on a run of the shipped model: what they say, and that they change nothing."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from harness.core.errors import shown
from harness.models import gpt
from harness.tools.eval import Score, difference
from harness.tools.sample import choose
from tests.support.runs import TEXT, harness, train

SIZES = {"dim": 64, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 176, "tied": True}
CONTEXT = 64


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    done = train(folder, "--recipe", "fp8_hybrid", "--name", "run", "checkpoint.every=10")
    assert done.returncode == 0, done.stdout
    return folder


def evaluated(folder: Path, *more: str) -> dict[str, Any]:
    done = harness(folder, "eval", "runs/run", "--json", *more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def plain_model(folder: Path, step: int = 20) -> gpt.GPT:
    """The shipped model with the checkpoint's weights, by no code of the commands."""
    model = gpt.build(**SIZES)
    weights = load_file(folder / f"runs/run/checkpoints/step-{step:08d}/model.safetensors")
    model.load_state_dict({**weights, "lm_head.weight": weights["embed.weight"]})
    return model.eval()


def everything(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow
def test_eval_scores_as_the_run_validated_and_as_plain_fp32(trained: Path) -> None:
    told = evaluated(trained)
    recorded = json.loads((trained / "runs/run/outcome.json").read_text())["val_loss"]
    assert told["in_precision"]["loss"] == pytest.approx(recorded, abs=2e-6)
    assert (told["step"], told["samples"], told["tokens"]) == (20, 8, 8 * CONTEXT)
    assert told["precision"] == told["trained_in"] == "native:fp8"
    split = np.fromfile(trained / "runs/run/data/val.bin", dtype=np.uint8).astype(np.int64)
    available = (len(split) - 1) // CONTEXT
    places = (np.arange(8) * available // 8)[:, None] * CONTEXT + np.arange(CONTEXT + 1)
    rows = torch.from_numpy(split[places])
    with torch.no_grad():
        logits = plain_model(trained)(rows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()
    plain = told["in_fp32"]
    assert plain["loss"] == pytest.approx(loss, abs=2e-6)
    assert plain["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert plain["accuracy"] == (logits.argmax(-1) == rows[:, 1:]).double().mean().item()
    assert told["difference"]["nats"] == pytest.approx(recorded - loss, abs=4e-6)
    assert told["difference"]["nats"] != 0


@pytest.mark.slow
def test_eval_says_it_in_words_and_of_earlier_checkpoints(trained: Path) -> None:
    done = harness(trained, "eval", "runs/run", "--step", "10", "--samples", "4")
    assert done.returncode == 0
    first, heads, ours, plain, signal = done.stdout.splitlines()
    assert first.startswith("runs/run at step 10: validation of ")
    assert first.endswith("4 samples, 256 tokens")
    assert heads.split() == ["loss", "(nats)", "perplexity", "accuracy"]
    assert (ours.split()[0], plain.split()[0]) == ("native:fp8", "fp32")
    assert signal.startswith("difference: ")
    assert "95% interval" in signal


@pytest.mark.slow
def test_other_data_are_scored_whole(trained: Path, tmp_path: Path) -> None:
    text = (b"for name in names:\n    print(name, file=stream)\n" * 40)[: 12 * CONTEXT]
    (tmp_path / "other.txt").write_bytes(text)
    told = evaluated(trained, "--data", str(tmp_path / "other.txt"), "--samples", "100")
    # Cut into two splits, each of which has a sample less than it has pieces of this length.
    assert 9 <= told["samples"] <= 11
    assert told["tokens"] == told["samples"] * CONTEXT
    rows = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).astype(np.int64))
    with torch.no_grad():
        logits = plain_model(trained)(rows[: 11 * CONTEXT].view(11, CONTEXT))
    loss = F.cross_entropy(logits.flatten(0, 1), rows[1 : 11 * CONTEXT + 1]).item()
    assert told["in_fp32"]["loss"] == pytest.approx(loss, rel=0.02)  # the text repeats itself
    assert told["data"] == f"bytes of {tmp_path / 'other.txt'}"


@pytest.mark.slow
def test_a_file_is_scored_alone_and_a_short_one_too(trained: Path, tmp_path: Path) -> None:
    text = (TEXT / "chapters.txt").read_bytes()
    for name in ("alone.txt", "train.txt"):
        (tmp_path / name).write_bytes(text[: 12 * CONTEXT])
    (tmp_path / "val.txt").write_bytes(text[-12 * CONTEXT :])
    alone = evaluated(trained, "--data", str(tmp_path / "alone.txt"), "--samples", "100")
    beside = evaluated(trained, "--data", str(tmp_path / "train.txt"), "--samples", "100")
    assert (alone["samples"], beside["samples"]) == (10, 11), "only the first is cut in two"
    whole = torch.tensor(list(text[: 11 * CONTEXT + 1]))
    with torch.no_grad():
        logits = plain_model(trained)(whole[:-1].view(11, CONTEXT))
    loss = F.cross_entropy(logits.flatten(0, 1), whole[1:]).item()
    assert beside["in_fp32"]["loss"] == pytest.approx(loss, abs=2e-6), "val.txt is no part of it"

    # Two samples and their successors are enough.
    (tmp_path / "short.txt").write_bytes(text[: 2 * (CONTEXT + 1)])
    assert evaluated(trained, "--data", str(tmp_path / "short.txt"))["samples"] == 2

    # Less is refused in words of eval, which has no batch of its own.
    (tmp_path / "less.txt").write_bytes(text[: 2 * CONTEXT + 1])
    less = harness(trained, "eval", "runs/run", "--data", str(tmp_path / "less.txt"))
    assert less.returncode == 2
    assert "less.txt: too short to evaluate on" in less.stderr
    halves = f"its halves have {CONTEXT + 1} and {CONTEXT} tokens, and each needs {CONTEXT + 1}"
    assert halves in less.stderr
    assert "global_batch" not in less.stderr


@pytest.mark.slow
def test_files_of_a_folder_that_are_not_scored_are_named(trained: Path, tmp_path: Path) -> None:
    text = (TEXT / "chapters.txt").read_bytes()
    for number, name in enumerate(("train.txt", "val.txt", "test.txt")):
        (tmp_path / name).write_bytes(text[number * 800 : number * 800 + 800])
    done = harness(trained, "eval", "runs/run", "--data", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "left out 1: test.txt (a test split" in done.stdout


@pytest.mark.slow
def test_neither_writes_into_the_run(trained: Path) -> None:
    before = everything(trained)
    evaluated(trained)
    evaluated(trained, "--data", str(TEXT))
    assert harness(trained, "sample", "runs/run", "import", "--tokens", "4").returncode == 0
    assert everything(trained) == before


def written(folder: Path, *more: str, prompt: str = "def ") -> str:
    done = harness(folder, "sample", "runs/run", prompt, *more)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(prompt)
    return done.stdout.removesuffix("\n")


def test_the_likeliest_text_is_that_of_a_plain_loop(trained: Path) -> None:
    model, ids = (
        plain_model(trained),
        list(b"class A:\n    def f(self, x):\n        return x + 1\n\n\n# A long prompt"),
    )
    with torch.no_grad():
        for _ in range(24):  # past the context: the last 64 tokens are seen
            ids.append(int(model(torch.tensor([ids[-CONTEXT:]]))[0, -1].argmax()))
    prompt = bytes(ids[:-24]).decode()
    greedy = written(
        trained, "--temperature", "0", "--tokens", "24", "--precision", "fp32", prompt=prompt
    )
    assert greedy == bytes(ids).decode(errors="replace")
    assert greedy == written(
        trained, "--top-k", "1", "--tokens", "24", "--precision", "fp32", prompt=prompt
    )


@pytest.mark.slow
def test_a_seed_is_a_text(trained: Path) -> None:
    first, again, other = (
        written(trained, "--tokens", "40", "--seed", seed) for seed in ("1", "1", "2")
    )
    assert first == again
    assert first != other
    assert first != written(trained, "--tokens", "40", "--seed", "1", "--step", "10")


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_and_never_used(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "runs", tmp_path / "runs")
    weights = [
        tmp_path / f"runs/run/checkpoints/step-{step:08d}/model.safetensors" for step in (20, 10)
    ]
    _flip(weights[0])
    assert evaluated(tmp_path)["step"] == 10
    for words in (
        ("eval", "runs/run", "--json", "--samples", "2"),
        ("sample", "runs/run", "x", "--tokens", "2"),
    ):
        done = harness(tmp_path, *words)
        assert "do not verify: steps 20; this is step 10" in done.stderr, words
        assert "verify" not in done.stdout, "what is printed stays what others read"
    asked = harness(tmp_path, "eval", "runs/run", "--step", "20")
    assert asked.returncode == 2
    assert "model.safetensors" in asked.stderr
    _flip(weights[1])
    for words in (("eval", "runs/run"), ("sample", "runs/run", "x")):
        done = harness(tmp_path, *words)
        assert done.returncode == 2
        assert "not one of its checkpoints is whole" in done.stderr


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
def test_what_cannot_be_is_said(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "runs", tmp_path / "runs")
    for words, told in (
        (("sample", "runs/run", ""), "the prompt has no token"),
        (("eval", "runs/run", "--step", "7"), "there is no checkpoint of step 7"),
        (("eval", "runs/runn"), "not a run"),
        (("eval", "runs/run", "--data", "no/such/text"), "no/such/text"),
    ):
        done = harness(tmp_path, *words)
        assert done.returncode == 2, done.stdout
        assert told in done.stderr
    (tmp_path / "runs/run/config.yaml").unlink()
    done = harness(tmp_path, "eval", "runs/run")
    assert done.returncode == 2
    assert "the run has no config.yaml" in done.stderr


@pytest.mark.slow
def test_text_is_not_scored_as_the_ids_of_a_run_on_token_files(tmp_path: Path) -> None:
    np.tile(np.arange(300, dtype=np.uint16), 40).tofile(tmp_path / "train.bin")
    done = train(tmp_path, "--name", "ids", "data.path=train.bin", "train.steps=2")
    assert done.returncode == 0, done.stdout
    (tmp_path / "text.txt").write_text("some text\n" * 400)
    refused = harness(tmp_path, "eval", "runs/ids", "--data", "text.txt")
    assert refused.returncode == 2, refused.stdout
    assert "the run was not trained on bytes" in refused.stderr
    assert harness(tmp_path, "eval", "runs/ids", "--data", "train.bin").returncode == 0


NANO = """
import torch
from torch import nn


class Nano(nn.Module):
    vocab_size = 256

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(256, 64), nn.Linear(64, 64), nn.Linear(64, 256)

    def forward(self, idx, targets=None):
        x = torch.tanh(self.mix(self.embed(idx)))
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build():
    return Nano()
"""


@pytest.mark.slow
def test_a_model_as_nanogpt_gives_its_logits(tmp_path: Path) -> None:
    (tmp_path / "nano.py").write_text(NANO)
    own = ("model.target=nano:build", "model.args={}", "train.steps=6")
    done = train(tmp_path, "--recipe", "fp8_hybrid", "--name", "run", *own)
    assert done.returncode == 0, done.stdout
    told = evaluated(tmp_path)
    recorded = json.loads((tmp_path / "runs/run/outcome.json").read_text())["val_loss"]
    assert told["in_precision"]["loss"] == pytest.approx(recorded, abs=2e-6)
    weights = load_file(tmp_path / "runs/run/checkpoints/step-00000006/model.safetensors")
    hidden = torch.tanh(
        F.linear(weights["embed.weight"][ord("x")], weights["mix.weight"], weights["mix.bias"])
    )
    likeliest = int(F.linear(hidden, weights["head.weight"], weights["head.bias"]).argmax())
    words = ("--tokens", "1", "--temperature", "0", "--precision", "fp32")
    expected = bytes([ord("x"), likeliest]).decode(errors="replace")
    assert written(tmp_path, *words, prompt="x") == shown(expected), (
        "no terminal obeys what a model writes"
    )


def test_tokens_are_drawn_by_their_shares() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0, 2.5])
    generator = torch.Generator().manual_seed(0)
    drawn = (
        np.bincount([choose(logits, 0.5, 3, generator) for _ in range(4000)], minlength=5) / 4000
    )
    shares = np.exp(np.array([-np.inf, 2.0, 1.0, -np.inf, 2.5]) / 0.5)
    assert np.abs(drawn - shares / shares.sum()).max() < 0.03
    assert drawn[[0, 3]].sum() == 0
    assert choose(logits, 0.0, 0, generator) == 4


@pytest.mark.parametrize(("samples", "t"), [(2, 12.7062), (8, 2.3646), (50, 2.0096)])
def test_the_difference_is_that_of_pairs(samples: int, t: float) -> None:
    """t: of the tables of Student's distribution, for 95%."""
    random = np.random.default_rng(0)
    plain, apart = random.normal(100, 20, samples), random.normal(0.4, 1.0, samples)
    ours = Score((plain + apart).tolist(), [10] * samples, [0] * samples)
    told = difference(ours, Score(plain.tolist(), [10] * samples, [0] * samples))
    each = apart / 10
    assert told["nats"] == pytest.approx(each.mean())
    assert told["half_width"] == pytest.approx(t * each.std(ddof=1) / math.sqrt(samples), rel=1e-4)
    nats, half = told["nats"], told["half_width"]
    assert nats is not None
    assert half is not None
    assert told["clear"] is (abs(nats) > half)
    assert told["share"] == pytest.approx(apart.sum() / plain.sum())
    nothing = difference(ours, ours)
    assert (nothing["nats"], nothing["clear"]) == (0, False)
