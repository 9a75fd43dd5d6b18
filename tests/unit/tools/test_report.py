"""The record, the pictures and the page against runs made up here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from harness.core.errors import ConfigError
from harness.report import page as report
from harness.report.charts import shipped
from harness.tracking.charts import SECTIONS
from harness.tracking.history import RunHistory, bare
from harness.tracking.journal import Journal, Position
from harness.tracking.store import Destination
from tests.support.pages import content_of

ROLES = ("input", "weight", "grad_output")
Saturation = Callable[[str, int], float]


def make_run(
    run_dir: Path,
    *,
    layers: int = 4,
    steps: int = 30,
    saturation: Saturation = lambda slot, step: 0.9,
    fp8: bool = True,
) -> Path:
    """A run of `steps` steps with FP8 rows at every fifth; layers `blocks.N.up`, numbered as the model has them."""
    run_dir.mkdir(parents=True)
    plan = {
        "recipe": "fp8_hybrid",
        "tier": "CPU",
        "requested": "fp8",
        "resolved": "native:fp8",
        "effective": "fp8: 4 modules",
        "rungs": [{"rung": "native:fp8", "taken": True, "reason": "emulation <here>"}],
        "layers": [
            {
                "module": f"blocks.{i}.up",
                "kind": "Linear",
                "precision": "fp8" if fp8 else "bf16",
                "backend": "native",
                "reason": "ok",
                "shape": [64, 32],
            }
            for i in range(layers)
        ],
    }
    (run_dir / "plan.json").write_text(json.dumps(plan))
    with Journal(run_dir / "journal.jsonl") as journal:
        journal.note("run", tags={"tier": "CPU"}, params={}, data={"unigram_bits_per_byte": 4.8})
        for step in range(1, steps + 1):
            journal.metrics(
                step, {"train/loss": 5.0 / step, "train/step_applied": float(step != 7)}
            )
            if step % 5 == 0 and fp8:
                slots = [
                    f"blocks.{i:02d}.up.{role}"
                    for i in reversed(range(layers))
                    for role in reversed(ROLES)
                ]
                row = {f"fp8_saturation/{slot}": saturation(slot, step) for slot in slots}
                row |= {f"fp8_amax/{slot}": 2.0 * saturation(slot, step) for slot in slots}
                journal.metrics(step, row | {f"fp8_scale/{slot}": 224.0 for slot in slots})
        journal.metrics(steps, {"val/loss": 1.5})
        journal.event(7, "nonfinite.skip", text="<script>alert(1)</script>", value=math.nan)
        journal.note("end", status="done")
    (run_dir / "outcome.json").write_text(
        json.dumps({"status": "done", "reason": "30 steps", "step": steps})
    )
    return run_dir


class Page(HTMLParser):
    """Tags and what they refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value for name, value in attrs if name in {"src", "href"} and value]


def red_pixels(path: Path) -> int:
    picture = np.asarray(imread(path))[:, :, :3]
    return int(((picture[:, :, 0] - picture[:, :, 2] > 0.4) & (picture[:, :, 1] < 0.5)).sum())


def test_charts_of_mlflow_have_the_order_of_the_page(tmp_path: Path) -> None:
    history = RunHistory.read(make_run(tmp_path / "r"))
    page = [name for chart in shipped(history) for name in chart.series]
    dashboard = [name for section in SECTIONS for name in section.figures]
    both = [name for name in dashboard if name in page]
    assert len(both) >= 8
    assert both == sorted(both, key=page.index)


def test_files_and_a_page_that_needs_nothing_else(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "r")
    written = report.write(run_dir)
    assert [path.relative_to(run_dir).as_posix() for path in written] == [
        "plots/loss.png",
        "plots/fp8_saturation.png",
        "report.html",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written[:2])
    text = written[2].read_text()
    page = Page(text)
    assert page.tags.count("script") == 3, "its data, the library, and ours"
    assert not set(page.tags) & {"img", "iframe", "object", "embed", "form", "base"}
    assert page.references == ["data:,", "#main"], "nothing is fetched"
    assert "<script>alert(1)" not in text
    run = content_of(written[2])["runs"][0]
    assert [event["text"] for event in run["events"]] == ["<script>alert(1)</script>"]
    assert "emulation <here>" in "".join(run["plan"]["lines"])
    assert [row[0] for row in run["plan"]["layers"]] == ["blocks.0-3.up"]
    assert "12 of 12 FP8 slots saw a nonzero amax" in dict(run["account"])["FP8 proof"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("uri", "address"),
    [
        (
            "http://tracking:5000",
            "http://tracking:5000/#/experiments/3/runs/abc?workflowType=machine_learning",
        ),
        (
            "sqlite:////data/mlflow.db",
            "http://127.0.0.1:5000/#/experiments/3/runs/abc?workflowType=machine_learning",
        ),
    ],
)
def test_the_page_has_plan_config_and_a_link_to_mlflow(
    tmp_path: Path, uri: str, address: str
) -> None:
    run_dir = make_run(tmp_path / "r")
    (run_dir / "config.yaml").write_text(
        "train:\n  steps: 30\ndata: {path: 'http://me:s3cr3t@host/<x>'}\n"
    )
    before = content_of(report.write(run_dir)[-1])["runs"][0]
    assert before["link"] is None, "it was delivered nowhere"
    Destination(uri).save(run_dir)
    Position("abc", 0, "key", "3").save(run_dir)
    run = content_of(report.write(run_dir)[-1])["runs"][0]
    assert run["link"]["href"] == address
    command = "" if uri.startswith("http") else f"mlflow ui --backend-store-uri {uri}"
    assert run["link"]["command"] == command
    assert "steps: 30" in run["config"]
    assert "http://***@host/<x>" in run["config"], "without passwords"


@pytest.mark.slow
def test_clipped_slots_stand_out_in_red(tmp_path: Path) -> None:
    def clipped(slot: str, step: int) -> float:
        return 3.0 if slot == "blocks.02.up.input" and step > 10 else 0.9

    report.write(make_run(tmp_path / "healthy"))
    report.write(make_run(tmp_path / "clipped", saturation=clipped))
    healthy = red_pixels(tmp_path / "healthy" / "plots" / "fp8_saturation.png")
    hot = red_pixels(tmp_path / "clipped" / "plots" / "fp8_saturation.png")
    assert hot > healthy + 2000


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 170])
def test_pictures_of_any_size(tmp_path: Path, layers: int) -> None:
    odd: dict[int, float] = {5: 0.0, 10: math.inf, 15: math.nan}
    run_dir = make_run(
        tmp_path / "r", layers=layers, steps=20, saturation=lambda slot, step: odd.get(step, 1.0)
    )
    report.write(run_dir)
    height, width, _ = imread(run_dir / "plots" / "fp8_saturation.png").shape
    assert 300 < height < 2200
    assert 900 < width < 1500


def test_without_fp8_or_rows_there_are_fewer_pictures(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "r", fp8=False)
    assert [path.name for path in report.write(run_dir)] == ["loss.png", "report.html"]
    (tmp_path / "empty").mkdir()
    Journal(tmp_path / "empty" / "journal.jsonl").close()
    assert [path.name for path in report.write(tmp_path / "empty")] == ["report.html"]


def test_all_losses_non_finite_is_still_a_report(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    with Journal(tmp_path / "r" / "journal.jsonl") as journal:
        for step in range(5):
            journal.metrics(
                step, {"train/loss": math.nan, "val/loss": math.inf, "train/step_applied": 0.0}
            )
    assert len(report.write(tmp_path / "r")) == 2


def test_no_run_is_a_named_error(tmp_path: Path) -> None:
    make_run(tmp_path / "quick")
    with pytest.raises(ConfigError, match=r'no such folder(.|\n)*did you mean "quick"'):
        report.write(tmp_path / "quik")
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=r"has no journal"):
        report.write(tmp_path / "other")


def test_a_rollback_splits_what_counts_from_what_was_thrown_away(tmp_path: Path) -> None:
    def switched(journal: Journal, step: int, **lists: list[str]) -> None:
        journal.event(step, "precision.switched", **({"demote": [], "promote": []} | lists))

    with Journal(tmp_path / "journal.jsonl") as journal:
        for step in range(1, 9):
            journal.metrics(step, {"train/loss": 1.0})
        switched(journal, 3, demote=["blocks.00.up", "blocks.01.up"])
        switched(journal, 7, demote=["blocks.02.up"])
        journal.attempt = 2
        for step in range(5, 12):
            journal.metrics(step, {"train/loss": 2.0})
        switched(journal, 9, promote=["blocks.01.up"])
        switched(journal, 10, demote=["blocks.01.up"])
    record = RunHistory.read(tmp_path)
    assert record.series["train/loss"] == {step: 1.0 if step < 5 else 2.0 for step in range(1, 12)}
    assert record.abandoned["train/loss"] == dict.fromkeys(range(5, 9), 1.0)
    assert record.demotions() == [
        ("blocks.0.up", 3, None),
        ("blocks.1.up", 3, 9),
        ("blocks.1.up", 10, None),
    ]
    assert record.last("train/loss") == 2.0
    assert record.last("val/loss") is None


def test_figures_of_the_step_that_a_rollback_returned_to_discard_nothing(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        for step in range(1, 9):
            journal.metrics(step, {"train/loss": 1.0})
        journal.metrics(4, {"val/loss": 3.0})
        # Step 4 was not done again: a loop of one's own validates it once more.
        journal.attempt = 2
        journal.metrics(4, {"val/loss": 3.0})
        for step in range(5, 10):
            journal.metrics(step, {"train/loss": 2.0})
    record = RunHistory.read(tmp_path)
    assert record.series["train/loss"] == {step: 1.0 if step < 5 else 2.0 for step in range(1, 10)}
    assert list(record.abandoned["train/loss"]) == [5, 6, 7, 8]
    assert record.series["val/loss"] == {4: 3.0}


def test_slots_follow_the_plan_and_the_roles(tmp_path: Path) -> None:
    record = RunHistory.read(make_run(tmp_path / "r", layers=12))
    assert record.slots() == [f"blocks.{i:02d}.up.{role}" for i in range(12) for role in ROLES]
    steps, values = record.matrix("fp8_amax", record.slots())
    assert steps.tolist() == [5, 10, 15, 20, 25, 30]
    assert values.shape == (36, 6)
    assert (values == 1.8).all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("blocks.03.up", "blocks.3.up"), ("0.00.w10", "0.0.w10"), ("l01.x", "l01.x")],
)
def test_bare_names(name: str, expected: Any) -> None:
    assert bare(name) == expected
