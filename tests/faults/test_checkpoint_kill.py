"""Kill, or refuse the disk to, a save, a retention, a rollback or a repair at every file call it makes.

After each: what verifies is what was saved, the newest whole checkpoint is found, and doing it again works.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
REFUSED = 3
KILLS = int(os.environ.get("FAULTS_RANDOM_KILLS", "1000"))
ALL = [10, 20, 30, 40, 50]
SWEEPS = [
    "save:kill",
    "save:full",
    "save:once",
    "prune:kill",
    "discard:kill",
    "discard:full",
    "discard:once",
    "resave:kill",
    "quarantine:kill",
    "rank0:kill",
    "rank0:full",
    "rank1:kill",
    "rank1:full",
    "rank1:once",
]


WHAT = {
    "save": (1, "a save"),
    "prune": (2, "a retention"),
    "discard": (2, "a rollback"),
    "resave": (1, "a save over a damaged checkpoint"),
    "quarantine": (4, "setting a damaged checkpoint aside"),
    "rank0": (1, "rank 0 in a save by two ranks"),
    "rank1": (1, "rank 1 in a save by two ranks"),
}
HOW = {"kill": "killed", "full": "disk full from there on", "once": "an I/O error"}


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of every sweep: one process runs them all."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, (
        "no cc, gcc or clang to build the fault injector with: install one (apt-get install gcc)"
    )
    folder = tmp_path_factory.mktemp("sweeps")
    library = folder / "inject.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", library, HERE / "inject.c", "-ldl"], check=True
    )
    return drive(library, folder, *SWEEPS)


def drive(injector: Path | None, scratch: Path, *tasks: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if injector is not None:
        environment["LD_PRELOAD"] = str(injector)
    command = [
        sys.executable,
        str(HERE / "checkpoint_driver.py"),
        str(injector),
        str(scratch),
        *tasks,
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def swept(
    sweeps: dict[str, Any], figure: Callable[..., None], scenario: str, mode: str, at_least: int
) -> list[dict[str, Any]]:
    """The results in which the fault fired, checked for what must always hold."""
    row, what = WHAT[scenario]
    *hit, last = sweeps[f"{scenario}:{mode}"]
    assert (last["killed"], last["exit"], last["fired"]) == (False, 0, 0)
    assert len(hit) >= at_least
    for result in hit:
        assert result["killed"] if mode == "kill" else result["fired"]
        for seen in (result, result["again"]):
            assert seen["wrong"] == []
            assert len(seen["valid"]) >= 2
            assert seen["newest"] == seen["valid"][-1]
            assert not [name for name in seen["names"] if name.startswith(".tmp")]
        assert result["again"]["valid"] == last["valid"]
    figure(
        row if mode == "kill" else 3,
        f"{what}, {HOW[mode]}: file calls after which the newest whole checkpoint loads, two verify",
        (len(hit), len(hit)),
        target="all",
    )
    return hit


@pytest.mark.faults(1)
def test_a_save_killed_at_any_call_leaves_the_checkpoints_before_it(
    sweeps: dict[str, Any], figure: Callable[..., None]
) -> None:
    results = swept(sweeps, figure, "save", "kill", at_least=12)
    assert {tuple(result["valid"]) for result in results} == {tuple(ALL), (*ALL, 60)}
    assert any(".tmp-step-00000060" in result["before"] for result in results)


@pytest.mark.faults(3)
@pytest.mark.parametrize("mode", ["full", "once"])
def test_a_save_that_the_disk_refuses_is_an_error_and_leaves_nothing(
    sweeps: dict[str, Any], figure: Callable[..., None], mode: str
) -> None:
    results = swept(sweeps, figure, "save", mode, at_least=12)
    for result in results:
        assert result["valid"][:5] == ALL
        assert not [name for name in result["before"] if name.startswith(".tmp")]
        assert result["exit"] == REFUSED or (result["exit"] == 0 and 60 in result["valid"])
    assert sum(result["exit"] == REFUSED for result in results) >= len(results) - 1


@pytest.mark.faults(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_at_any_call_of_a_save_by_two_leaves_the_old_or_the_new(
    sweeps: dict[str, Any], figure: Callable[..., None], rank: int
) -> None:
    results = swept(sweeps, figure, f"rank{rank}", "kill", at_least=20 if rank == 0 else 10)
    kept = {tuple(result["valid"]) for result in results}
    # Rank 1 does nothing after the last word that rank 0 waits for.
    assert kept == ({(40, 50), (40, 50, 60)} if rank == 0 else {(40, 50)})
    for result in results:
        if rank == 1:
            assert result["lead"] == REFUSED
            assert not [name for name in result["before"] if name.startswith(".tmp")]


@pytest.mark.faults(3)
@pytest.mark.parametrize(("rank", "mode"), [(0, "full"), (1, "full"), (1, "once")])
def test_a_save_by_two_that_the_disk_of_one_refuses_is_an_error_and_leaves_nothing(
    sweeps: dict[str, Any], figure: Callable[..., None], rank: int, mode: str
) -> None:
    results = swept(sweeps, figure, f"rank{rank}", mode, at_least=20 if rank == 0 else 10)
    for result in results:
        assert result["valid"][:2] == [40, 50]
        assert not [name for name in result["before"] if name.startswith(".tmp")]
        assert result["lead"] == REFUSED or (result["lead"] == 0 and 60 in result["valid"])
    assert sum(result["lead"] == REFUSED for result in results) >= len(results) - 3


@pytest.mark.faults(2)
def test_a_retention_killed_at_any_call_deletes_only_what_it_may(
    sweeps: dict[str, Any], figure: Callable[..., None]
) -> None:
    results = swept(sweeps, figure, "prune", "kill", at_least=8)
    assert all({20, 40, 50} <= set(result["valid"]) for result in results)
    assert {len(result["valid"]) for result in results} == {3, 4, 5}
    for result in results:
        assert [name for name in result["names"] if name.startswith("step-")] == [
            f"step-{step:08d}" for step in result["valid"]
        ]
    assert all(
        result["names"][-1] == "step-00000050" and "good.json" in result["names"]
        for result in results
    )


@pytest.mark.faults(2)
def test_a_rollback_killed_at_any_call_is_done_or_not_begun(
    sweeps: dict[str, Any], figure: Callable[..., None]
) -> None:
    results = swept(sweeps, figure, "discard", "kill", at_least=6)
    assert {tuple(result["valid"]) for result in results} == {tuple(ALL), (10, 20)}
    partly = [
        result
        for result in results
        if 0 < sum(name.startswith("rolledback") for name in result["before"]) < 3
    ]
    assert partly
    assert all(result["valid"] == [10, 20] for result in partly)
    for result in results:
        assert sum("step-" in name for name in result["names"]) == 5


@pytest.mark.faults(2, 3)
@pytest.mark.parametrize("mode", ["full", "once"])
def test_a_rollback_that_the_disk_refuses_is_an_error(
    sweeps: dict[str, Any], figure: Callable[..., None], mode: str
) -> None:
    results = swept(sweeps, figure, "discard", mode, at_least=6)
    assert {tuple(result["valid"]) for result in results} == {tuple(ALL), (10, 20)}
    assert sum(result["exit"] == REFUSED for result in results) >= len(results) - 1


@pytest.mark.faults(1, 4)
@pytest.mark.parametrize("scenario", ["resave", "quarantine"])
def test_a_repair_killed_at_any_call_overwrites_nothing(
    sweeps: dict[str, Any], figure: Callable[..., None], scenario: str
) -> None:
    results = swept(sweeps, figure, scenario, "kill", at_least=2)
    for result in results:
        assert result["valid"][:4] == ALL[:4]
        assert [name for name in result["names"] if name.startswith("quarantine")] == [
            "quarantine-step-00000050-1"
        ]


@pytest.mark.faults(1, 2)
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(25, marks=pytest.mark.nightly),
        pytest.param(KILLS, marks=(pytest.mark.slow, pytest.mark.attack)),
    ],
)
def test_random_kills_of_a_process_that_saves_and_prunes(
    tmp_path: Path, figure: Callable[..., None], kills: int
) -> None:
    results = drive(None, tmp_path, f"random:{kills}")[f"random:{kills}"]
    assert len(results) == kills
    newest = [result["newest"] or 0 for result in results]
    assert newest == sorted(newest)
    assert newest[-1] > newest[0]
    saved = False
    for result in results:
        assert result["killed"]
        assert result["wrong"] == []
        assert len(result["valid"]) >= 2 or not saved
        saved = saved or len(result["valid"]) >= 2
    assert any(".tmp-" in name for result in results for name in result["before"])
    whole = sum(
        not result["wrong"] and (len(result["valid"]) >= 2 or not index)
        for index, result in enumerate(results)
    )
    figure(1, "random kills of a process that keeps saving and deleting: at least two checkpoints load",
           (whole, kills), target="all")  # fmt: skip


@pytest.mark.faults(3)
def test_a_save_over_the_file_size_limit_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    result = drive(None, tmp_path, "limit:")["limit:"]
    assert result["exit"] == REFUSED
    assert result["before"] == ["step-00000010"]
    assert (result["newest"], result["valid"], result["wrong"]) == (10, [10], [])
