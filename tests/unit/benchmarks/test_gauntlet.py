"""The gauntlet: its page has the record's figures, and three of its scenarios still end as they should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.gauntlet import report, samples
from benchmarks.gauntlet.scenarios import BY_NAME, SCENARIOS, model
from harness.core.files import read_json
from tests.support.matrix import rest_nightly
from tests.support.runs import environment

ROOT = Path(__file__).resolve().parents[3]
RECORD = ROOT / "benchmarks" / "results" / "gauntlet.json"
PAGE = ROOT / "docs" / "studies" / "gauntlet.md"
LOOPS = ("bare bf16", "bare FP8", "accelerate", "Lightning", "ours")


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return read_json(RECORD)["results"]


def test_the_page_has_the_tables_of_the_record(record: dict[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for table in (report.counts(record), report.table(record), report.answers(record)):
        assert table in text
    assert report.near(record) in text
    names = [report.named(row) for row in record["rows"]]
    alarms = sum(report.false_alarms(row) for row in record["rows"])
    to_name = len(names) - names.count("-")
    assert f"Ours names {names.count('yes')} of {to_name} faults. It raises {alarms} false" in text
    for library, version in record["versions"].items():
        assert f"{library} {version}" in text
    assert read_json(RECORD)["command"] in text


def test_the_record_is_of_all_scenarios_and_loops_as_they_are_now(record: dict[str, Any]) -> None:
    assert tuple(record["loops"]) == LOOPS
    assert len(record["rows"]) >= 20
    described = [
        {key: value for key, value in row.items() if key not in ("runs", "clean")}
        for row in record["rows"]
    ]
    assert described == [scenario.as_json() for scenario in SCENARIOS]


@pytest.mark.parametrize("name", list(BY_NAME))
def test_without_its_fault_a_scenario_has_the_usual_weights(name: str) -> None:
    """Else its loss would be compared with a clean run of another model."""

    def weights(of: str) -> dict[str, nn.Parameter]:
        torch.manual_seed(0)
        return dict(model(of, on=False).named_parameters())

    usual, own = weights("clean"), weights(name)
    assert list(usual) == list(own)
    if not BY_NAME[name].own_clean:
        assert all(torch.equal(usual[key], own[key]) for key in usual)


def test_a_fault_is_in_the_samples_of_its_windows_alone() -> None:
    changes = BY_NAME["50 bad windows"].changes()
    for index in range(120):
        bad = [number in changes for number in samples.window(index)]
        assert bad == [50 <= index < 100] * samples.BATCH


# How much each is at least over a clean run in the loop without the protection.
HURT = [("one bad batch", 0.001), ("gradient storm", 0.007), ("one hot channel", 0.007)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "hurt"), rest_nightly(HURT, HURT[0]))
def test_a_scenario_hurts_a_bare_loop_and_not_ours(tmp_path: Path, name: str, hurt: float) -> None:
    out = tmp_path / "record.json"
    loops = ["--loops", "bare FP8", "ours"]
    command = [sys.executable, "-m", "benchmarks.gauntlet", "--only", name, *loops]
    done = subprocess.run(
        [*command, "--json", str(out)],
        cwd=ROOT,
        env=environment(PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = read_json(out)["results"]["rows"]
    assert row["scenario"] == name

    def over(loop: str) -> float:
        return report.over(row["runs"][loop], row["clean"])

    # The fault hurts the loop without the protection, and ours ends as if there had been none.
    assert over("bare FP8") > hurt
    assert over("ours") < 0.005
    assert report.named(row) == "yes"
    assert report.false_alarms(row) == 0
    if name == "one bad batch":
        assert over("ours") < 0.0005
        assert row["runs"]["ours"]["lost"] == 1
