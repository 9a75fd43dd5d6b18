"""The standing enemy itself: a sequence of each family runs, and its oracle sees a wrong end for what it is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attack_damage import contents
from attack_field import Field
from attack_job import Ended
from attack_oracle import compare, traceback
from attack_plans import FAMILIES, KINDS, Episode, draw, fits
from attack_run import Finding, _Sequence
from reliability_page import enemy, merged

from harness.checkpoint.store import Store
from tests.support.runs import ROOT, train

pytestmark = [pytest.mark.faults(1, 3, 4, 6, 27)]

HERE = Path(__file__).parent


def attack(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own: its warm processes have the injectors in them."""
    line = [sys.executable, str(HERE / "attack.py"), "--work", str(folder), "--ledger", str(folder / "ledger"), *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=1200, check=False, cwd=ROOT)


def test_a_seed_says_everything() -> None:
    assert draw(7) == draw(7)
    assert len({json.dumps([each.events for each in draw(seed).episodes]) for seed in range(40)}) > 30
    drawn = [draw(seed) for seed in range(3000)]
    assert {name for each in drawn for name in each.families} == {*FAMILIES, "start"}
    assert {each.kind for each in drawn} == set(KINDS)
    assert all(fits(name, each.kind) for each in drawn for name in each.families)
    for name in FAMILIES:
        assert FAMILIES[name][1].__doc__, name


def test_sequences_end_well_and_are_written_down(tmp_path: Path) -> None:
    done = attack(tmp_path, "--seed=5", "--count=2", "--family=kill", "--family=disk", "--kind=python", "--no-page")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "ledger").read_text().splitlines()]
    assert [line["seed"] for line in lines] == [5, 6]
    assert all(line["result"] in ("same", "refused") and line["faults"] for line in lines)
    assert "2 sequences: 2 same" in done.stdout
    assert not list(tmp_path.glob("seed-*")), "what went well leaves nothing"


@pytest.mark.slow
@pytest.mark.attack
@pytest.mark.dist
def test_one_sequence_of_each_family(tmp_path: Path) -> None:
    done = attack(tmp_path, "--seed=0", "--each", "--no-page")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in FAMILIES:
        assert name in done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, as the attack makes them."""
    folder = tmp_path_factory.mktemp("whole")
    done = train(folder, *Field(folder).command(folder, "plain", False)[2:])
    assert done.returncode == 0, done.stdout
    return folder / "runs" / "r"


def other_bytes(run: Path) -> None:
    """The last checkpoint is of other weights, and verifies."""
    store = Store(run / "checkpoints")
    tensors, meta = store.load(24)
    next(iter(tensors["model"].values())).view(-1)[0] += 1e-3
    store.remove(24)
    store.save(24, tensors, meta)


def lost_step(run: Path) -> None:
    rows = (run / "journal.jsonl").read_text().splitlines(keepends=True)
    (run / "journal.jsonl").write_text("".join(row for row in rows if '"step":17' not in row.replace(" ", "")))


def doubled_step(run: Path) -> None:
    rows = (run / "journal.jsonl").read_text().splitlines(keepends=True)
    again = next(row for row in rows if '"step":17' in row.replace(" ", ""))
    (run / "journal.jsonl").write_text("".join([*rows, again]))


def other_loss(run: Path) -> None:
    text = (run / "journal.jsonl").read_text()
    first = text.index('"train/loss":') + len('"train/loss":')
    (run / "journal.jsonl").write_text(text[:first] + text[first:].replace(".", ".1", 1))


def no_checkpoint(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step-00000024")


def flipped(run: Path) -> None:
    path = run / "checkpoints" / "step-00000024" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")


def wrong_count(run: Path) -> None:
    outcome = json.loads((run / "outcome.json").read_text())
    (run / "outcome.json").write_text(json.dumps({**outcome, "applied": 20}))


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (other_bytes, "bytes: the last checkpoint has others than an undisturbed run: model.safetensors"),
        (lost_step, "history: 1 steps have no row: [17]"), (doubled_step, "history: rows stand twice: [17]"),
        (other_loss, "history: (1, 1, 'metrics'"), (no_checkpoint, "there is no checkpoint of step 24"),
        (flipped, "bytes: the last checkpoint does not verify"), (wrong_count, "outcome: applied is 20"),
    ],
)  # fmt: skip
def test_a_wrong_end_is_seen(whole: Path, tmp_path: Path, plant: Callable[[Path], None], said: str) -> None:
    run = tmp_path / "r"
    shutil.copytree(whole, run)
    assert compare(run, whole, 24) == ""
    plant(run)
    assert said in compare(run, whole, 24)


def judge(whole: Path, folder: Path, codes: list[int], told: str, outcome: dict[str, Any], may: list[int]) -> None:
    """What the oracle makes of one end of a run."""
    field = Field(folder)
    field._undisturbed["plain", "python", False] = whole
    sequence = _Sequence(field, draw(0, ["kill"], "python"), folder / "one")
    sequence.attack.variant = "plain"
    shutil.copytree(whole, sequence.run)
    if outcome:
        (sequence.run / "outcome.json").write_text(json.dumps(outcome))
    sequence.before = contents(sequence.run)
    sequence._judge(Episode("kill", may=may), Ended(codes, told, 1.0))


STOPPED = {"status": "stopped", "exit_code": 75, "reason": "SIGTERM", "step": 20}


def test_true_ends_are_taken(whole: Path, tmp_path: Path) -> None:
    for number, end in enumerate((([0], "", {}, []), ([75], "", STOPPED, [75]), ([-9], "", {}, [-9]))):
        judge(whole, tmp_path / f"{number}", *end)


@pytest.mark.parametrize(
    ("codes", "told", "outcome", "may", "said"),
    [
        ([1], "Traceback (most recent call last)\n  File x\nOSError: no\n", {}, [1], "traceback: OSError: no"),
        ([0], "", {**STOPPED, "step": 24}, [], "claim: exit code 0"),
        ([75], "", {**STOPPED, "step": 19}, [75], "claim: stopped with 75 at step 19, which does not verify"),
        ([75], "", {**STOPPED, "status": "done"}, [75], "exit code 75, and outcome.json says"),
        ([1], "", {}, [1], "no word"), ([-15], "", {}, [75], "exit code: -15"),
        ([2], "error: a\n    fix: b", {}, [], "refused without a reason"),
        ([1], "failed", {"reason": "steps 11 to 30 are lost"}, [1], "claim: steps 11 to 30 are lost"),
    ],
)  # fmt: skip
def test_an_end_that_is_not_true_is_seen(
    whole: Path, tmp_path: Path, codes: list[int], told: str, outcome: dict[str, Any], may: list[int], said: str
) -> None:
    with pytest.raises(Finding, match=said.replace("(", r"\(")):
        judge(whole, tmp_path, codes, told, outcome, may)


def test_a_launchers_own_traceback_is_no_finding() -> None:
    launchers = (
        "Traceback (most recent call last):\n  File torch/run.py\ntorch.ChildFailedError: \nlaunch/train.py FAILED"
    )
    ours = f"Traceback (most recent call last):\n  File {ROOT}/harness/cli.py\nKeyError: 1\n"
    assert traceback(launchers, "torchrun") == ""
    assert traceback(launchers, "python")
    assert traceback(launchers + ours, "torchrun") == "KeyError: 1"


def test_figures_of_one_kind_are_one_row() -> None:
    def trials(what: str, n: int, test: str = "a.py::x") -> dict[str, Any]:
        return {"row": 1, "what": what, "value": [n, n], "n": 0, "target": "all", "test": f"{test}[{n}]"}

    rows = merged([trials("bf16: runs that end", 5), trials("fp32: runs that end", 50), trials("kills", 25),
                   trials("kills", 1000), trials("kills", 7, "b.py::y")])  # fmt: skip
    assert [(row["what"], row["value"]) for row in rows] == [
        ("runs that end (bf16, fp32)", [55, 55]), ("kills", [1025, 1025]), ("kills", [7, 7]),
    ]  # fmt: skip


def test_the_page_tells_the_sums_of_the_ledger() -> None:
    line = {
        "seed": 1,
        "again": "--seed=1",
        "commit": "a",
        "plans": "p",
        "kind": "python",
        "families": ["start", "kill"],
        "faults": 2,
    }
    told = enemy(
        [{**line, "result": "finding", "finding": "bytes: x"}, {**line, "commit": "b", "result": "same", "finding": ""}]
    )
    assert "2 sequences of 4 faults, at 2 commits" in told
    assert "| kill | 2 | 1 | 0 | 0 | 1 | 1 (at most 95.0% fail, 95%) |" in told
    assert "| bytes: x | `--seed=1` | a | well at b |" in told
