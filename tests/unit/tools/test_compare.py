"""`harness compare`: a difference that was put into a run is named, at its step; runs of the same bits have none."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from harness.checkpoint.store import Store
from harness.cli import app
from harness.core.facts import SlotStats
from harness.data.order import sample_numbers
from harness.tracking.journal import Journal
from harness.tracking.slot_file import SLOT_FILE, SlotFile
from tests.support import runs

SLOTS = tuple(
    f"blocks.{layer:02d}.up.{role}"
    for layer in (0, 1)
    for role in ("input", "weight", "grad_output")
)
Change = Callable[[int, dict[str, float], dict[str, np.ndarray]], None]


def make(
    folder: Path,
    change: Change = lambda step, row, slots: None,
    steps: Sequence[int] = range(1, 21),
    params: Mapping[str, Any] | None = None,
    slots: bool = True,
    **tags: Any,
) -> Path:
    """A run whose figures are a function of the step; `change` alters those of a step in place."""
    file = SlotFile(folder / SLOT_FILE)
    data = {"sha256": tags.pop("data", "d"), "unit": "nats per byte"}
    with Journal(folder / "journal.jsonl") as journal:
        journal.note("run", tags=tags, params={"train.seed": 0} | dict(params or {}), data=data)
        for step in steps:
            row = {
                "train/loss": 5.0 - step / 10,
                "train/grad_norm": 1.0 + step / 7,
                "train/lr": 0.1,
                "train/tokens_per_second": 100.0,
                "train/peak_memory_gib": 1.5,
            }
            values = np.arange(len(SLOTS), dtype=np.float32) + np.float32(step)
            figures = {"amax": values, "scale": 448 / values, "saturation": values / 9}
            for name in ("clipped", "underflow", "sqnr_db"):
                figures[name] = np.full(len(SLOTS), np.nan, np.float32)
            change(step, row, figures)
            journal.metrics(step, row)
            if slots:
                file.add(1, step, SlotStats(SLOTS, **figures))
        journal.metrics(steps[-1], {"val/loss": 2.0})
    file.close()
    return folder


def compared(*words: str | Path, code: int = 0) -> Any:
    """The JSON of `harness compare`, or its text where it is refused."""
    line = ["compare", *map(str, words), "--json", "--no-picture"]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == code, done.output
    return done.output if code else json.loads(done.stdout)


def shown(*folders: Path) -> str:
    """The text of `harness compare`."""
    line = ["compare", *map(str, folders), "--no-picture"]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    return done.stdout


def at(found: Any) -> tuple[int, str, str]:
    first = found["first_divergence"]
    return first["step"], first["tensor"], first["kind"]


def keys(found: Any) -> list[tuple[str, str]]:
    return [(each["kind"], each["key"]) for each in found["likely_causes"]]


def next_float(value: float) -> float:
    """The next number of float32: one bit away."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.unpack("<f", struct.pack("<I", bits + 1))[0]


def of_slots(step: int, place: int, figure: str = "amax") -> Change:
    """Alters one figure of a slot by one bit, in that step and all later ones."""

    def change(now: int, row: dict[str, float], slots: dict[str, np.ndarray]) -> None:
        if now >= step:
            slots[figure][place] = next_float(float(slots[figure][place]))

    return change


def of_metric(step: int, name: str, factor: float = 1 + 1e-15) -> Change:
    def change(now: int, row: dict[str, float], slots: dict[str, np.ndarray]) -> None:
        if now >= step:
            row[name] *= factor

    return change


def test_runs_of_the_same_bits_have_no_divergence(tmp_path: Path) -> None:
    def other_speed(step: int, row: dict[str, float], slots: dict[str, np.ndarray]) -> None:
        row["train/tokens_per_second"] = 250.0 if step > 5 else 1.0
        row["train/peak_memory_gib"] = 3.0
        row["time/mine"] = float(step)

    found = compared(make(tmp_path / "a"), make(tmp_path / "b", other_speed))
    assert found["first_divergence"] is None
    assert found["likely_causes"] == found["differences"] == []
    assert (found["compared"]["steps"], found["compared"]["every_slot"]) == (20, True)
    assert found["speed"] == {"a": 100.0, "b": 250.0, "ratio": 2.5, "unit": "tokens/s"}
    assert found["memory"]["ratio"] == 2.0
    assert found["loss"]["last"]["gap"] == found["loss"]["validation"]["gap"] == 0.0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (of_slots(7, 1), (7, SLOTS[1], "amax")),
        (of_slots(7, 5), (7, SLOTS[5], "amax")),
        (of_slots(3, 0, "scale"), (3, SLOTS[0], "scale")),
        (of_metric(4, "train/loss"), (4, "loss", "loss")),
        (of_metric(4, "train/grad_norm"), (4, "gradient", "grad_norm")),
        (of_metric(20, "train/lr"), (20, "update", "lr")),
    ],
)
def test_one_bit_is_found_at_its_step(
    tmp_path: Path, change: Change, expected: tuple[int, str, str]
) -> None:
    found = compared(make(tmp_path / "a"), make(tmp_path / "b", change))
    assert at(found) == expected
    assert found["first_divergence"]["a"] != found["first_divergence"]["b"]
    assert "nothing that is recorded and can change a number differs" in found["evidence"]


def test_the_first_figure_is_that_which_a_step_computes_first(tmp_path: Path) -> None:
    """Forward layer by layer, the loss, then backward from the last layer, then the norm."""

    def change(step: int, row: dict[str, float], slots: dict[str, np.ndarray]) -> None:
        if step >= 5:
            slots["amax"] += 1
            row["train/loss"] += 1
            row["train/grad_norm"] += 1

    found = compared(make(tmp_path / "a"), make(tmp_path / "b", change))
    order = [each["tensor"] for each in found["differ_in_that_step"]]
    forward = ["blocks.00.up.input", "blocks.00.up.weight", "blocks.01.up.input"]
    backward = ["loss", "blocks.01.up.grad_output", "blocks.00.up.grad_output", "gradient"]
    assert order == [*forward, "blocks.01.up.weight", *backward]


def test_a_sampled_figure_of_one_run_alone_is_no_divergence(tmp_path: Path) -> None:
    def sampled(step: int, row: dict[str, float], slots: dict[str, np.ndarray]) -> None:
        if step == 3:
            slots["sqnr_db"] = np.full(len(SLOTS), 30.0, np.float32)

    found = compared(make(tmp_path / "a"), make(tmp_path / "b", sampled))
    assert found["first_divergence"] is None


def test_figures_that_are_not_finite_agree_or_differ(tmp_path: Path) -> None:
    def nan(step: int, row: dict[str, float], slots: dict[str, np.ndarray]) -> None:
        if step == 6:
            row["train/loss"] = math.nan

    one, other = make(tmp_path / "a", nan), make(tmp_path / "b", nan)
    assert compared(one, other)["first_divergence"] is None
    first = compared(one, make(tmp_path / "c"))["first_divergence"]
    assert (first["step"], first["tensor"], first["a"], first["b"]) == (6, "loss", "nan", 4.4)


def test_without_the_slot_file_the_journals_series_are_compared(tmp_path: Path) -> None:
    def series(value: float) -> Change:
        def change(step: int, row: dict[str, float], slots: dict[str, np.ndarray]) -> None:
            row["fp8_amax/blocks.00.up.weight"] = value if step == 9 else 1.0

        return change

    one = make(tmp_path / "a", series(1.0), slots=False)
    found = compared(one, make(tmp_path / "b", series(2.0), slots=False))
    assert at(found) == (9, "blocks.00.up.weight", "amax")
    assert found["compared"]["every_slot"] is False


def _torn(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def _damaged(path: Path) -> None:
    """The payload of step 15's frame is overwritten; the frames around it can be read."""
    content = bytearray(path.read_bytes())
    frames = path.read_bytes().split(b"FP8s")
    at = len(b"FP8s".join(frames[:15])) + 20  # after the frame's header
    content[at : at + 8] = bytes(8)
    path.write_bytes(content)


@pytest.mark.parametrize("loss", [_torn, _damaged])
def test_steps_that_a_slot_file_lost_are_compared_by_the_journals_series(
    tmp_path: Path, loss: Callable[[Path], None]
) -> None:
    name = SLOTS[1]

    def series(factor: float) -> Change:
        def change(step: int, row: dict[str, float], slots: dict[str, np.ndarray]) -> None:
            row[f"fp8_amax/{name}"] = factor * step if step == 15 else float(step)

        return change

    one = make(tmp_path / "a", series(1.0))
    same, other = make(tmp_path / "same", series(1.0)), make(tmp_path / "b", series(2.0))
    for run in (same, other):
        loss(run / SLOT_FILE)
    found = compared(one, other)
    assert at(found) == (15, name, "amax")
    assert len(found["differ_in_that_step"]) == 1, "a figure that both have is listed once"
    assert found["compared"]["every_slot"] is False

    found = compared(one, same)
    assert (found["first_divergence"], found["compared"]["every_slot"]) == (None, False)
    text = shown(one, same)
    assert "FP8 figures of every step are not in both runs: where not, only the journal's" in text


def test_runs_without_fp8_lack_no_figures(tmp_path: Path) -> None:
    text = shown(make(tmp_path / "a", slots=False), make(tmp_path / "b", slots=False))
    assert "no divergence" in text
    assert "not in both runs" not in text
    text = shown(tmp_path / "a", make(tmp_path / "c", of_metric(5, "train/loss"), slots=False))
    assert "first divergence" in text
    assert "not in both runs" not in text


@pytest.mark.parametrize(("step", "evidence"), [(1, "initial weights"), (2, "the update before")])
def test_a_loop_that_logs_its_loss_in_some_steps_is_compared_in_all_that_have_fp8_figures(
    tmp_path: Path, step: int, evidence: str
) -> None:
    def every(folder: Path, change: Change) -> Path:
        run = make(folder, change)
        journal = run / "journal.jsonl"
        rows = [json.loads(line) for line in journal.read_text().splitlines()]
        kept = [row for row in rows if row["kind"] != "metrics" or row["step"] % 10 == 0]
        journal.write_text("".join(json.dumps(row) + "\n" for row in kept))
        return run

    one, other = every(tmp_path / "a", of_slots(99, 0)), every(tmp_path / "b", of_slots(step, 1))
    found = compared(one, other)
    assert at(found) == (step, SLOTS[1], "amax")
    assert evidence in found["evidence"]
    assert f"first divergence, of steps 1-20 of a and b: step {step}" in shown(one, other)


def test_a_rollback_hides_no_divergence_that_it_discarded(tmp_path: Path) -> None:
    """The step as it ran first differs; the one that replaced it does not."""
    one = make(tmp_path / "a")
    other = make(tmp_path / "b", of_metric(20, "train/loss", 3.0))
    with Journal(other / "journal.jsonl", resume_step=21) as journal:
        journal.event(20, "guard.rollback", to_step=18, passed_over=[])
        journal.attempt = 2
        for step in (19, 20):
            journal.metrics(step, {"train/loss": 5.0 - step / 10})
    assert at(compared(one, other)) == (20, "loss", "loss")


@pytest.mark.parametrize("first", [16, 19])
def test_a_rollback_of_one_run_alone_is_the_cause_of_what_follows(
    tmp_path: Path, first: int
) -> None:
    """Of the steps that it made run again, too: the first of them is before the step that its event names."""
    one, other = make(tmp_path / "a"), make(tmp_path / "b")
    with Journal(other / "journal.jsonl", resume_step=21) as journal:
        journal.event(18, "guard.rollback", to_step=15, passed_over=[16])
        journal.attempt = 2
        for step in range(16, 21):
            journal.metrics(step, {"train/loss": 5.0 - step / 10 + (step >= first)})
    found = compared(one, other)
    assert at(found) == (first, "loss", "loss")
    assert found["compared"]["only_repeated_steps_differ"]
    assert keys(found)[0] == ("event", "guard.rollback at step 18")


@pytest.mark.parametrize(
    ("params", "tags", "cause"),
    [
        ({"train.lr": 0.001}, {}, ("config", "train.lr")),
        ({"train.steps": 10}, {}, ("config", "train.steps")),
        ({"recipe": "bf16"}, {}, ("config", "recipe")),
        ({}, {"ranks": "2"}, ("machine", "ranks")),
    ],
)
def test_what_a_resume_changed_later_is_the_cause_of_an_earlier_divergence(
    tmp_path: Path, params: dict[str, Any], tags: dict[str, str], cause: tuple[str, str]
) -> None:
    """In the end both runs have the same config: what counts is that of the step in which they part."""
    last = {"train.lr": 0.003, "train.steps": 20, "recipe": "fp8_hybrid"}
    name = "train/loss" if cause[1] in ("recipe", "ranks") else "train/lr"
    one = make(tmp_path / "a", params=last, ranks="1")
    first: dict[str, Any] = {"ranks": "1"} | tags
    other = make(tmp_path / "b", of_metric(4, name), range(1, 11), last | params, **first)
    with Journal(other / "journal.jsonl", resume_step=10) as journal:
        journal.note("run", tags={"ranks": "1"}, params=last, data={})
        journal.event(10, "run.resumed")
        for step in range(11, 21):
            journal.metrics(step, {"train/loss": 5.0 - step / 10, "train/lr": 0.1})

    found = compared(one, other)
    assert at(found)[0] == 4
    assert found["differences"] == []
    assert keys(found) == [cause]
    text = shown(one, other)
    assert "nothing that is recorded differs at the end" in text
    assert "these are the settings of step 4, which a resume changed later" in text


def test_another_file_for_deepspeed_is_a_cause(tmp_path: Path) -> None:
    one = make(tmp_path / "a", params={"engine.deepspeed": "fp32.json"})
    change = of_metric(3, "train/grad_norm")
    found = compared(one, make(tmp_path / "b", change, params={"engine.deepspeed": "bf16.json"}))
    assert keys(found) == [("config", "engine.deepspeed")]


def test_several_seeds_are_a_side_with_an_interval(tmp_path: Path) -> None:
    import scipy.stats  # takes over a second, in every process that collects tests

    losses = {"a": [2.0, 2.1, 2.4], "b": [2.2, 2.6, 2.5]}
    folders: list[Path] = []
    for side, values in losses.items():
        for seed, loss in enumerate(values):

            def change(
                step: int, row: dict[str, float], slots: dict[str, np.ndarray], loss: float = loss
            ) -> None:
                row["train/loss"] = loss

            params = {"train.seed": seed, "train.lr": 0.1 if side == "a" else 0.2}
            folders.append(make(tmp_path / f"{side}{seed}", change, params=params))
    found = compared(*folders)
    assert (found["a"]["name"], found["b"]["seeds"]) == ("a0 and 2 more", [0, 1, 2])
    apart = np.subtract(losses["b"], losses["a"])
    oracle = scipy.stats.ttest_1samp(apart, 0.0).confidence_interval(0.95)
    assert found["loss"]["last"]["gap"] == pytest.approx(apart.mean())
    assert found["loss"]["last"]["interval_95"] == pytest.approx(list(oracle))
    assert [each["key"] for each in found["differences"]] == ["train.lr"], "a pair of one seed"

    uneven = compared(*folders[:5])["loss"]["last"]["interval_95"]
    oracle = scipy.stats.ttest_ind(losses["b"][:2], losses["a"], equal_var=False)
    low, high = oracle.confidence_interval(0.95)
    assert uneven[0] <= low < high <= uneven[1], "degrees of freedom are rounded down"


RERUN = {"train.seed": 1}
NONE = {"train.seed": None}


@pytest.mark.parametrize(
    ("seeds", "note"),
    [(RERUN, "A has seed 1 twice: no interval"), (NONE, "A has runs without a recorded seed")],
)
def test_runs_of_one_seed_have_no_interval(
    tmp_path: Path, seeds: dict[str, Any], note: str
) -> None:
    folders = [make(tmp_path / f"a{place}", params=seeds) for place in range(2)]
    for seed in (1, 2):
        params = {"train.seed": seed, "train.lr": 0.2}
        folders.append(make(tmp_path / f"b{seed}", params=params))
    found = compared(*folders)
    assert {gap["interval_95"] for gap in found["loss"].values()} == {None}
    assert note in found["notes"][0]
    assert len(found["notes"]) == 1


@pytest.mark.parametrize("apart", ["precision.resolved", "recipe.sha256", "card", "start"])
def test_seeds_that_ran_in_something_else_are_no_side(tmp_path: Path, apart: str) -> None:
    folders: list[Path] = []
    for lr in (0.1, 0.2):
        for seed in (0, 1):
            params = {"train.seed": seed, "train.lr": lr}
            is_other = (lr, seed) == (0.1, 1)
            tags: dict[str, Any] = {apart: "other"} if is_other and apart != "start" else {}
            folder = make(tmp_path / f"lr{lr}-seed{seed}", params=params, **tags)
            if is_other and apart == "start":
                (folder / "started_from.json").write_text('{"path": "runs/x/checkpoints/step-1"}')
            folders.append(folder)
    text = " ".join(compared(*folders, code=2).split())
    assert "make 3 sides, not two" in text
    assert "resolved precision, card" in text


def test_machines_are_named_where_speed_is_compared(tmp_path: Path) -> None:
    def unmeasured(step: int, row: dict[str, float], slots: dict[str, np.ndarray]) -> None:
        del row["train/tokens_per_second"], row["train/peak_memory_gib"]

    one = make(tmp_path / "a")
    (note,) = compared(one, make(tmp_path / "b", tier="Hopper"))["notes"]
    assert note.endswith("machines: A not recorded; B [tier Hopper]")
    assert not compared(one, make(tmp_path / "c", unmeasured, tier="Hopper"))["notes"]

    folders: list[Path] = []
    for lr in (0.1, 0.2):
        for seed, tier in enumerate(("Ada", "Hopper")):
            params = {"train.seed": seed, "train.lr": lr}
            folders.append(make(tmp_path / f"{lr}-{seed}", params=params, tier=tier))
    (note,) = compared(*folders)["notes"]
    assert note.endswith("of each side are of several machines: [tier Ada], [tier Hopper]")


def test_the_speed_of_a_run_that_went_on_elsewhere_is_that_of_its_last_machine(
    tmp_path: Path,
) -> None:
    one, other = make(tmp_path / "a", tier="Hopper"), make(tmp_path / "b", tier="Ada")
    with Journal(other / "journal.jsonl") as journal:
        journal.note("run", tags={"tier": "Hopper"}, params={}, data={}, where={"host": "b"})
        journal.event(20, "run.resumed", to_step=20)
        for step in (21, 22, 23):
            journal.metrics(step, {"train/tokens_per_second": 300.0, "train/peak_memory_gib": 1.0})
    found = compared(one, other)
    assert found["speed"]["ratio"] == 3.0
    assert found["memory"]["ratio"] == 1.0 / 1.5


def test_data_without_a_hash_are_not_said_to_differ(tmp_path: Path) -> None:
    one = make(tmp_path / "a")
    (note,) = compared(one, make(tmp_path / "b", data=None))["notes"]
    assert note == "whether the data are the same is not recorded"


def test_losses_of_other_amounts_of_data_are_noted(tmp_path: Path) -> None:
    params = {"train.global_batch": 4, "data.context": 64, "data.val_samples": 8}
    one = make(tmp_path / "a", params=params)
    assert not compared(one, make(tmp_path / "same", params=params))["notes"]
    larger = make(tmp_path / "b", params={**params, "train.global_batch": 8})
    assert compared(one, larger)["notes"] == [
        "losses are compared by step, and a step takes more data in one: train.global_batch 4 in A, 8 in B"
    ]
    split = make(tmp_path / "d", params={**params, "train.global_batch": 8, "data.context": 32})
    assert compared(one, split)["notes"] == [
        "validation is of other samples: data.context 64 in A, 32 in B"
    ], "the steps take as many tokens"
    longer = make(tmp_path / "c", params={**params, "data.context": 128, "data.val_samples": 9})
    assert compared(one, longer)["notes"][1:] == [
        "validation is of other samples: data.context 64 in A, 128 in B; data.val_samples 8 in A, 9 in B"
    ]


def test_three_configs_are_refused_with_the_sides_that_they_make(tmp_path: Path) -> None:
    folders = [make(tmp_path / name, params={"train.lr": lr}) for lr, name in enumerate("abc")]
    text = compared(*folders, code=2)
    assert "make 3 sides, not two: [a], [b], [c]" in text
    folders = [make(tmp_path / f"s{seed}", params={"train.seed": seed}) for seed in range(3)]
    assert "make 1 side, not two" in compared(*folders, code=2)


def test_runs_that_cannot_be_compared_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "runs" / "mine")
    make(tmp_path / "runs" / "later", steps=range(31, 41))
    with Journal(tmp_path / "runs" / "bare" / "journal.jsonl") as journal:
        journal.note("run", tags={}, params={}, data={})
    monkeypatch.chdir(tmp_path)
    text = compared("mime", "runs/none", code=2)
    assert 'did you mean "mine"?' in text
    assert "runs/none: not a run: no such folder" in text
    assert "mine: is given twice" in compared("mine", "runs/mine", code=2)
    assert "runs/bare: has no step with a loss" in compared("mine", "bare", code=2)
    assert "mine has steps 1-20, later steps 31-40" in compared("mine", "later", code=2)
    assert "one run is no comparison" in compared("mine", code=2)


def test_the_picture_is_drawn_where_the_command_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = make(tmp_path / "a"), make(tmp_path / "$b", of_slots(7, 1))
    with Journal(other / "journal.jsonl", resume_step=21) as journal:
        journal.event(9, "precision.switched", demote=["blocks.0.up"], promote=[], lowered="")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["compare", str(one), str(other)])
    assert done.exit_code == 0, done.output
    assert "first divergence, of steps 1-20 of a and $b: step 7, blocks.00.up.weight" in done.output
    assert done.output.splitlines()[-1] == "picture  compare-a-$b.png"
    assert (tmp_path / "compare-a-$b.png").read_bytes().startswith(b"\x89PNG")
    done = CliRunner().invoke(app, ["compare", str(one), str(other), "--no-picture"])
    assert "picture" not in done.output


def test_a_folder_whose_name_is_no_text_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = make(tmp_path / "a"), make(tmp_path / os.fsdecode(b"b\xff"))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["compare", str(one), str(other)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "compare-a-b.png").is_file()


def test_no_text_of_a_run_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\x9b31m\x85\u202egnp.exe"
    one = make(tmp_path / "a", params={"train.lr": evil, evil: 1}, torch=evil, data=evil)
    other = make(tmp_path / f"b{evil}", of_slots(7, 1), params={"train.lr": 1}, torch="1")
    monkeypatch.chdir(tmp_path)
    for words in (["compare", str(one), str(other)], ["runs", str(tmp_path)]):
        for option in ([], ["--json"]):
            done = CliRunner().invoke(app, [*words, *option])
            assert done.exit_code == 0, done.output
            assert not {*"\x1b\x07\x9b\x85\u202e"} & set(done.output)
            assert "gnp.exe" in done.output


def test_what_differs_is_listed(tmp_path: Path) -> None:
    def plan(precision: str) -> str:
        layer = {"module": "l.0", "precision": precision, "backend": "b", "reason": "x"}
        resolved = {"requested": "r", "resolved": f"native:{precision}"}
        return json.dumps({**resolved, "layers": [layer]})

    one = make(tmp_path / "a", params={"train.lr": 1}, torch="2.12", data="x")
    other = make(tmp_path / "b", params={"train.lr": 2}, torch="2.13", data="y")
    (one / "plan.json").write_text(plan("fp8"))
    (other / "plan.json").write_text(plan("bf16"))
    found = compared(one, other)
    assert found["differences"] == [
        {"kind": "config", "key": "train.lr", "a": 1, "b": 2},
        {"kind": "plan", "key": "resolved", "a": "native:fp8", "b": "native:bf16"},
        {"kind": "plan", "key": "l.0", "a": "fp8 (b)", "b": "bf16 (b)"},
        {"kind": "data", "key": "data.sha256", "a": "x", "b": "y"},
        {"kind": "library", "key": "torch", "a": "2.12", "b": "2.13"},
    ]
    assert found["notes"] == ["the data differ, so losses are of other texts"]


def test_a_run_whose_checkpoints_are_gone_has_lost_no_library(tmp_path: Path) -> None:
    one, other = make(tmp_path / "a"), make(tmp_path / "b")
    Store(one / "checkpoints", {"numpy": "1.0"}).save(1, {"model": {"w": torch.ones(2)}}, {}, {})
    assert compared(one, other)["differences"] == []
    Store(other / "checkpoints", {"numpy": "2.0"}).save(1, {"model": {"w": torch.ones(2)}}, {}, {})
    assert compared(one, other)["differences"] == [
        {"kind": "library", "key": "numpy", "a": "1.0", "b": "2.0"}
    ]


# Real runs: what is put into them is named, at its step.

OWN_MODEL = """
import torch
from harness.models.gpt import build as gpt

def build(init=0, **args):
    torch.manual_seed(init)
    return gpt(**args)
"""
SHORT = ("train.steps=3", "data.val_samples=2", "checkpoint.every=0")
CONTEXT, BATCH = 64, 4


def train(folder: Path, name: str, *arguments: str, recipe: str = "fp8_hybrid") -> Path:
    done = runs.train(folder, "--name", name, "--recipe", recipe, *SHORT, *arguments)
    assert done.returncode == 0, done.stdout[-2000:]
    return folder / "runs" / name


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    return train(folder, "base")


@pytest.mark.slow
def test_real_runs_of_one_command_agree_and_another_rate_is_named(base: Path) -> None:
    again = train(base.parents[1], "again")
    found = compared(base, again)
    assert found["first_divergence"] is None
    assert found["differences"] == []
    assert found["compared"]["every_slot"]

    faster = train(base.parents[1], "faster", "train.lr=0.004")
    found = compared(base, faster)
    assert at(found) == (1, "update", "lr")
    assert keys(found) == [("config", "train.lr")]


@pytest.mark.slow
def test_another_seed_is_named_as_the_cause_of_other_initial_weights(base: Path) -> None:
    found = compared(base, train(base.parents[1], "seed", "train.seed=1"))
    assert at(found) == (1, "parameters", "param_norm")
    assert "blocks.00.attn.qkv.weight" in {each["tensor"] for each in found["differ_in_that_step"]}
    assert found["evidence"] == "the initial weights differ"
    assert keys(found) == [("config", "train.seed")]


@pytest.mark.slow
def test_another_byte_of_the_data_is_named_at_the_step_that_reads_it(tmp_path: Path) -> None:
    text = "".join(path.read_text() for path in sorted(runs.TEXT.iterdir()))
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(text)
    one = train(tmp_path, "a", "data.path=one")

    # A byte in the middle of a sample that the second step reads and the first does not.
    total = (one / "data" / "train.bin").stat().st_size // CONTEXT
    windows = [set(sample_numbers(0, index, BATCH, total - 1).tolist()) for index in (0, 1)]
    sample = min(windows[1] - windows[0] - {each + 1 for each in windows[0]})
    changed = bytearray(text.encode())
    changed[sample * CONTEXT + CONTEXT // 2] ^= 1
    (tmp_path / "other" / "text.txt").write_bytes(changed)
    found = compared(one, train(tmp_path, "b", "data.path=other"))
    assert found["first_divergence"]["step"] == 2
    assert keys(found) == [("config", "data.path"), ("data", "data.sha256")]
    assert "the data differ" in found["notes"][0]


@pytest.mark.slow
def test_another_margin_is_named_by_the_first_scale_that_it_sets(
    base: Path, tmp_path: Path
) -> None:
    recipe = (runs.ROOT / "recipes" / "fp8_hybrid.yaml").read_text()
    changed = tmp_path / "fp8_hybrid.yaml"
    changed.write_text(recipe.replace("margin: 0", "margin: 1"))
    other = train(base.parents[1], "margin", recipe=str(changed))
    found = compared(base, other)
    # The first step's scales are 1, whatever the margin is.
    assert at(found) == (2, "blocks.00.attn.qkv.input", "scale")
    first = found["first_divergence"]
    assert first["a"] == 2 * first["b"]
    assert keys(found)[0] == ("config", "recipe")


@pytest.mark.slow
def test_weights_and_order_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_MODEL)
    args = {"dim": 64, "layers": 2, "heads": 2}
    model = ("model.target=own:build", f"model.args={json.dumps(args)}")
    one = train(tmp_path, "a", *model)

    weights = json.dumps({**args, "init": 1})
    found = compared(one, train(tmp_path, "weights", model[0], f"model.args={weights}"))
    assert at(found) == (1, "parameters", "param_norm")
    assert keys(found) == [("config", "model.args.init")]

    found = compared(one, train(tmp_path, "order", *model, "train.seed=1"))
    assert found["first_divergence"]["step"] == 1
    assert found["evidence"].startswith("the weights agree, and the inputs")
    assert keys(found)[0] == ("order", "train.seed")
