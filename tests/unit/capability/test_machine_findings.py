"""Known-bad pairs of versions, and what of a machine will trouble a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.capability.checks import Clocks, machine_findings, read_clocks
from harness.capability.probe import Device, MachineFacts
from harness.capability.versions import Setup, bad_pairs, installed_versions
from harness.core.findings import exit_code

FINE = MachineFacts(torch_version="2.13.0+cpu", disk_free_bytes=100 * 2**30)
TE = {"transformer-engine": "2.20.2", "transformer-engine-torch": "2.20.2"}
BAD = {
    "nightly": Setup({"torch": "2.14.0.dev20260620+cu130"}, "13.0", compiles=True, fp8=True),
    "parts of TE": Setup({**TE, "transformer-engine-torch": "2.19.0"}, "13.0"),
    "TE for CUDA 12": Setup({"torch": "2.13.0", "transformer-engine-cu12": "2.20.2"}, "13.0"),
    "streaming": Setup({"mosaicml-streaming": "0.13.0", "numpy": "2.4.6"}),
    "streaming and transformers": Setup(
        {"mosaicml-streaming": "0.9.1", "numpy": "2.1.3", "transformers": "5.2.0"}
    ),
    "transformers": Setup({"transformers": "4.57.1"}),
}
GOOD = {
    "nightly before it": Setup({"torch": "2.14.0.dev20260613"}, None, compiles=True, fp8=True),
    "nightly without compile": Setup({"torch": "2.14.0.dev20260620"}, None, fp8=True),
    "release": Setup({"torch": "2.13.0+cu130"}, "13.0", compiles=True, fp8=True),
    "TE": Setup({**TE, "transformer-engine-torch": "2.20.2+local"}, "13.0"),
    "TE and torch for CUDA 12": Setup({"torch": "2.13.0", "transformer-engine-cu12": "2.20.2"}, "12.8"),
    "streaming and an older NumPy": Setup({"mosaicml-streaming": "0.13.0", "numpy": "2.1.3"}),
    "newer streaming": Setup({"mosaicml-streaming": "0.14.0", "numpy": "2.4.6", "transformers": "5.2.0"}),
    "nothing": Setup({}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_known_bad_pair_is_named_with_its_versions(name: str) -> None:
    (finding,) = bad_pairs(BAD[name])
    assert finding.code == "versions.pair"
    assert finding.severity == "warning"
    assert any(version in finding.where for version in BAD[name].versions.values())
    assert finding.fix


@pytest.mark.parametrize("name", GOOD)
def test_other_versions_are_no_finding(name: str) -> None:
    assert bad_pairs(GOOD[name]) == []


def test_this_installation_has_no_bad_pair() -> None:
    versions = installed_versions()
    assert "torch" in versions
    assert bad_pairs(Setup(versions, compiles=True, fp8=True)) == []


def codes(facts: MachineFacts, clocks: Clocks) -> list[str]:
    return [finding.code for finding in machine_findings(facts, clocks)]


def test_disk_clock_and_nccl() -> None:
    assert codes(FINE, Clocks(1e9, 1e9, 1e9, 9e8)) == []
    assert codes(FINE, Clocks(1e9, 1e9)) == []
    little = MachineFacts(torch_version="2.13.0+cpu", disk_free_bytes=2**30)
    assert codes(little, Clocks(1e9, 1e9)) == ["machine.disk"]
    assert codes(FINE, Clocks(1e9, 1e9, 1e9 - 30)) == ["machine.clock"]
    assert codes(FINE, Clocks(1e9, 1e9, 1e9 + 30)) == ["machine.clock"]
    assert codes(FINE, Clocks(1e9, 1e9, 1e9, 1e9 + 7 * 86400)) == ["machine.clock"]

    cards = (Device("NVIDIA H100", (9, 0), 80 * 2**30),) * 2
    many = {"torch_version": "2.13.0+cu130", "torch_cuda": "13.0", "cuda_available": True}
    without = MachineFacts(devices=cards, disk_free_bytes=2**40, **many)  # type: ignore[arg-type]
    assert codes(without, Clocks(1e9, 1e9)) == ["machine.nccl"]
    having = MachineFacts(devices=cards, disk_free_bytes=2**40, nccl="2.28.3", **many)  # type: ignore[arg-type]
    assert codes(having, Clocks(1e9, 1e9)) == []


def test_a_slow_disk_is_no_wrong_clock() -> None:
    # The write took 100 s.
    for written in (1e9 - 1, 1e9, 1e9 + 50, 1e9 + 101):
        assert codes(FINE, Clocks(1e9, 1e9 + 100, written)) == []
    for written in (1e9 - 30, 1e9 + 130):
        (finding,) = machine_findings(FINE, Clocks(1e9, 1e9 + 100, written))
        assert finding.code == "machine.clock"
        assert "30 s" in finding.what


def test_a_machine_without_a_usable_torch_is_exit_4() -> None:
    findings = machine_findings(MachineFacts(disk_free_bytes=2**40), Clocks(1e9, 1e9))
    assert [finding.code for finding in findings] == ["machine.card"]
    assert exit_code(findings) == 4


def test_reading_the_clocks_leaves_no_file(tmp_path: Path) -> None:
    clocks = read_clocks(tmp_path)
    assert clocks.written is not None
    assert clocks.before <= clocks.after
    assert clocks.installed is not None
    assert list(tmp_path.iterdir()) == []
    assert read_clocks(tmp_path / "missing").written is None
