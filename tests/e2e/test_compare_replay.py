"""`harness compare --replay` on real runs: the first tensor that differs, to the bit; and what cannot be said."""

from __future__ import annotations

import hashlib
import json
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from harness.checkpoint.store import Store
from harness.cli import app
from harness.tracking.journal import Journal
from tests.support import runs
from tests.support.runs import events, metrics

pytestmark = pytest.mark.slow

STEPS = 4
SHORT = (
    *(f"train.steps={STEPS}", "train.schedule=constant", "train.warmup_steps=2"),
    *("data.val_samples=2", "checkpoint.every=2", "checkpoint.keep=9"),
)
WEIGHT = "blocks.1.attn.out.weight"


def train(folder: Path, name: str, *arguments: str, code: int = 0) -> Path:
    done = runs.train(folder, "--name", name, *SHORT, *arguments)
    assert done.returncode == code, done.stdout[-2000:]
    return folder / "runs" / name


def replayed(one: Path, other: Path, code: int = 0) -> Any:
    """The JSON of `harness compare --replay`, or its error. Neither run may change."""
    before = contents(one), contents(other)
    words = ("compare", str(one), str(other), "--replay", "--json", "--no-picture")
    done = runs.harness(one.parents[1], *words)
    assert done.returncode == code, done.stdout + done.stderr
    assert (contents(one), contents(other)) == before, "nothing is written into the runs"
    return " ".join(done.stderr.split()) if code else json.loads(done.stdout)


def contents(run: Path) -> dict[str, str]:
    files = (path for path in run.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def at(found: Any) -> tuple[int, str, str]:
    first = found["first_divergence"]
    return first["step"], first["phase"], first["tensor"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with checkpoints after two and four. Not to be changed."""
    return train(tmp_path_factory.mktemp("replay"), "base")


@pytest.fixture(scope="module")
def half(base: Path) -> Path:
    """The same run, stopped after two steps. To be copied."""
    return train(base.parents[1], "half", "train.steps=2")


@pytest.fixture(scope="module")
def faster(base: Path) -> Path:
    """The same run with another learning rate."""
    return train(base.parents[1], "faster", "train.lr=0.004")


def flip(run: Path, step: int, bit: int) -> None:
    """Flip a bit of one weight in a checkpoint, and seal it again as a whole one."""
    root = run / "checkpoints"
    tensors, meta = Store(root, readonly=True).load(step)
    weight = tensors["model"][WEIGHT].clone()
    weight.view(torch.int32)[3, 5] ^= 1 << bit
    tensors["model"][WEIGHT] = weight
    shutil.rmtree(root / f"step-{step:08d}")
    Store(root).save(step, tensors, meta)


def test_another_rate_is_named_in_the_update_of_the_first_step(base: Path, faster: Path) -> None:
    found = replayed(base, faster)
    assert at(found) == (1, "update", "lr")
    first = found["first_divergence"]
    assert (first["a"], first["b"]) == (
        found["recorded_divergence"]["a"],
        found["recorded_divergence"]["b"],
    )
    assert found["replay"]["not_reproduced"] == {}
    assert found["replay"]["from_step"] == 0


def test_one_bit_of_a_weight_in_a_checkpoint_is_named_though_no_figure_shows_it(
    base: Path, half: Path
) -> None:
    """Not the last bit: on some CPUs two updates round it away, and the last checkpoints agree."""
    other = base.parent / "flipped"
    shutil.copytree(half, other)
    flip(other, 2, bit=2)
    train(base.parents[1], "flipped")
    found = replayed(base, other)
    assert found["recorded_divergence"] is None, "FP8 rounds the bit away"
    assert at(found) == (3, "state", WEIGHT)
    first = found["first_divergence"]
    assert (first["differing"], first["ulps"]) == (1, 4)
    assert first["at"] == 3 * 64 + 5
    assert found["replay"]["changed_checkpoints"] == ["b"]
    assert "the checkpoint of step 2 of B does not have them" in found["replay"]["meaning"]


def test_runs_of_the_same_bits_agree_in_their_last_state(base: Path) -> None:
    found = replayed(base, train(base.parents[1], "again"))
    assert found["first_divergence"] is None
    assert found["replay"]["first_difference"] is None
    assert found["replay"]["last_step"] == STEPS
    assert "to the bit" in found["replay"]["meaning"]


def change_journal(run: Path, step: int) -> tuple[float, float]:
    """Change the loss of a step by one bit, as a fault of the hardware would; (what it was, what it is)."""
    journal = run / "journal.jsonl"
    loss = dict(metrics(run))[step]
    other = float(torch.tensor(loss).nextafter(torch.tensor(9.0)))
    text = journal.read_text()
    assert text.count(f'"train/loss": {loss!r}') == 1
    journal.write_text(text.replace(f'"train/loss": {loss!r}', f'"train/loss": {other!r}'))
    return loss, other


def test_a_run_that_does_not_come_back_is_named_and_nothing_is_said_of_it(base: Path) -> None:
    other = base.parent / "odd"
    shutil.copytree(base, other)
    was, now = change_journal(other, 3)
    found = replayed(base, other)
    assert found["first_divergence"] == found["recorded_divergence"], "as it was recorded"
    assert found["first_divergence"]["step"] == 3
    replay = found["replay"]
    assert replay["first_difference"] is None
    assert list(replay["not_reproduced"]) == ["b"]
    why = replay["not_reproduced"]["b"]["why"]
    assert why == f"step 3, loss: {now!r} in the run, {was!r} here"
    assert "B did not compute that" in replay["meaning"]
    assert "an error of the hardware" in replay["meaning"]


def test_the_rerun_of_a_run_that_does_not_come_back_is_no_divergence(
    base: Path, faster: Path
) -> None:
    """The re-runs part as well, and B's journal is not what its config gives: they need not part there."""
    other = base.parent / "odd-too"
    shutil.copytree(faster, other)
    change_journal(other, 1)
    journal = other / "journal.jsonl"
    journal.write_text(journal.read_text().replace('"version.torch": "', '"version.torch": "9'))
    found = replayed(base, other)
    assert "phase" not in found["first_divergence"]
    assert found["replay"]["first_difference"]["tensor"] == "lr"
    assert "B cannot be reproduced here" in found["replay"]["meaning"]
    (version,) = [
        each for each in found["replay"]["not_reproduced"]["b"]["elsewhere"] if "torch" in each
    ][:1]
    assert version.startswith("torch: 9")


def test_what_cannot_be_run_again_is_refused_before_anything_runs(
    base: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "runs" / "bare"
    with Journal(bare / "journal.jsonl") as journal:
        journal.note("run", tags={}, params={}, data={})
        for step in (1, 2, 3, 4):
            journal.metrics(step, {"train/loss": 9.0})
    text = replayed(base, bare, code=2)
    assert "bare" in text
    assert "the run has no config.yaml" in text
    assert "leave --replay out" in text

    without = tmp_path / "runs" / "without"
    shutil.copytree(base, without)
    shutil.rmtree(without / "data")
    change_journal(without, 2)
    text = replayed(base, without, code=2)
    assert "the run's copy of its text is missing" in text
    assert "from the" not in text, "nothing was started"


def test_a_step_that_a_rollback_discarded_is_refused(base: Path, tmp_path: Path) -> None:
    other = tmp_path / "runs" / "back"
    shutil.copytree(base, other)
    change_journal(other, 3)
    with Journal(other / "journal.jsonl", resume_step=STEPS + 1) as journal:
        journal.event(4, "guard.rollback", to_step=2, passed_over=[2])
        journal.attempt = 2
        for step in (3, 4):
            journal.metrics(step, {"train/loss": dict(metrics(base))[step]})
    text = replayed(base, other, code=2)
    assert "step 3 ran several times" in text
    assert "harness replay" in text


def test_without_replay_nothing_of_it_is_in_the_json(base: Path, faster: Path) -> None:
    words = ["compare", str(base), str(faster), "--json", "--no-picture"]
    found = json.loads(CliRunner().invoke(app, words).stdout)
    assert not {"replay", "recorded_divergence"} & set(found)


def recipe(folder: Path, was: str, now: str) -> str:
    text = (runs.ROOT / "recipes" / "fp8_hybrid.yaml").read_text()
    assert was in text
    path = folder / "fp8_hybrid.yaml"
    path.write_text(text.replace(was, now))
    return str(path)


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("margin", ("margin: 0", "margin: 1"), (1, "fp8", "blocks.00.attn.qkv.input")),
        (
            "layer",
            ("fp8:\n", "layers:\n  exclude: [blocks.1.mlp.down]\nfp8:\n"),
            (1, "forward", "blocks.1.mlp.down"),
        ),
    ],
)
def test_another_recipe_is_named_by_what_it_computes_first(
    base: Path, tmp_path: Path, name: str, change: tuple[str, str], expected: Any
) -> None:
    other = train(base.parents[1], name, "--recipe", recipe(tmp_path, *change))
    assert at(replayed(base, other)) == expected


@pytest.mark.nightly
def test_a_rate_that_a_resume_changed_is_named_at_its_step(base: Path, half: Path) -> None:
    other = base.parent / "changed"
    shutil.copytree(half, other)
    train(base.parents[1], "changed", "train.lr=0.004", "--accept-changed", "train.lr")
    assert [event["step"] for event in events(other, "run.changed")] == [2]
    found = replayed(base, other)
    assert at(found) == (3, "update", "lr")
    assert found["replay"]["from_step"] == 2
    assert found["replay"]["not_reproduced"] == {}


@pytest.mark.nightly
def test_the_search_goes_back_to_the_last_checkpoints_that_agree(base: Path) -> None:
    """A's and B's checkpoints of step 4 agree in nothing, those of step 2 in all: the search begins there."""
    longer = "train.steps=6"
    one = train(base.parents[1], "six", longer)
    other = base.parent / "six-changed"
    shutil.copytree(one, other)
    for step in (4, 6):
        flip(other, step, bit=20)
    found = replayed(one, other)
    assert at(found) == (5, "state", WEIGHT)
    assert found["replay"]["from_step"] == 2
    assert found["replay"]["changed_checkpoints"] == ["b"]


def test_other_samples_and_other_initial_weights_are_told_apart(tmp_path: Path) -> None:
    text = (
        "import torch\nfrom harness.models.gpt import build as gpt\n\ndef build(init=0, **args):\n"
    )
    text += "    torch.manual_seed(init)\n    return gpt(**args)\n"
    (tmp_path / "own.py").write_text(text)
    args = {"dim": 64, "layers": 2, "heads": 2}
    model: Callable[..., tuple[str, ...]] = lambda **more: (  # noqa: E731
        "model.target=own:build",
        f"model.args={json.dumps({**args, **more})}",
    )
    one = train(tmp_path, "a", *model())
    weights = replayed(one, train(tmp_path, "weights", *model(init=1)))
    assert at(weights) == (1, "state", "embed.weight")
    order = replayed(one, train(tmp_path, "order", *model(), "train.seed=1"))
    assert at(order) == (1, "data", "window")


def test_a_module_that_only_one_run_has_is_named_with_that_run(tmp_path: Path) -> None:
    text = """
    import torch
    from harness.models.gpt import build as gpt

    class Scale(torch.nn.Module):
        def forward(self, x):
            return 1.5 * x

    class Model(torch.nn.Module):
        def __init__(self, scaled, more):
            super().__init__()
            self.gpt = gpt(dim=64, layers=1, heads=2)
            self.extra = Scale() if scaled else None
            self.more = torch.nn.Linear(1, 1) if more else None

        def forward(self, inputs, targets):
            loss = self.gpt(inputs, targets)
            loss = loss if self.extra is None else self.extra(loss)
            return loss if self.more is None else self.more(loss[None])[0]

    def build(scaled=False, more=False, **args):
        return Model(scaled, more)
    """
    (tmp_path / "own.py").write_text(textwrap.dedent(text))
    plain = train(tmp_path, "plain", "model.target=own:build", "model.args={}")
    for name, tensor, phase in (("scaled", "extra", "forward"), ("more", "more.weight", "state")):
        args = json.dumps({name: True})
        other = train(tmp_path, name, "model.target=own:build", f"model.args={args}")
        found = replayed(plain, other)
        assert at(found) == (1, phase, tensor)
        first = found["first_divergence"]
        assert (first["only"], first["a"]) == ("b", None)
        assert first["b"].startswith("float32")
        assert "only B has it" in found["replay"]["meaning"]
