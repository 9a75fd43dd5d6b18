"""The detectors on the committed traces of real quickstart runs: what they skip, and what they leave alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.detectors import RESULTS, Gate, clean, false_skips, main, recall, said, study
from benchmarks.loss_traces import SETTLED, Trace, read_run, read_traces, synthetic, write_traces
from harness.core.config import GuardConfig
from harness.core.errors import DataError
from harness.core.metrics import row
from harness.core.state import RunLedger
from harness.tracking.journal import encode

TRACES = RESULTS / "traces_quickstart_cpu.json"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The whole study, with few bootstrap steps."""
    return study(read_traces(TRACES), GuardConfig(), steps=4_000, seed=0)


def test_there_are_eight_runs_of_two_hundred_steps() -> None:
    traces = read_traces(TRACES)
    assert [trace.seed for trace in traces] == list(range(8))
    assert all(len(trace.loss) == len(trace.norm) == 200 for trace in traces)


@pytest.mark.nightly
def test_no_clean_run_has_a_skip_an_alarm_or_a_harder_clip(found: dict[str, Any]) -> None:
    assert [row["said"] for row in found["clean"]] == [[]] * 8
    assert [row["clipped_harder"] for row in found["clean"]] == [0] * 8
    assert all(row["loss"] < 0.95 and row["norm"] < 0.95 for row in found["clean"]), "not by a hair"
    assert all(row["first_limited_step"] == 34 for row in found["clean"])


@pytest.mark.parametrize("kind", ["loss", "norm"])
@pytest.mark.parametrize("factor", [10.0, 100.0])
@pytest.mark.nightly
def test_99_of_100_spikes_are_skipped_in_their_own_step(
    found: dict[str, Any], kind: str, factor: float
) -> None:
    (row,) = (row for row in found["recall"] if (row["kind"], row["factor"]) == (kind, factor))
    assert row["injected"] == 8 * 167
    assert row["noticed"] >= 0.99 * row["injected"]


@pytest.mark.nightly
def test_a_nan_is_told_and_changes_nothing_after_it(found: dict[str, Any]) -> None:
    expected = {
        "injected": 8 * 167,
        "told": 8 * 167,
        "extra_skips_or_words": 0,
        "differing_limits": 0,
    }
    assert found["after_nan"] == expected


@pytest.mark.nightly
def test_a_resumed_run_is_armed_at_once(found: dict[str, Any]) -> None:
    assert found["resume"] == {
        "resumed": 8 * 167,
        "steps_without_limits": 0,
        "differing_verdicts": 0,
    }


@pytest.mark.nightly
def test_synthetic_clean_runs_have_no_skip_and_no_alarm(found: dict[str, Any]) -> None:
    assert [(row["skips"], row["alarms"]) for row in found["false_skips"]] == [(0, 0)] * 3
    assert all(row["n"] >= 4_000 for row in found["false_skips"])


def test_the_published_figures_have_the_present_defaults_and_targets() -> None:
    record = json.loads((RESULTS / "detectors_cpu.json").read_text())
    assert record["guard"] == {name: getattr(GuardConfig(), name) for name in record["guard"]}
    assert all(row["upper_95_per_100000"] < 1 for row in record["false_skips"])
    assert all(
        row["noticed"] >= 0.99 * row["injected"] for row in record["recall"] if row["factor"] >= 10
    )


def test_a_keener_detector_would_show_false_skips() -> None:
    keen = GuardConfig(skip_growth=2.0, spike_sigma=2.0)
    assert false_skips(read_traces(TRACES)[:1], keen, 2_000, 20, 0)["skips"] > 10
    assert any(clean(trace, keen, 1.0)["said"] for trace in read_traces(TRACES))


def test_a_detector_that_is_off_would_notice_nothing() -> None:
    off = GuardConfig(skip_growth=1e6, spike_sigma=1e6)
    assert [recall(read_traces(TRACES)[:1], off, kind, 10.0) for kind in ("loss", "norm")] == [
        (0, 167)
    ] * 2


def test_the_gate_skips_in_the_step_itself() -> None:
    gate = Gate(GuardConfig())
    for _ in range(40):
        assert gate.feed(2.0, 1.0)[0].applied
    for loss, norm, code in (
        (2.0, 10.0, "gradient.skip"),
        (9.0, 1.0, "loss.skip"),
        (2.0, math.nan, "nonfinite.skip"),
    ):
        facts, verdicts = gate.feed(loss, norm)
        assert not facts.applied
        assert said(verdicts) == [code]
    assert gate.feed(2.0, 1.0)[0].applied


@pytest.mark.parametrize("block", [5, 60])
def test_a_synthetic_run_goes_on_along_the_trend_with_the_runs_residuals(block: int) -> None:
    trace = read_traces(TRACES)[0]
    loss, norm = (
        np.array(values) for values in synthetic(trace, 1000, block, np.random.default_rng(0))
    )
    assert len(loss) == len(norm) == 1000
    assert loss[:SETTLED].tolist() == trace.loss[:SETTLED].tolist()
    for made, recorded in ((loss, trace.loss), (norm, trace.norm)):
        logs, places = np.log(recorded[SETTLED:]), np.log(np.arange(SETTLED, 200) + 1.0)
        slopes = [
            (b - a) / (q - p)
            for p, a in zip(places, logs, strict=True)
            for q, b in zip(places, logs, strict=True)
            if q > p
        ]
        slope = np.median(slopes)
        residuals = np.sort(logs - slope * places)
        later = np.sort(np.log(made[SETTLED:]) - slope * np.log(np.arange(SETTLED, 1000) + 1.0))
        nearest = residuals[np.abs(residuals[None] - later[:, None]).argmin(axis=1)]
        np.testing.assert_allclose(later, nearest, atol=1e-9)


def journal(folder: Path, skipped: int | None = None, steps: int = 5) -> Path:
    gate = Gate(GuardConfig())
    rows: list[dict[str, Any]] = [{"kind": "run", "params": {"train.seed": 3}}]
    for step in range(1, steps + 1):
        facts = gate.feed(math.nan if step == skipped else 2.0 / step, 0.1 * step)[0]
        rows.append(
            {"kind": "metrics", "step": step, "attempt": 1, "metrics": row(facts, RunLedger())}
        )
    (folder / "journal.jsonl").write_bytes(b"".join(encode(row) for row in rows))
    return folder


def test_a_journal_and_a_traces_file_give_back_what_was_recorded(tmp_path: Path) -> None:
    trace = read_run(journal(tmp_path))
    assert (trace.seed, trace.loss.tolist()) == (3, [2.0 / step for step in range(1, 6)])
    write_traces(tmp_path / "t.json", [trace], "how")
    (again,) = read_traces(tmp_path / "t.json")
    np.testing.assert_allclose([again.loss, again.norm], [trace.loss, trace.norm], rtol=1e-6)


def test_a_run_with_skips_is_no_clean_trace(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"guard\.enabled=false"):
        read_run(journal(tmp_path, skipped=3))


@pytest.mark.slow
def test_the_command_writes_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = read_traces(TRACES)[0]
    write_traces(tmp_path / "t.json", [Trace(0, trace.loss[:80], trace.norm[:80])], "how")
    out = tmp_path / "out.json"
    monkeypatch.setattr(
        "sys.argv", ["x", "--traces", f"{tmp_path / 't.json'}", "--out", f"{out}", "--steps", "100"]
    )
    main()
    assert json.loads(out.read_text())["recall"][2]["injected"] == 47
    assert "95% upper bound" in capsys.readouterr().out
