"""Removes each protection in turn and checks that a test notices: `make mutations`.

    python tests/faults/mutations.py [--only WORD] [--list]

Each mutation replaces one text in a copy of the tree. Its tests must pass without the mutation and fail with it. Its
slow and nightly tests run only if the quick ones do not notice. The exit code is 1 if any mutation is not noticed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mutation import Mutation, places, texts
from mutation_list import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 600
NOTHING_RUN = 5
MARKS = ("not slow and not nightly", "slow or nightly")


def copy_tree(target: Path) -> None:
    """Copy the project's tree, without the environment, runs and caches."""
    skip = shutil.ignore_patterns(
        ".git", ".venv", "runs", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis"
    )
    shutil.copytree(ROOT, target, ignore=skip, symlinks=True)


def passes(tree: Path, test: str, marks: str) -> tuple[bool, str] | None:
    """Whether the tests with these marks pass in `tree`, and the last lines of their output; None if there are none.

    Raises RuntimeError if pytest itself failed.
    """
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += [*test.split(), "-m", marks]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False, f"not over in {LIMIT_SECONDS} s"
    if done.returncode == NOTHING_RUN:
        return None
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.returncode == 0, done.stdout[-600:]


class Copy:
    """A copy of the tree in which one protection after another is removed. Each is restored before the next."""

    def __init__(self, folder: Path) -> None:
        self._tree = folder / "tree"
        copy_tree(self._tree)
        self._sources = texts(self._tree)
        self._changes = 0
        self._unchanged: dict[tuple[str, str], tuple[bool, str] | None] = {}

    def noticed(self, mutation: Mutation) -> str:
        """Empty if the tests notice the mutation, else what went wrong."""
        found = places(self._sources, mutation.old)
        if len(found) != 1:
            names = [str(each.relative_to(self._tree)) for each in found]
            return f"its text is in {len(found)} places: {', '.join(names)}"
        source = self._sources[found[0]]
        ran = False
        for marks in MARKS:
            key = (mutation.test, marks)
            if key not in self._unchanged:
                self._unchanged[key] = passes(self._tree, *key)
            before = self._unchanged[key]
            if before is None:
                continue
            ran = True
            if not before[0]:
                return f"fails without the mutation: {before[1]}"
            self._write(found[0], source.replace(mutation.old, mutation.new))
            try:
                after = passes(self._tree, *key)
            finally:
                self._write(found[0], source)
            if after is None:
                return "with the mutation no test is collected"
            if not after[0]:
                return ""
        return "the tests still pass" if ran else f"no test was collected: {mutation.test}"

    def _write(self, path: Path, text: str) -> None:
        """Write `text` with a modification time of its own.

        Python reuses compiled code for a source of the same time (in seconds) and length.
        """
        self._changes += 1
        path.write_text(text)
        second = int(path.stat().st_mtime) + self._changes
        os.utime(path, (second, second))


def judged(mutations: Sequence[Mutation]) -> int:
    """Print a line for each mutation. Returns how many were not noticed."""
    failures = 0
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Copy(Path(folder))
        for mutation in mutations:
            began = time.monotonic()
            try:
                problem = copy.noticed(mutation)
            except RuntimeError as error:
                problem = f"cannot be judged: {error}"
            failures += bool(problem)
            seconds = time.monotonic() - began
            verdict = f"{problem or 'noticed'} ({seconds:.0f} s)"
            print(f"row {mutation.row:>2}  {mutation.protection}: {verdict}", flush=True)
    return failures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="only mutations whose protection or test contains this"
    )
    parser.add_argument("--list", action="store_true", help="print them and stop")
    given = parser.parse_args(arguments)
    chosen = [each for each in MUTATIONS if given.only in f"{each.protection} {each.test}"]
    if given.list:
        for each in chosen:
            print(f"row {each.row:>2}  {each.protection}  ({each.test})")
        return 0
    failures = judged(chosen)
    print(f"{len(chosen) - failures} of {len(chosen)} mutations noticed")
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
