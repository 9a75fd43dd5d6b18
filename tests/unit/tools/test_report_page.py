"""The page of a run as a file: its policy, its data against the run's own, its size, and what it refuses."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.report_page import make_run
from harness.cli import app
from harness.core.errors import ConfigError
from harness.core.facts import SlotStats
from harness.report import decimate
from harness.report.page import page, write_page
from harness.tracking.history import RunHistory
from harness.tracking.journal import JOURNAL, Journal
from harness.tracking.slot_file import SLOT_FILE, SlotFile
from tests.support.pages import content_of
from tests.support.runs import harness

EVIL = "</script><img src=x onerror=alert(1)><!--&\u2028@SCRIPT@"


class Parts(HTMLParser):
    """Elements with their attributes, and what scripts and styles hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[tuple[str, str]] = []
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag
        if tag in ("script", "style"):
            self.inside.append((tag, ""))

    def handle_data(self, data: str) -> None:
        if self._open in ("script", "style"):
            tag, before = self.inside[-1]
            self.inside[-1] = (tag, before + data)

    def handle_endtag(self, tag: str) -> None:
        self._open = ""


def small_run(
    folder: Path, slot: str = "blocks.0.up", figures: Mapping[str, float] | None = None
) -> Path:
    """A run of six steps with one FP8 layer."""
    folder.mkdir(parents=True)
    names = tuple(f"{slot}.{role}" for role in ("input", "weight", "grad_output"))
    file = SlotFile(folder / SLOT_FILE)
    with Journal(folder / JOURNAL) as journal:
        journal.note(
            "run", tags={"ranks": "2"}, params={"train.lr": 0.1}, data={}, where={"host": "h"}
        )
        for step in range(1, 7):
            journal.metrics(
                step, {"train/loss": 5.0 - step, "train/step_applied": 1.0} | dict(figures or {})
            )
            amax = np.full(3, step, np.float32)
            if step == 5:
                amax[1] = math.inf
            none = np.full(3, math.nan, np.float32)
            file.add(1, step, SlotStats(names, amax, amax, amax / np.float32(4), none, none, none))
        journal.note("end", status="done")
    file.close()
    return folder


def saved(run: Path, *more: Path) -> Path:
    made = run.parent / "page.html"
    made.write_text(page([RunHistory.read(each) for each in (run, *more)]))
    return made


def test_the_policy_allows_the_two_scripts_and_the_style_and_nothing_else(tmp_path: Path) -> None:
    parts = Parts(saved(small_run(tmp_path / "r")).read_text())
    (policy,) = (
        given["content"]
        for tag, given in parts.elements
        if given.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert set(rules) == {
        "default-src",
        "script-src",
        "style-src",
        "img-src",
        "base-uri",
        "form-action",
    }
    digests = [
        (tag, f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
        for tag, text in parts.inside
    ]
    # The first script is data, which no browser runs.
    scripts = [digest for tag, digest in digests if tag == "script"]
    assert rules["script-src"].split() == scripts[1:]
    assert rules["style-src"].split() == [digest for tag, digest in digests if tag == "style"]
    for _, given in parts.elements:
        assert not [name for name in given if name.startswith("on") or name == "style"]


def test_hostile_names_are_data_and_never_markup(tmp_path: Path) -> None:
    run = small_run(tmp_path / EVIL.replace("/", "|"), slot=f"blocks.{EVIL}", figures={EVIL: 1.0})
    with (run / JOURNAL).open("a") as journal:
        event = {
            "kind": "event",
            "step": 3,
            "attempt": 1,
            "time": 1.0,
            "code": EVIL,
            "text": EVIL,
            EVIL: EVIL,
        }
        journal.write(json.dumps(event) + "\n")
    made = saved(run)
    parts = Parts(made.read_text())
    assert [tag for tag, _ in parts.elements].count("img") == 0
    assert [tag for tag, _ in parts.inside] == ["style", "script", "script", "script"]
    content = content_of(made)["runs"][0]
    told = EVIL.replace("\u2028", "\\u2028")
    assert content["events"][0]["code"] == told
    assert content["slots"]["slots"][0]["name"].startswith(f"blocks.{told}.")
    assert [chart["title"] for chart in content["charts"]][-1] == told


def test_slots_have_their_figures_and_histories(tmp_path: Path) -> None:
    slots = content_of(saved(small_run(tmp_path / "r")))["runs"][0]["slots"]
    first = slots["slots"][0]
    assert first["name"] == "blocks.0.up.weight"
    assert first["why"].startswith("amax not finite in 1 step")
    assert first["newest"]["amax"] == 6.0
    assert slots["steps"] == [1, 2, 3, 4, 5, 6]
    packed = slots["series"]["amax_high"]
    values = decimate.unpack(decimate.Packed(packed["codes"], packed["low"], packed["high"]))
    np.testing.assert_allclose(values[0, [0, 1, 2, 3, 5]], [1, 2, 3, 4, 6], rtol=1e-4)
    assert np.isnan(values[0, 4])
    marks = base64.b64decode(slots["series"]["marks"][0])
    assert list(marks) == [0, 0, 0, 0, decimate.INFINITE, 0]


def test_figures_that_are_not_finite_are_marked(tmp_path: Path) -> None:
    run = tmp_path / "r"
    run.mkdir()
    with Journal(run / JOURNAL) as journal:
        for step, loss in enumerate((5.0, math.nan, 4.0, math.inf, 1e300), 1):
            journal.metrics(step, {"train/loss": loss, "train/step_applied": float(step != 2)})
    (loss,) = content_of(saved(run))["runs"][0]["charts"]
    (series,) = loss["series"]
    assert series["marks"] == [[2, "NaN"], [4, "infinite"], [5, "over 1e+100"]]
    assert (series["steps"], series["values"]) == ([1, 3], [5.0, 4.0])
    assert series["summary"]["not_drawn"] == 3
    assert loss["skipped"] == [2]


def test_changes_of_the_loss_scale_are_events(tmp_path: Path) -> None:
    run = tmp_path / "r"
    run.mkdir()
    with Journal(run / JOURNAL) as journal:
        for step, scale in enumerate((1024.0, 512.0, 512.0, 1024.0), 1):
            journal.metrics(step, {"train/loss": 1.0, "train/loss_scale": scale})
    events = content_of(saved(run))["runs"][0]["events"]
    assert [(each["step"], each["text"]) for each in events] == [
        (2, "backoff: 1024 to 512"),
        (4, "growth: 512 to 1024"),
    ]


def test_a_demotion_has_its_evidence_and_a_rollback_what_led_to_it(tmp_path: Path) -> None:
    run = tmp_path / "r"
    run.mkdir()
    evidence = {"a.up": {"slots": {"a.up.input": {"even_db": [6.5, 5.25]}}}}
    with Journal(run / JOURNAL) as journal:
        for step in range(1, 9):
            journal.metrics(step, {"train/loss": 1.0})
        journal.event(3, "precision.demote", text="a.up to BF16", demote=evidence, promote={})
        journal.event(5, "precision.switched", demote=["a.up"], promote=[], lowered="")
        # A verdict of the switch's own step comes after it in the journal: it asked for another switch.
        journal.event(5, "precision.promote", text="b.up to FP8", demote={}, promote={})
        journal.event(8, "nonfinite.skip", text="loss nan", window=7)
        journal.event(
            8, "guard.rollback", reason="too many", to_step=4, passed_over=[7], source="disk"
        )
        journal.attempt = 2
        journal.metrics(5, {"train/loss": 1.0})
    content = content_of(saved(run))["runs"][0]
    (move,) = content["moves"]
    assert (move["demote"], move["why"], move["undone"]) == ("a.up", "a.up to BF16", True)
    assert move["slots"] == [{"slot": "a.up.input", "figure": "even_db", "values": "6.5, 5.25"}]
    (back,) = content["rollbacks"]
    assert (back["step"], back["to_step"], back["windows"]) == (8, 4, "7")
    assert back["led"][-1] == ["step 8", "nonfinite.skip", "loss nan"]
    assert dict(content["cost"])["thrown away"].startswith("4 steps by rollbacks")


def test_every_execution_that_a_rollback_discarded_is_paid_for(tmp_path: Path) -> None:
    run = tmp_path / "r"
    with Journal(run / JOURNAL) as journal:
        # Steps 5 to 8, then 5 to 6, were in vain.
        for attempt, steps in enumerate([range(1, 9), range(5, 7), range(5, 10)], start=1):
            journal.attempt = attempt
            for step in steps:
                journal.metrics(step, {"train/loss": 1.0})
    content = content_of(saved(run))["runs"][0]
    assert dict(content["cost"])["thrown away"].startswith("6 steps by rollbacks")


def test_checkpoints_and_cost_come_from_the_journal(tmp_path: Path) -> None:
    run = tmp_path / "r"
    run.mkdir()
    rows = [
        {"kind": "run", "time": 100.0, "tags": {"ranks": "2"}, "params": {}, "where": {"host": "h"}},
        {"kind": "metrics", "step": 1, "attempt": 1, "time": 160.0, "metrics": {"train/loss": 1.0}},
        {"kind": "checkpoint", "step": 1, "attempt": 1, "time": 161.0, "state": "saved", "path": "x",
         "metrics": {}, "seconds": 2.5},
        {"kind": "checkpoint", "step": 1, "attempt": 1, "time": 162.0, "state": "good"},
        # Nine hours later somebody resumed it.
        {"kind": "run", "time": 32000.0, "tags": {}, "params": {}, "where": {"host": "h"}},
        {"kind": "metrics", "step": 2, "attempt": 1, "time": 33738.0, "metrics": {"train/loss": 1.0}},
    ]  # fmt: skip
    (run / JOURNAL).write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = content_of(saved(run))["runs"][0]
    assert content["running"]
    ((step, _, _, seconds, size, state),) = content["checkpoints"]
    assert (step, seconds, size, state) == (1, 2.5, 0, "good, not in the folder")
    cost = dict(content["cost"])
    assert cost["time"] == "30:00 in 2 starts", "62 s and 1738 s, and not the time between"
    assert cost["rank hours"].startswith("1: 2 ranks")


def test_rank_hours_are_those_of_each_start(tmp_path: Path) -> None:
    run = tmp_path / "r"
    run.mkdir()
    rows: list[dict[str, object]] = []
    for step, (begins, ranks, card) in enumerate(((0.0, "1", "A100"), (9000.0, "4", "H100")), 1):
        tags = {"ranks": ranks, "card": card}
        rows.append({"kind": "run", "time": begins, "tags": tags, "where": {"host": "h"}})
        loss = {"train/loss": 1.0}
        rows.append(
            {"kind": "metrics", "step": step, "attempt": 1, "time": begins + 1800, "metrics": loss}
        )
    (run / JOURNAL).write_text("".join(json.dumps(row) + "\n" for row in rows))
    cost = dict(content_of(saved(run))["runs"][0]["cost"])
    assert cost["rank hours"] == "2.5: 1 rank on A100 for 30:00, 4 ranks on H100 for 30:00"


@pytest.mark.slow
def test_a_large_run_fits_and_its_spikes_are_there(tmp_path: Path) -> None:
    # 32 layers of 4 Linears, and more steps than a page has points. More of them only join more steps in a point.
    model = make_run(tmp_path / "large", steps=1400, linears=128)
    made = saved(tmp_path / "large")
    assert made.stat().st_size < 5_000_000
    slots = content_of(made)["runs"][0]["slots"]
    assert len(slots["slots"]) == 384
    assert slots["joined"] > 1
    places = {slot["name"]: row for row, slot in enumerate(slots["slots"])}
    packed = slots["series"]["amax_high"]
    values = decimate.unpack(decimate.Packed(packed["codes"], packed["low"], packed["high"]))
    for step, slot in model.extremes.items():
        group = int(np.searchsorted(slots["steps"], step, side="right")) - 1
        largest = values[places[model.names[slot]], group]
        assert largest == pytest.approx(12345.0 + step, rel=1e-3)


def test_two_runs_are_on_one_page(tmp_path: Path) -> None:
    one, other = (
        small_run(tmp_path / "one"),
        small_run(tmp_path / "other", figures={"val/loss": 2.0}),
    )
    text = (other / JOURNAL).read_text().replace('"train.lr": 0.1', '"train.lr": 0.2')
    (other / JOURNAL).write_text(text.replace('"train/loss": 1.0', '"train/loss": 1.5'))
    content = content_of(saved(one, other))
    assert [run["name"] for run in content["runs"]] == ["one", "other"]
    compared = content["compared"]
    assert ["config", "train.lr", "0.1", "0.2"] in compared["given"]
    assert compared["first"] == "step 4, loss loss: A 1.0, B 1.5"
    assert compared["steps"] == [6, 1, 6]
    assert [gap[0] for gap in compared["gaps"]] == ["loss, step 6", "mean loss, steps 1-6"]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_of_no_step_or_one_has_a_page(tmp_path: Path, steps: int) -> None:
    run = tmp_path / "r"
    run.mkdir()
    with Journal(run / JOURNAL) as journal:
        for step in range(1, steps + 1):
            journal.metrics(step, {"train/loss": 1.0})
    content = content_of(saved(run, run))
    assert len(content["runs"][0]["charts"]) == steps
    assert content["compared"]["steps"][0] == steps


def test_a_slot_file_that_is_lost_is_replaced_by_the_journal(tmp_path: Path) -> None:
    run = tmp_path / "r"
    run.mkdir()
    with Journal(run / JOURNAL) as journal:
        for step in (5, 10, 15):
            row = {"fp8_amax/a.input": float(step), "fp8_scale/a.input": 2.0}
            journal.metrics(step, {"train/loss": 1.0} | row)
    slots = content_of(saved(run))["runs"][0]["slots"]
    assert slots["every_step"] is False
    assert slots["steps"] == [5, 10, 15]
    assert slots["slots"][0]["newest"] == {
        **dict.fromkeys(("saturation", "clipped", "underflow", "sqnr_db", "even_db", "centred_db")),
        "amax": 15.0,
        "scale": 2.0,
    }


def test_a_slot_that_has_rows_only_later_was_never_not_finite(tmp_path: Path) -> None:
    run = tmp_path / "r"
    run.mkdir()
    with Journal(run / JOURNAL) as journal:
        for step in range(1, 9):
            row: dict[str, float] = {"train/loss": 1.0, "train/step_applied": 1.0}
            # The second slot is picked when it gets into trouble, and then is infinite once.
            for slot, since in (("up.input", 1), ("down.input", 5)):
                if step >= since:
                    amax = math.inf if (slot, step) == ("down.input", 7) else 2.0
                    row |= {f"fp8_{name}/{slot}": amax for name in ("amax", "scale", "saturation")}
            journal.metrics(step, row)
    slots = content_of(saved(run))["runs"][0]["slots"]
    assert slots["joined"] == 1
    assert {each["name"]: each["nonfinite"] for each in slots["slots"]} == {
        "up.input": 0,
        "down.input": 1,
    }
    place = [each["name"] for each in slots["slots"]].index("down.input")
    marks = base64.b64decode(slots["series"]["marks"][place])
    assert list(marks) == [0, 0, 0, 0, 0, 0, decimate.INFINITE, 0]


@pytest.mark.slow
def test_the_command_writes_one_page_or_one_of_two_runs(tmp_path: Path) -> None:
    one, other = small_run(tmp_path / "one"), small_run(tmp_path / "other")
    before = sorted(path.name for path in one.iterdir())
    done = harness(tmp_path, "report", str(one), "--with", str(other))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "report-one-other.html\n"
    done = harness(tmp_path, "report", str(one), "--out", "mine.html")
    assert done.returncode == 0, done.stderr
    assert len(content_of(tmp_path / "mine.html")["pictures"]) == 2
    assert sorted(path.name for path in one.iterdir()) == before, "nothing was written into the run"


def test_a_run_folder_that_takes_no_report_is_named_with_another_place(tmp_path: Path) -> None:
    run = small_run(tmp_path / "r")
    (run / "plots").write_bytes(b"")
    done = CliRunner().invoke(app, ["report", str(run)])
    assert done.exit_code == 2
    assert f"{run}: the report cannot be written here: " in done.stderr
    assert "--out FILE.html" in done.stderr


@pytest.mark.slow
def test_a_page_replaces_nothing_but_a_page(tmp_path: Path) -> None:
    run = small_run(tmp_path / "r")
    journal = (run / JOURNAL).read_bytes()
    with pytest.raises(
        ConfigError, match=r"journal.jsonl: is no name of a page(.|\n)*end it in .html"
    ):
        write_page(run, None, run / JOURNAL)
    assert (run / JOURNAL).read_bytes() == journal
    with pytest.raises(ConfigError, match="the page cannot be written: No such file"):
        write_page(run, None, tmp_path / "none" / "page.html")


def test_folders_that_are_no_runs_are_named(tmp_path: Path) -> None:
    run = small_run(tmp_path / "r")
    (tmp_path / "foreign").mkdir()
    with pytest.raises(ConfigError, match="has no journal"):
        write_page(run, tmp_path / "foreign", None)
    with pytest.raises(ConfigError, match="is given twice"):
        write_page(run, tmp_path / "foreign" / ".." / "r", None)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / JOURNAL).write_bytes(b"\x00\xff not a row\n" * 9)
    (tmp_path / "broken" / SLOT_FILE).write_bytes(b"FP8s" + bytes(40))
    content = content_of(write_page(tmp_path / "broken", None, tmp_path / "page.html"))
    assert content["runs"][0]["charts"] == []


def test_the_library_is_the_vendored_version() -> None:
    folder = Path(decimate.__file__).parent / "vendor" / "uplot"
    found = re.search(r"\(v([\d.]+)\)", (folder / "uPlot.iife.min.js").read_text()[:200])
    assert found is not None
    assert f"uPlot {found[1]}" in (folder / "README.md").read_text()
    assert "MIT License" in (folder / "LICENSE").read_text()
