"""The benchmark of loops: one table, every loop in it or the reason why not, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import loop


@pytest.mark.nightly
def test_the_table_names_every_loop_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "find_spec", lambda name: None)
    threads = torch.get_num_threads()
    try:
        assert loop.main(["--sizes", "tiny", "--pairs", "1", "--threads", "1"]) == 0
    finally:
        torch.set_num_threads(threads)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tiny")]
    assert [line[12:29].strip() for line in lines] == [*loop.LOOPS, *loop.LOOPS]
    missing = [line for line in lines if "pip install" in line]
    assert [line.partition("pip install ")[2] for line in missing] == 2 * [
        "accelerate",
        "lightning-fabric",
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_ratio_is_of_two_times_of_one_round() -> None:
    figures = loop.rows({"bare": [1.0, 2.0, 4.0], "other": [1.5, 3.0, 2.0]})["other"].split()
    assert figures == ["2000.00", "1.500", "(0.50", "-", "1.50)", "0.929", "500.00"]
