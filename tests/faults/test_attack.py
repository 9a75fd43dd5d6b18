"""The standing enemy itself: a sequence of each family runs, and its oracle sees a wrong end for what it is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from attack_damage import contents, other_command
from attack_field import Field
from attack_job import Ended
from attack_oracle import Rows, compare, compare_history, figures, traceback
from attack_plans import FAMILIES, KINDS, SECRETS, Episode, draw, fits
from attack_run import Finding, _Sequence, credentials, leaks, secrets_of
from reliability_page import attacks, figures_table, merged

from harness.checkpoint.store import Store
from harness.tracking.journal import encode
from tests.support.matrix import rest_nightly
from tests.support.runs import ROOT, train

pytestmark = [pytest.mark.faults(1, 3, 4, 6, 27)]

HERE = Path(__file__).parent


def attack(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own: its warm processes have the injectors in them."""
    line = [
        sys.executable,
        str(HERE / "attack.py"),
        "--work",
        str(folder),
        "--ledger",
        str(folder / "ledger"),
        *words,
    ]
    return subprocess.run(line, capture_output=True, text=True, timeout=1200, check=False, cwd=ROOT)


def test_a_seed_says_everything() -> None:
    assert draw(7) == draw(7)
    assert (
        len({json.dumps([each.events for each in draw(seed).episodes]) for seed in range(40)}) > 30
    )
    drawn = [draw(seed) for seed in range(3000)]
    assert {name for each in drawn for name in each.families} == {*FAMILIES, "start"}
    assert {each.kind for each in drawn} == set(KINDS)
    assert all(fits(name, each.kind) for each in drawn for name in each.families)
    for name in FAMILIES:
        assert FAMILIES[name][1].__doc__, name


@pytest.mark.parametrize("form", SECRETS)
def test_a_secret_that_is_written_down_is_found(tmp_path: Path, form: str) -> None:
    attack = replace(draw(7), secret=form)
    given = "\n".join(credentials("http://localhost:5000", attack).values())
    assert leaks(tmp_path, secrets_of(attack)) == []
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "shipper.log").write_text(f"x\n{given}\nx")
    assert leaks(tmp_path, secrets_of(attack)) == ["runs/shipper.log"]


@pytest.mark.nightly
def test_sequences_end_well_and_are_written_down(tmp_path: Path) -> None:
    done = attack(
        tmp_path,
        "--seed=5",
        "--count=2",
        "--family=kill",
        "--family=disk",
        "--kind=python",
        "--no-page",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "ledger").read_text().splitlines()]
    assert [line["seed"] for line in lines] == [5, 6]
    assert all(line["result"] in ("same", "refused") and line["faults"] for line in lines)
    assert "2 sequences: 2 same" in done.stdout
    assert not list(tmp_path.glob("seed-*")), "what went well leaves nothing"


def recorded(folder: Path, *words: str) -> dict[str, Any]:
    """The ledger's line of one sequence in one process, which went well."""
    done = attack(folder, "--count=1", "--kind=python", "--no-page", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [json.loads(line) for line in (folder / "ledger").read_text().splitlines()]
    return line


# What is counted has fired: a disk has refused something, a server was found gone and denied access.
@pytest.mark.parametrize(
    ("family", "faults"),
    [
        *rest_nightly([("suspend", 4), ("no inodes", 2), ("read-only", 2), ("threads", 2)]),
        pytest.param("server", 4, marks=pytest.mark.attack),
    ],
)
@pytest.mark.slow
def test_a_family_fires(tmp_path: Path, family: str, faults: int) -> None:
    line = recorded(tmp_path, "--seed=7000", f"--family={family}")
    assert line["families"] == [family]
    assert line["faults"] == faults


@pytest.mark.nightly
def test_a_huge_recipe_is_refused_for_its_size(tmp_path: Path) -> None:
    drawn = {seed: draw(seed, ["changed"], "python") for seed in range(300)}
    seed = next(
        seed
        for seed, each in drawn.items()
        if [one.change for one in each.episodes[1:]] == ["huge recipe"]
    )
    line = recorded(tmp_path, f"--seed={seed}", "--family=changed")
    assert (line["changes"], line["faults"]) == (
        ["huge recipe"],
        1 + len(drawn[seed].episodes[0].events),
    )
    (tmp_path / "recipe.yaml").write_text("")
    arguments, said, mend = other_command(tmp_path, "huge recipe")
    assert not re.search(said, "recipe: changed from 'recipe.yaml' to 'huge.yaml'"), (
        "its size is what it is refused for"
    )
    assert (tmp_path / arguments[-1]).stat().st_size > 100 << 20
    mend()


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
    (run / "journal.jsonl").write_text(
        "".join(row for row in rows if '"step":17' not in row.replace(" ", ""))
    )


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (other_bytes, "bytes: the last checkpoint has others than an undisturbed run: model.safetensors"),
        (lost_step, "history: 1 steps have no row: [17]"), (doubled_step, "history: rows stand twice: [17]"),
        (other_loss, "history: (1, 1, 'metrics'"), (no_checkpoint, "there is no checkpoint of step 24"),
        (flipped, "bytes: the last checkpoint does not verify"), (wrong_count, "outcome: applied is 20"),
    ],
)  # fmt: skip
def test_a_wrong_end_is_seen(
    whole: Path, tmp_path: Path, plant: Callable[[Path], None], said: str
) -> None:
    run = tmp_path / "r"
    shutil.copytree(whole, run)
    assert compare(run, whole, 24) == ""
    plant(run)
    assert said in compare(run, whole, 24)


EVENT = {"kind": "event", "step": 24, "attempt": 1, "time": 1.0}


def append(run: Path, **row: Any) -> None:
    with (run / "journal.jsonl").open("ab") as file:
        file.write(encode({**EVENT, **row}))


@pytest.mark.slow
@pytest.mark.parametrize("plant", [lost_step, doubled_step, other_loss])
def test_rows_that_were_altered_may_differ_and_no_others(
    whole: Path, tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    run, rows = tmp_path / "r", Rows()
    shutil.copytree(whole, run)
    before = figures(run)
    plant(run)
    rows.change(before, figures(run))
    assert compare(run, whole, 24, rows) == ""
    assert compare(run, whole, 24, Rows()), "nobody altered anything"
    other_loss(run) if plant is not other_loss else lost_step(run)
    assert "history: " in compare(run, whole, 24, rows), "more than was altered"


@pytest.mark.slow
def test_a_row_that_was_spoiled_may_come_back_in_another_place(whole: Path, tmp_path: Path) -> None:
    """One after the last save is done again; the rows behind it stand, and are not written again."""
    run, rows = tmp_path / "r", Rows()
    shutil.copytree(whole, run)
    before = figures(run)
    lines = (run / "journal.jsonl").read_text().splitlines(keepends=True)
    spoiled = next(line for line in lines if line.startswith('{"kind": "metrics", "step": 17,'))
    (run / "journal.jsonl").write_text("".join(line for line in lines if line != spoiled))
    rows.change(before, figures(run))
    with (run / "journal.jsonl").open("a") as file:
        file.write(spoiled)
    assert compare(run, whole, 24, rows) == ""
    assert compare(run, whole, 24, Rows()).startswith("history: "), "nobody altered it"


@pytest.mark.slow
def test_a_rollback_to_an_older_checkpoint_is_compared_beyond_it(
    whole: Path, tmp_path: Path
) -> None:
    """More is done again, and skipped again: that is in no other row, and no step is taken for lost."""
    run, other = tmp_path / "r", tmp_path / "other"
    for folder, target in ((run, 4), (other, 8)):
        shutil.copytree(whole, folder)
        append(folder, step=20, code="guard.rollback", to_step=target)
    rows = (run / "journal.jsonl").read_text().splitlines(keepends=True)
    (run / "journal.jsonl").write_text(
        "".join(row.replace('"guard/skipped": 0', '"guard/skipped": 1') for row in rows)
    )
    assert figures(run) != figures(other)
    assert compare(run, other, 24) == ""
    kept = (run / "journal.jsonl").read_text()
    other_loss(run)
    assert compare(run, other, 24).startswith("history: (1, 1, 'metrics'")
    lines = [row for row in kept.splitlines(keepends=True) if '"step": 6,' not in row]
    (run / "journal.jsonl").write_text("".join(lines))
    assert compare(run, other, 24).startswith("history: 1 steps have no row: [6]")


@pytest.mark.slow
def test_steps_before_a_lost_target_are_done_again_as_they_were(
    whole: Path, tmp_path: Path
) -> None:
    """The checkpoint that a rollback went back to is lost, and the attempt after it goes on from an older one."""
    run, other = tmp_path / "r", tmp_path / "other"
    for folder in (run, other):
        shutil.copytree(whole, folder)
        append(folder, step=20, code="guard.rollback", to_step=8)
    append(run, step=6, attempt=2, code="run.resumed")
    rows = (run / "journal.jsonl").read_text().splitlines(keepends=True)
    again = [row for row in rows if re.match(r'{"kind": "metrics", "step": [78],', row)]
    text = "".join(rows + [row.replace('"attempt": 1', '"attempt": 2') for row in again])
    (run / "journal.jsonl").write_text(text)
    assert len(again) == 2
    assert figures(run) != figures(other)
    assert compare(run, other, 24) == ""
    before, name, after = text.rpartition('"Loss/train": ')
    (run / "journal.jsonl").write_text(f"{before}{name}1{after}")
    assert compare(run, other, 24).startswith("history: ")


@pytest.mark.parametrize("lossy", [True, False])
def test_a_row_may_be_gone_where_the_disk_refused_some(tmp_path: Path, lossy: bool) -> None:
    """Steps 3 and 4 are done twice: that the first row of step 4 is gone shows in no step without a row."""
    runs = tmp_path / "run", tmp_path / "other"
    for run in runs:
        run.mkdir()
        outcome = {"status": "done", "step": 6, "applied": 6, "skipped": 0, "val_loss": 1.0}
        (run / "outcome.json").write_text(json.dumps(outcome))
        for attempt, steps in ((1, range(1, 5)), (2, range(3, 7))):
            for step in steps:
                if (attempt, step, run) != (1, 4, runs[0]):
                    append(
                        run,
                        kind="metrics",
                        step=step,
                        attempt=attempt,
                        metrics={"train/loss": float(step)},
                    )
            if attempt == 1:
                append(run, code="guard.rollback", step=4, to_step=2)
    found = compare_history(*runs, 6, Rows(lossy=lossy))
    assert (found == "") == lossy, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "touched", "past"),
    [
        ("data.source", "data", Episode("files")), ("data.source", "", Episode("changed", change="text")),
        ("fp8.no_table", "", Episode("disk")), ("resume.mismatch", "journal.jsonl", Episode("files")),
    ],
)  # fmt: skip
def test_what_is_told_of_a_file_was_done_to_it(
    whole: Path, tmp_path: Path, code: str, touched: str, past: Episode
) -> None:
    sequence = sequence_of(whole, tmp_path)
    append(sequence.run, code=code, text="x")
    assert compare(sequence.run, whole, 24) == "", "it is no figure of a step"
    with pytest.raises(Finding, match=f"false alarm: nobody did that, and the run says {code}"):
        sequence._alarms()
    sequence.past.append(past)
    sequence.damage.touched |= {touched}
    sequence.rows.lossy = past.family == "disk"
    sequence._alarms()


@pytest.mark.slow
def test_a_text_is_the_runs_own_once_a_checkpoint_is_bound_to_it(
    whole: Path, tmp_path: Path
) -> None:
    sequence = sequence_of(whole, tmp_path)
    assert not sequence._takes_the_text()
    assert sequence.damage.apply({"what": "data", "how": "cut", "seed": 0})
    assert not sequence._takes_the_text(), "it is refused"
    shutil.rmtree(sequence.run / "checkpoints")
    assert sequence._takes_the_text()


def sequence_of(whole: Path, folder: Path) -> _Sequence:
    """One whose run has gone through."""
    field = Field(folder)
    field._undisturbed["plain", "python", False] = whole
    sequence = _Sequence(field, draw(0, ["kill"], "python"), folder / "one")
    sequence.attack.variant = "plain"
    shutil.copytree(whole, sequence.run)
    return sequence


def judge(
    whole: Path,
    folder: Path,
    codes: list[int],
    told: str,
    outcome: dict[str, Any],
    may: list[int],
    lost: str = "",
) -> None:
    """What the oracle makes of one end of a run. lost: of what was deleted before it."""
    sequence = sequence_of(whole, folder)
    if outcome:
        (sequence.run / "outcome.json").write_text(json.dumps(outcome))
    if lost:
        sequence.damage.apply({"what": lost, "how": "delete", "seed": 0})
    sequence.before = contents(sequence.run)
    sequence._judge(Episode("kill", may=may), Ended(codes, told, 1.0))


STOPPED = {"status": "stopped", "exit_code": 75, "reason": "SIGTERM", "step": 20}


@pytest.mark.slow
def test_a_second_start_that_went_on_has_the_last_word(whole: Path, tmp_path: Path) -> None:
    for number, (codes, outcome, said) in enumerate(
        (([0], {}, ""), ([0], STOPPED, "claim: "), ([2], {}, "exit code"))
    ):
        sequence = sequence_of(whole, tmp_path / f"{number}")
        if outcome:
            (sequence.run / "outcome.json").write_text(json.dumps(outcome))
        told = "error: another process is writing this run" if codes == [2] else ""
        ended = Ended([75], "", 1.0, others=[Ended(codes, told, 1.0)])
        if not said:
            sequence._judge(Episode("writers", may=[75]), ended)
            continue
        with pytest.raises(Finding, match=said):
            sequence._judge(Episode("writers", may=[75]), ended)


@pytest.mark.slow
def test_a_rank_killed_before_its_first_line_is_a_rank_that_died(
    whole: Path, tmp_path: Path
) -> None:
    sequence = sequence_of(whole, tmp_path)
    sequence.attack.kind = "torchrun"
    events = [{"at": "begin", "do": ["signal", "SIGTERM"], "rank": rank} for rank in (0, 1)]
    both = Episode("signals", events=events, may=[75])
    told = "launch/train.py FAILED: failed\na rank died while the others started (out of memory?): exit 1, not 75"
    sequence._judge(both, Ended([1], told, 1.0, fired=["0"]))
    for fired, said in ((["0", "1"], told), (["0"], "failed")):
        with pytest.raises(Finding, match="exit code: 1"):
            sequence._judge(both, Ended([1], said, 1.0, fired=fired))


@pytest.mark.slow
def test_true_ends_are_taken(whole: Path, tmp_path: Path) -> None:
    for number, end in enumerate(
        (([0], "", {}, []), ([75], "", STOPPED, [75]), ([-9], "", {}, [-9]))
    ):
        judge(whole, tmp_path / f"{number}", *end)


@pytest.mark.slow
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
        ([3], "", {"exit_code": 3, "reason": "no checkpoint is good yet"}, [3], "exit code: 3, and nothing that was"),
        ([3], "", {}, [3], "exit code: .3., and outcome.json says"),
    ],
)  # fmt: skip
def test_an_end_that_is_not_true_is_seen(
    whole: Path,
    tmp_path: Path,
    codes: list[int],
    told: str,
    outcome: dict[str, Any],
    may: list[int],
    said: str,
) -> None:
    with pytest.raises(Finding, match=said.replace("(", r"\(")):
        judge(whole, tmp_path, codes, told, outcome, may)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "told", "said"),
    [
        ("good.json", "error: runs/r/checkpoints/good.json: is damaged\n    fix: b", ""),
        (
            "good.json",
            "data good.json\nerror: runs/r/plan.json: is damaged\n    fix: b",
            "refused for another reason",
        ),
        (
            "checkpoint",
            "error: runs/r/checkpoints: something\n    fix: b",
            "refused for another reason",
        ),
        ("checkpoint", "error: runs/r/checkpoints: step-00000024 is damaged\n    fix: b", ""),
    ],
)
def test_a_refusal_names_what_was_touched(
    whole: Path, tmp_path: Path, lost: str, told: str, said: str
) -> None:
    if not said:
        judge(whole, tmp_path, [2], told, {}, [], lost)
        return
    with pytest.raises(Finding, match=said):
        judge(whole, tmp_path, [2], told, {}, [], lost)


def test_a_launchers_own_traceback_is_no_finding() -> None:
    launchers = "Traceback (most recent call last):\n  File torch/run.py\n"
    launchers += "torch.ChildFailedError: \nlaunch/train.py FAILED"
    ours = f"Traceback (most recent call last):\n  File {ROOT}/harness/cli.py\nKeyError: 1\n"
    assert traceback(launchers, "torchrun") == ""
    assert traceback(launchers, "python")
    assert traceback(launchers + ours, "torchrun") == "KeyError: 1"


def test_figures_of_one_kind_are_one_row() -> None:
    def trials(what: str, n: int, test: str = "a.py::x") -> dict[str, Any]:
        return {
            "row": 1,
            "what": what,
            "value": [n, n],
            "n": 0,
            "target": "all",
            "test": f"{test}[{n}]",
        }

    rows = merged([trials("bf16: runs that end", 5), trials("fp32: runs that end", 50), trials("kills", 25),
                   trials("kills", 1000), trials("kills", 7, "b.py::y")])  # fmt: skip
    assert [(row["what"], row["value"]) for row in rows] == [
        ("runs that end (bf16 5, fp32 50)", [55, 55]), ("kills", [1000, 1000]), ("kills", [7, 7]),
    ]  # fmt: skip


def test_figures_that_share_a_side_of_the_colon_are_one_line() -> None:
    told = [
        ("a save, killed: two load", [19, 19], "a.py::x[1]"),
        ("a repair, killed: two load", [21, 21], "tests/faults/b.py::y"),
        ("alone: others load", "3 s", "a.py::x"),
        ("longest end: torchrun", "0.9 s", "a.py::z"),
        ("longest end: deepspeed", "1.7 s", "a.py::z"),
    ]
    page = figures_table(
        [
            {"row": 1, "what": what, "value": value, "n": 0, "target": "", "test": test}
            for what, value, test in told
        ]
    )
    assert page.splitlines()[-3:] == [
        "| 1 | two load | a repair, killed: 21 of 21 (13.29%)<br>a save, killed: 19 of 19 (14.59%) "
        "| `b.py::y`<br>`a.py::x` |",
        "| 1 | alone: others load | 3 s | `a.py::x` |",
        "| 1 | longest end | deepspeed: 1.7 s<br>torchrun: 0.9 s | `a.py::z` |",
    ]


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
    ends = [("a", "finding", "bytes: x"), ("b", "same", ""), ("b", "void", "the attack was wrong")]
    told = attacks(
        [
            {**line, "commit": commit, "result": result, "finding": text}
            for commit, result, text in ends
        ]
    )
    assert (
        "2 sequences of 4 faults, at 2 commits, the last of them b: python 2. Not counted: 1 in"
        in told
    )
    assert "| kill | SIGKILL: after a step, " in told
    assert "| 1 | 0 | 0 | 1 |" in told
    assert " | 2 | 1 | 1 (95.0%) |" in told
    assert "1 different wrong ends and gaps were found. Each was fixed" in told
    assert "| bytes: x |" not in told
    still = attacks([{**line, "commit": "c", "result": "finding", "finding": "bytes: x"}])
    assert "| bytes: x | `--seed=1` | c | open |" in still
