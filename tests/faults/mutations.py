"""Take each protection away and see that a test notices: `make mutations`.

    python tests/faults/mutations.py [--only WORD] [--list]

Every mutation replaces a text that is in one place, in a copy of the tree. The tests named must pass without it and
fail with it. Exit code 1 if one does not.
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


def copy_tree(target: Path) -> None:
    """The tree without what is not part of it."""
    skip = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis")
    shutil.copytree(ROOT, target, ignore=skip, symlinks=True)


def passes(tree: Path, test: str) -> tuple[bool, str]:
    """Whether the tests pass in `tree`, and the last lines they printed; slow ones only if there are no others."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *test.split()]
    for only in (["-m", "not slow"], []):
        done = subprocess.run(
            [*command, *only], cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS,
            check=False,
        )  # fmt: skip
        if done.returncode != NOTHING_RUN:
            break
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.returncode == 0, done.stdout[-600:]


def noticed(mutation: Mutation) -> str:
    """Empty if the tests notice the mutation, else what went wrong."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        sources = texts(tree)
        found = places(sources, mutation.old)
        if len(found) != 1:
            return f"its text is in {len(found)} places: {', '.join(str(each.relative_to(tree)) for each in found)}"
        good, told = passes(tree, mutation.test)
        if not good:
            return f"fails without the mutation: {told}"
        found[0].write_text(sources[found[0]].replace(mutation.old, mutation.new))
        return "the tests still pass" if passes(tree, mutation.test)[0] else ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutations whose protection or test has this in it")
    parser.add_argument("--list", action="store_true", help="print them and stop")
    given = parser.parse_args(arguments)
    chosen = [each for each in MUTATIONS if given.only in f"{each.protection} {each.test}"]
    failures = 0
    for mutation in chosen:
        line = f"row {mutation.row:>2}  {mutation.protection}"
        if given.list:
            print(f"{line}  ({mutation.test})")
            continue
        began = time.monotonic()
        problem = noticed(mutation)
        failures += bool(problem)
        print(f"{line}: {problem or 'noticed'} ({time.monotonic() - began:.0f} s)", flush=True)
    if not given.list:
        print(f"{len(chosen) - failures} of {len(chosen)} mutations noticed")
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
