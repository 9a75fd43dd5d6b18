"""`harness explain`: codes, symptoms and runs, at once and without torch."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from harness.checkpoint.manifest import add_mark
from harness.core.errors import ConfigError
from harness.core.screen import Screen
from harness.report.explain import (
    Catalogue,
    catalogue,
    cause,
    distinct,
    explain,
    go_on,
    plain,
    post_mortem,
    slug,
    streaks,
)
from harness.report.inspect import summary
from harness.tracking.history import RunHistory
from harness.tracking.journal import Journal

ROOT = Path(__file__).resolve().parents[3]
TEXT = '''
ranking = [["b.two", "no", "bad"], ["a.one", "yes", "fine"]]
page = {}
said = {}
[codes."a.one, a.other"]
What = """
the first thing. More of it."""
Why = """
see [`b.two`](#btwo).

```python
# a comment, no heading
```"""
[codes."b.two"]
What = "the second."
[events."c.three"]
What = "still a code."
[symptoms."Loss that, well, *falls*"]
How = "slowly."
'''


def printed(subject: str | None, width: int = 100) -> str:
    stream = io.StringIO()
    assert explain(subject, Screen(file=stream, width=width)) == 0
    return stream.getvalue()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-X", "importtime", "-m", "harness.cli", "explain", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)


def test_tables_become_entries() -> None:
    known = Catalogue.parse(TEXT)
    assert [entry.names for entry in known.entries] == [
        ("a.one", "a.other"), ("b.two",), ("c.three",), ("loss-that-well-falls",)
    ]  # fmt: skip
    first = known.find("a.other")
    assert first.line == "The first thing"
    assert plain(first.fields["Why"])[0] == "See b.two."
    assert "# a comment, no heading" in first.fields["Why"]
    assert [entry.is_symptom for entry in known.entries] == [False, False, False, True]
    assert tuple(known.entries[-1].fields) == ("How",)
    assert known.ranked(["a.one", "c.three", "b.two", "a.one"]) == ["b.two", "a.one"]
    assert known.ranked(["c.three"]) == []
    assert slug("NaN after hours") == "nan-after-hours"


def test_a_code_has_what_happened_why_what_was_done_and_what_to_do() -> None:
    text = printed("loss.spike")
    assert text.startswith("loss.spike, loss.skip\n")
    labels = ["What happened", "Why", "Effect", "What to do"]
    assert [line for line in text.splitlines() if line and not line.startswith(" ")] == [
        "loss.spike, loss.skip",
        *labels,
    ]
    assert "guard.spike_sigma" in text
    assert "`" not in text
    assert "**" not in text


def test_every_code_and_symptom_is_listed_and_found() -> None:
    text = printed(None, width=200)
    for entry in catalogue().entries:
        for name in entry.names:
            assert any(line.startswith(f"{name} ") for line in text.splitlines()), name
            assert printed(name).startswith(entry.title)


TYPED = {
    "my loss is nan": "nonfinite.skip",
    "loss is NaN!": "nonfinite.skip",
    "loss: inf": "nonfinite.skip",
    "nan from the very first step": "nan-always-at-the-same-step",
    "loss became nan after 20000 steps": "nan-after-hours",
    "loss spikes": "loss.spike",
    "lossspike loss spiking": "loss.spike",
    "my loss exploded": "loss.spike",
    "training diverged": "loss.spike",
    "loss goes up": "loss.spike",
    "out of memory": "out-of-memory",
    "OOM": "out-of-memory",
    "CUDA out of memory. Tried to allocate 20.00 MiB": "out-of-memory",
    "memory error on gpu": "out-of-memory",
    "stuck": "loss-that-plateaus",
    "loss not decreasing": "loss-that-plateaus",
    "the model doesn't learn": "loss-that-plateaus",
    "loss plateau": "loss.plateau",
    "slow": "training-that-is-slow",
    "training is too slow": "training-that-is-slow",
    "throughput is low": "training-that-is-slow",
    "why is fp8 slower": "fp8-slower-than-bf16",
    "no speedup from fp8": "fp8-slower-than-bf16",
    "dataloader slow": "data.slow",
    "gpu is idle": "data.slow",
    "grad overflow": "gradient.overflow",
    "fp16 overflow": "scaler.overflow",
    "exploding gradients": "gradient.skip",
    "vanishing gradients": "gradient.vanished",
    "vanishng gradient": "gradient.vanished",
    "gradients are all zero": "gradient.vanished",
    "hangs": "run-that-hangs",
    "it hangs at the start": "run-that-hangs",
    "nccl timeout": "run-that-hangs",
    "Watchdog caught collective operation timeout": "run-that-hangs",
    "disk full": "checkpoint.paused",
    "OSError: [Errno 28] No space left on device": "checkpoint.failed",
    "resume refused": "resume-that-is-refused",
    "cannot resume my run": "resume-that-is-refused",
    "loss jumps after resume": "resume-that-jumps",
    "corrupt checkpoint": "checkpoint.quarantined",
    "nothing in mlflow": "figures-that-are-not-in-mlflow",
    "mlflow connection refused": "figures-that-are-not-in-mlflow",
    "loss scale keeps shrinking": "loss-scale-that-collapses",
    "layers left fp8": "precision.demote",
    "everything fell back to bf16": "precision.lowered",
    "why was my run halted": "guard.halt",
    "training stopped by itself": "guard.halt",
    "exit code 3": "guard.halt",
    "process crashed with a traceback": "run.failed",
    "slurm preempted my job": "run.stopped",
    "learning rate too high": "train.lr_high",
    "one gpu is slower than the others": "ranks.straggler",
    "weights differ between ranks": "ranks.diverged",
    "fsdp ranks called different blocks": "ranks.calls",
    "CUDA error: device-side assert triggered": "data.label",
    "IndexError: index out of range in self": "data.label",
    "torch.compile recompiles": "compile.eager",
    "ImportError: main.so: file too short": "compile.cache",
    "which recipe for a T4": "which-recipe",
    "no pictures in report": "report.failed",
}


@pytest.mark.parametrize("typed", TYPED)
def test_what_people_type_finds_what_they_mean(typed: str) -> None:
    found = [entry.names[0] for entry in catalogue().search(typed)]
    assert TYPED[typed] in found[:3]
    assert f"explain {TYPED[typed]}\n" in printed(typed)


@pytest.mark.parametrize(
    "typed", ["pink elephants", "the", "qwertz uiop", "?!", "how do I bake bread"]
)
def test_what_nothing_here_is_about_is_refused(typed: str) -> None:
    with pytest.raises(ConfigError, match="no code or symptom"):
        explain(typed, Screen(file=io.StringIO()))


def test_words_are_of_entries_that_there_are() -> None:
    assert {
        name for entry in catalogue().entries for name in entry.names
    } >= catalogue().said.keys()
    assert all(phrase for phrases in catalogue().said.values() for phrase in phrases)


def test_a_question_needs_no_quotes() -> None:
    done = command("my", "loss", "is", "nan")
    assert done.returncode == 0, done.stderr
    assert "explain nonfinite.skip" in done.stdout


def test_code_keeps_its_lines_and_prose_loses_them() -> None:
    text = (
        "one\ntwo `three`\n- item\n  goes on\n- another\n\n```python\nx = 1\ny = [2](3)\n```\nlast"
    )
    assert plain(text) == [
        "One two three",
        "- item goes on",
        "- another",
        "",
        "    x = 1",
        "    y = [2](3)",
        "last",
    ]


@pytest.mark.parametrize("width", [60, 240])
def test_texts_are_indented_wrapped_and_without_spaces_at_their_ends(width: int) -> None:
    lines = printed("nonfinite.skip", width=width).splitlines()
    assert max(map(len, lines)) <= min(width, 100)
    assert [line for line in lines if line != line.rstrip()] == []
    item = next(place for place, line in enumerate(lines) if line.startswith("  - The same step"))
    assert all(line.startswith("    ") for line in lines[item + 1 :]), "under the item's first word"


def test_a_command_stays_on_its_line_to_be_copied() -> None:
    line = next(
        line
        for line in printed("train.lr_jump", width=60).splitlines()
        if "--accept-changed" in line
    )
    assert line.strip().startswith("train.schedule=constant")
    assert line.endswith("train.schedule,train.warmup_steps,train.lr")


@pytest.mark.parametrize(
    ("typed", "meant"), [("los.spike", "loss.spike"), ("nan-after-hour", "nan-after-hours")]
)
def test_a_near_miss_is_told(typed: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f'did you mean "{meant}"'):
        explain(typed, Screen(file=io.StringIO()))


def test_the_command_starts_without_torch_and_refuses_the_unknown() -> None:
    done = command("nonfinite.skip")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("nonfinite.skip\n")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "harness.core.screen" in imported
    assert not imported & {"torch", "numpy", "mlflow"}
    wrong = command("nonfinite.skp")
    assert wrong.returncode == 2
    assert 'did you mean "nonfinite.skip"?' in wrong.stderr


def make_run(run_dir: Path, status: str, learned: bool = True) -> Path:
    with Journal(run_dir / "journal.jsonl") as journal:
        journal.note("run", tags={}, params={"train.lr": 2e-3}, data={})
        if learned:
            journal.metrics(2, {"train/step_applied": 1.0})
        journal.event(3, "gradient.growth", text="gradient norm 40")
        for step in (5, 6, 7):
            journal.event(
                step, "nonfinite.skip", text=f"update skipped: window {step}", window=step
            )
        journal.event(7, "guard.rollback", reason="3 in a row", to_step=4, passed_over=[4, 5])
        journal.attempt = 2
        journal.event(6, "precision.switched", demote=["blocks.0.up"], promote=[], lowered="")
        journal.event(8, "loss.spike", text="loss 9 against 2, window 9", window=9)
        if status == "halted":
            journal.event(9, "guard.halt", reason="the loss spiked and the budget is spent")
    outcome = {"status": status, "reason": "the loss spiked and the budget is spent", "step": 9}
    (run_dir / "outcome.json").write_text(json.dumps(outcome))
    return run_dir


def with_checkpoints(run_dir: Path, *steps: int) -> None:
    for step in steps:
        (run_dir / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        add_mark(run_dir / "checkpoints", step)


def test_a_run_is_told_in_order_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "r", "done")
    text = printed("runs/r")
    lines = text.splitlines()
    assert lines[1:7] == [
        "step 3: gradient.growth: gradient norm 40",
        "steps 5-7: nonfinite.skip x 3 (windows 5, 6, 7): update skipped: window 5",
        "    the last, step 7: update skipped: window 7",
        "step 7: guard.rollback: 3 in a row; back to step 4, windows skipped: 4, 5",
        "step 6: precision.switched: blocks.0.up to BF16",
        "step 8: loss.spike: loss 9 against 2, window 9",
    ]
    worst_first = [line for line in lines if line.startswith("What to do about")]
    assert worst_first == [
        f"What to do about {code}" for code in ("nonfinite.skip", "loss.spike", "gradient.growth")
    ]
    assert lines[-1].endswith("harness explain loss.spike"), (
        "of the last attempt: what was cured before is no cause"
    )
    assert "Post-mortem" not in text


def test_streaks_join_neighbours_and_distinct_names_each_once(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "r", "done")
    events = [
        *RunHistory.read(run_dir).events,
        {"code": "nonfinite.skip", "step": 20, "attempt": 2, "text": "again", "window": 5},
    ]
    assert [(each.steps, each.times) for each in streaks(events)][-2:] == [
        ("step 8", "loss.spike"), ("step 20", "nonfinite.skip")
    ]  # fmt: skip
    skips = next(each for each in distinct(events) if each.code == "nonfinite.skip")
    assert (skips.first, skips.last, skips.count) == (5, 20, 4)
    assert skips.windows == (5, 6, 7, 5)
    assert (skips.text, skips.last_text) == ("update skipped: window 5", "again")

    # After a rollback the last one may come at a lower step than the first.
    earlier = {"code": "nonfinite.skip", "step": 2, "attempt": 3, "text": "the last", "window": 9}
    skips = next(each for each in distinct([*events, earlier]) if each.code == "nonfinite.skip")
    assert (skips.steps, skips.latest, skips.last_text) == ("steps 2-20", 2, "the last")


def test_a_halted_run_ends_with_the_way_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    run_dir = make_run(
        tmp_path / "runs" / "a-run-with-a-name-that-is-longer-than-a-line-of-eighty-columns",
        "halted",
    )
    with_checkpoints(run_dir, 4, 6)
    for step in (5, 8):
        (run_dir / "flight" / f"step-{step:08d}").mkdir(parents=True)
        (run_dir / "flight" / f"step-{step:08d}" / "record.json").write_text("{}")
    stream = io.StringIO()
    Console(file=stream, width=80).print(post_mortem(RunHistory.read(run_dir)), crop=False)
    text = stream.getvalue()
    name = run_dir.name
    assert "halted at step 9: the loss spiked" in text
    many = replace(distinct(RunHistory.read(run_dir).events)[1], count=20, windows=tuple(range(20)))
    assert many.times.endswith("(windows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 8 more)")
    assert (
        text.index("nonfinite.skip x 3")
        < text.index("guard.rollback")
        < text.index("loss.spike: loss 9")
    )
    commands = [line.strip() for line in text.splitlines() if "harness " in line]
    assert commands[0].endswith(
        f"harness train --config runs/{name}/config.yaml --name {name}-2 "
        f"--resume runs/{name}/checkpoints/step-00000006 train.lr=0.001"
    ), "on one line, to be copied"
    assert commands[1].endswith("harness explain loss.spike")
    assert commands[2].endswith(f"harness explain runs/{name}")
    assert commands[3].endswith(f"harness replay runs/{name} --step 5  (kept too: 8)")
    stream = io.StringIO()
    Console(file=stream, width=80).print(summary(run_dir), crop=False)
    assert stream.getvalue().endswith(text)
    assert "Post-mortem" in printed(str(run_dir))


def test_a_run_that_was_resumed_after_a_halt_ends_with_its_last_one(tmp_path: Path) -> None:
    """A halt for a full disk is no event of the guard: that of an earlier start must not stand for it."""
    run_dir = make_run(tmp_path / "r", "halted")
    outcome = {"status": "halted", "reason": "checkpoint.on_failure: halt", "step": 30}
    (run_dir / "outcome.json").write_text(json.dumps(outcome))
    stream = io.StringIO()
    Console(file=stream, width=80).print(post_mortem(RunHistory.read(run_dir)), crop=False)
    assert "halted at step 30: checkpoint.on_failure: halt" in stream.getvalue()


def test_without_a_good_checkpoint_the_run_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    run_dir = make_run(tmp_path / "runs" / "r", "halted")
    with_checkpoints(run_dir, 4)
    (run_dir / "checkpoints" / "step-00000004").rmdir()
    (tmp_path / "runs" / "r-2").mkdir()
    line = go_on(RunHistory.read(run_dir))
    assert line.endswith("--name r-3 train.lr=0.001")
    assert "--resume" not in line
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert go_on(RunHistory.read(run_dir)) == f"{line}  (under this run's launcher)"


def test_a_run_that_never_learned_anything_is_tried_in_fp32(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "r", "halted", learned=False)
    assert go_on(RunHistory.read(run_dir)).endswith("--name r-2 --recipe fp32")


@pytest.mark.parametrize("learned", [True, False])
def test_bad_data_is_no_reason_to_change_learning_rate_or_recipe(
    tmp_path: Path, learned: bool
) -> None:
    run_dir = make_run(tmp_path / "r", "halted", learned=learned)
    with Journal(run_dir / "journal.jsonl", attempt=2) as journal:
        journal.event(9, "data.label", text="window 8: label 900")
    record = RunHistory.read(run_dir)
    assert cause(record) == "data.label"
    assert "train.lr" not in go_on(record)
    assert "--recipe" not in go_on(record)


@pytest.mark.parametrize(
    ("bits", "steps", "poor"), [(3.9, 60, True), (3.7, 60, False), (3.9, 40, False)]
)
def test_a_calm_run_that_learned_nothing_is_told(
    tmp_path: Path, bits: float, steps: int, poor: bool
) -> None:
    with Journal(tmp_path / "r" / "journal.jsonl") as journal:
        journal.note("run", tags={}, params={}, data={"unigram_bits_per_byte": 4.0})
        for step in range(1, steps + 1):
            journal.metrics(step, {"train/step_applied": 1.0})
        journal.metrics(steps, {"val/loss": bits * math.log(2)})
    stream = io.StringIO()
    Console(file=stream, width=200).print(summary(tmp_path / "r"), crop=False)
    assert ("little more is learned than how often each byte occurs" in stream.getvalue()) == poor
    assert stream.getvalue().strip().endswith("explain loss-that-plateaus") == poor


def test_a_run_without_events(tmp_path: Path) -> None:
    Journal(tmp_path / "r" / "journal.jsonl").close()
    assert printed(str(tmp_path / "r")) == "No events.\n"
    assert cause(RunHistory.read(tmp_path / "r")) is None


def test_a_journal_that_cannot_be_read_is_not_one_without_events(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "journal.jsonl").write_bytes(b"\0garbage\n" * 9)
    assert "has no row that can be read" in printed(str(tmp_path / "r"))


def test_text_with_brackets_is_shown_as_it_is(tmp_path: Path) -> None:
    with Journal(tmp_path / "r" / "journal.jsonl") as journal:
        journal.event(1, "run.failed", text="ValueError: [bold] of [1, 2]")
    assert "ValueError: [bold] of [1, 2]" in printed(str(tmp_path / "r"))
