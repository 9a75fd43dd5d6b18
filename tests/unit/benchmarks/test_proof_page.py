"""What a proof writes: its form, its table, what it gives the estimate, and that nothing private is in it."""

from __future__ import annotations

import copy
import getpass
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import te_golden
from benchmarks.proof import __main__ as command
from benchmarks.proof import page
from benchmarks.proof.registry import ROWS
from harness.capability.cards import CARDS
from harness.estimate.roofline import read_calibration

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
STATUSES = {"passed", "failed", "not run"}
CARD: dict[str, Any] = {
    "name": "NVIDIA H100 80GB HBM3", "capability": [9, 0], "memory": 84932978278, "free": 84e9, "multiprocessors": 132,
    "mig": False, "busy": "", "smi": {"driver_version": "580.65.06", "power.limit": "700.00"},
}  # fmt: skip
SOURCE = {"commit": "a" * 40, "changed": [], "sha256": "b" * 64, "why": ""}


def outcome(name: str, figures: dict[str, Any], **over: Any) -> dict[str, Any]:
    row = next(row for row in ROWS if row.name == name)
    return (
        command.skipped(row, "")
        | {"status": "passed", "summary": "said", "figures": figures, "seconds": 1.0}
        | over
    )


def spread(value: float) -> dict[str, float]:
    return {"median": value, "min": 0.9 * value, "max": 1.1 * value}


def rows() -> list[dict[str, Any]]:
    machine = {"card": CARD, "versions": {"torch": "2.13.0", "cuda": "13.0"}, "source": SOURCE}
    return [
        outcome("machine", machine),
        outcome("gemm", {"flops": {"bf16": spread(7e14), "fp8": spread(1.3e15)}}),
        outcome("bandwidth", {"rate": {"copy": spread(2.9e12)}}),
        outcome(
            "attention",
            {"flops": {"both": spread(4e14)}},
            status="failed",
            reason="it | broke\nin two",
        ),
        outcome("launch", {"seconds": spread(3e-6), "context_bytes": 600 * 2**20}),
    ]


def proof(made: list[dict[str, Any]], rehearsal: bool = False) -> dict[str, Any]:
    piece = page.Piece("2030-01-01", "python -m benchmarks.proof", 9.0)
    return page.record(made, rehearsal=rehearsal, complete=True, pieces=[piece])


def check(found: dict[str, Any]) -> None:
    """The form that readers of these files rely on. Raises AssertionError."""
    assert found["schema"] == page.SCHEMA
    assert {
        "rehearsal",
        "complete",
        "date",
        "command",
        "card",
        "versions",
        "source",
        "roofline",
        "flaw",
    } <= found.keys()
    assert found["rehearsal"] is ("warning" in found)
    assert {"commit", "changed", "sha256", "why"} <= found["source"].keys()
    for row in found["rows"]:
        assert row["status"] in STATUSES
        assert {"name", "question", "reason", "summary", "figures", "seconds"} <= row.keys()
        assert row["status"] == "passed" or row["reason"], row["name"]
    json.dumps(found, allow_nan=False)


def test_a_proof_has_its_form_and_calibrates_the_estimate(tmp_path: Path) -> None:
    found = proof(rows())
    check(found)
    (tmp_path / "proof.json").write_text(json.dumps(found))
    read = read_calibration(tmp_path / "proof.json", CARDS["H100"])
    assert read.calibrated
    assert (read.rates.gemm_half, read.rates.gemm_fp8, read.rates.bandwidth) == (
        7e14,
        1.3e15,
        2.9e12,
    )
    assert (read.rates.launch_seconds, read.rates.context_bytes) == (3e-6, 600 * 2**20)
    assert found["roofline"]["attention"] is None, "that row failed"


@pytest.mark.parametrize("what", ["busy", "mig"])
def test_a_card_that_is_not_whole_or_idle_calibrates_nothing(what: str, tmp_path: Path) -> None:
    made = copy.deepcopy(rows())
    made[0]["figures"]["card"][what] = True if what == "mig" else "it was 97% busy at the start"
    found = proof(made)
    (tmp_path / "proof.json").write_text(json.dumps(found))
    assert not read_calibration(tmp_path / "proof.json", CARDS["H100"]).calibrated
    assert found["flaw"]
    assert found["flaw"] in page.markdown(found)


def test_the_table_has_a_line_for_every_row_and_survives_any_text() -> None:
    text = page.markdown(proof(rows()))
    table = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in table] == [
        row["name"] for row in rows()
    ]
    for line in table:
        assert line.replace("\\|", "").count("|") == 6
    assert "**failed** | it \\| broke in two; said" in text
    for value in (
        "NVIDIA H100",
        "9.0",
        "580.65.06",
        "700.00",
        "torch 2.13.0",
        "a" * 40,
        "python -m benchmarks.proof",
    ):
        assert value in text
    assert "as committed" in text


def test_a_rehearsal_says_so_everywhere() -> None:
    made = rows()
    made[0]["figures"]["card"] = None
    found = proof(made, rehearsal=True)
    check(found)
    assert found["warning"] == page.REHEARSAL
    assert page.markdown(found).count(page.REHEARSAL) >= 2
    assert not any(value for name, value in found["roofline"].items())
    assert page.stem(made[0]["figures"], True, True) == "rehearsal_cpu"
    assert page.stem(rows()[0]["figures"], False, True) == "proof_nvidia_h100_80gb_hbm3"
    assert page.stem(rows()[0]["figures"], False, False) == "proof_nvidia_h100_80gb_hbm3_partial"


def test_nothing_private_is_left(tmp_path: Path) -> None:
    environ = {
        "HOME": "/data/people/janedoe", "USER": "janedoe", "HOSTNAME": "gpu-node-17.lab.example.org",
        "HF_TOKEN": "hf_verysecretvalue", "MLFLOW_TRACKING_PASSWORD": "correcthorse",
    }  # fmt: skip
    scrubber = page.Scrubber(environ, hosts=["rented-4711"])
    private = [
        str(Path.home()), socket.gethostname(), str(page.ROOT), sys.prefix, "/home/someone", "/Users/other", "janedoe",
        "gpu-node-17", "lab.example.org", "rented-4711", "hf_verysecretvalue", "correcthorse",
        "GPU-8f6c1d5e-1111-2222-3333-444455556666", "10.20.30.40", "me@example.org",
    ]  # fmt: skip
    made = rows()
    for number, text in enumerate(private):
        made[number % 5]["figures"][f"key {text}/x"] = [
            {"deep": f"a {text}/file.py, {text}: line {number}"}
        ]
        made[number % 5]["log"] = [
            *made[number % 5].get("log", []),
            f'File "{text}/harness/run.py", {text}',
        ]
    made[3]["reason"] = " ".join(private)
    clean = scrubber.all(proof(made))
    check(clean)
    written = json.dumps(clean) + page.markdown(clean)
    left = [text for text in private if text in written]
    assert left == []
    assert "harness/run.py" in written, "what is not private stays"
    for kept in ("NVIDIA H100 80GB HBM3", "580.65.06", "tests/gpu", "a" * 40, "2.13.0"):
        assert scrubber.text(kept) == kept


def test_this_machine_is_private() -> None:
    text = f"{Path.home()}/x {getpass.getuser()}@{socket.gethostname()} {page.ROOT}/harness/run.py {Path.cwd()}/y"
    cleaned = page.Scrubber().text(text)
    for private in (str(Path.home()), f"@{socket.gethostname()}", str(page.ROOT), str(Path.cwd())):
        assert private not in cleaned
    assert "harness/run.py" in cleaned


def test_what_rows_kept_is_stored_beside_the_results_as_it_was(tmp_path: Path) -> None:
    keep, out = tmp_path / "keep", tmp_path / "out"
    keep.mkdir()
    out.mkdir()
    golden = {
        "gpu": CARD["name"],
        "sequences": [],
        "casts": [{"format": "e4m3", "scale": 1.0, "runs": [[0, 0]]}],
    }
    (keep / "te_golden.json").write_text(json.dumps(golden))
    files = command.write(proof(rows()), out, keep)
    stem = "proof_nvidia_h100_80gb_hbm3"
    assert [path.name for path in files] == [f"{stem}.json", f"{stem}.md", f"{stem}_te_golden.json"]
    assert json.loads(files[2].read_text()) == golden


def test_records_of_transformer_engine_agree_with_the_native_backend() -> None:
    files = [
        *sorted(te_golden.FOLDER.glob("*.json")),
        *sorted(RESULTS.glob("proof_*_te_golden.json")),
    ]
    assert files
    said: list[str] = []
    assert te_golden.main(["--check", *map(str, files)], show=said.append) == 0, "\n".join(said)


def test_proofs_that_were_sent_are_proofs_and_private() -> None:
    for path in sorted(RESULTS.glob("proof_*.json")):
        if path.name.endswith("_te_golden.json"):
            continue
        found = json.loads(path.read_text(encoding="utf-8"))
        check(found)
        assert found["rehearsal"] is False
        assert page.Scrubber().all(found) == found
    assert not list(RESULTS.glob("rehearsal*")), "a rehearsal is no result"


def test_a_record_adds_up_its_pieces() -> None:
    first = proof(rows())
    last = page.Piece("2030-01-02", "python -m benchmarks.proof --resume a.json", 3.0)
    second = page.record(rows(), rehearsal=False, complete=True, pieces=[*page.pieces(first), last])
    assert page.pieces(second) == [*page.pieces(first), last]
    text = page.markdown(second)
    assert text.index("2030-01-02, 3.0 minutes") < text.index("before it, 2030-01-01")


def test_rows_of_another_card_code_or_version_say_nothing_here() -> None:
    machine = rows()[0]["figures"]
    record = proof(rows())
    assert page.differences(record, machine) == []
    assert page.differences({}, {}) == []
    others = {
        "card": machine | {"card": machine["card"] | {"name": "NVIDIA Other"}},
        "versions": machine | {"versions": machine["versions"] | {"torch": "9.9"}},
        "code": machine | {"source": machine["source"] | {"sha256": "0" * 64}},
    }
    for what, other in others.items():
        assert page.differences(record, other) == [what]


def test_what_is_no_record_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    for text in ("[]", "{}", "{"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"no record|Expecting"):
            page.earlier_record(path, rehearsal=False)
    path.write_text(json.dumps(proof(rows())))
    assert page.earlier_record(path, rehearsal=False)["rows"]
    with pytest.raises(ValueError, match="it is a proof, and this is a rehearsal"):
        page.earlier_record(path, rehearsal=True)
