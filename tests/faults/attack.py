"""A standing enemy: random sequences of faults against tiny runs, for so many minutes: `make attack`.

    python tests/faults/attack.py --minutes 20 --seed 1000
    python tests/faults/attack.py --seed 1234 --count 1           a failure again, as it was printed

Every sequence is drawn from its seed alone (attack_plans), carried out and judged (attack_run). One line for each goes
into the ledger, whose sums are in docs/reliability.md. Exit code 1 if something was found that is not known.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

LEDGER = HERE / "attack_ledger.jsonl"
RESULTS: tuple[str, ...] = ("same", "refused", "known", "finding")


def commit() -> str:
    """Of the harness that was attacked; a + where it has changes that are not committed."""
    head = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    changed = subprocess.run(
        ["git", "status", "--porcelain", "harness"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return (head.stdout.strip() or "unknown") + ("+" if changed.stdout.strip() else "")


def known(attack: Any, finding: str) -> str:
    """The open issue that a finding belongs to; empty if it is new."""
    touched = json.dumps([asdict(each) for each in attack.episodes])
    journals = "journal.jsonl" in touched or "power" in touched or "all but checkpoints" in touched
    if journals and finding.startswith("outcome: "):
        return "an outcome counts rows of a journal that was cut, deleted or doubled"
    return ""


def main() -> int:
    """The command line."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--minutes", type=float, default=20.0)
    words.add_argument(
        "--seed", type=int, help="of the first sequence; the next ones follow [default: after the ledger's]"
    )
    words.add_argument("--count", type=int, default=0, help="sequences, instead of minutes")
    words.add_argument("--family", action="append", default=[], help="only these")
    words.add_argument("--each", action="store_true", help="one sequence of each family")
    words.add_argument("--kind", default="", help="python, torchrun ranks, deepspeed ranks, torchrun or deepspeed")
    words.add_argument("--ledger", type=Path, default=LEDGER)
    words.add_argument("--no-ledger", action="store_true")
    words.add_argument("--no-page", action="store_true", help="leave docs/reliability.md as it is")
    words.add_argument("--work", type=Path, help="folder for what the sequences leave, kept where one fails")
    given = words.parse_args()
    work = given.work or Path(tempfile.mkdtemp(prefix="attack-"))
    work.mkdir(parents=True, exist_ok=True)

    from attack_damage import preload

    os.environ["LD_PRELOAD"] = preload(work, HERE)  # before the warm processes' server starts
    os.environ["OMP_NUM_THREADS"] = "1"
    from attack_plans import FAMILIES, draw
    from attack_run import Field

    began, head, sums = time.monotonic(), commit(), dict.fromkeys(RESULTS, 0)
    plans = hashlib.sha256((HERE / "attack_plans.py").read_bytes()).hexdigest()[:8]  # by which a seed means something
    first = seed = next_seed(given.ledger) if given.seed is None else given.seed
    wanted = [[name] for name in FAMILIES] if given.each else []
    count = given.count or len(wanted)
    with Field(work) as field:
        while seed - first < count if count else time.monotonic() - began < 60 * given.minutes:
            only = wanted[seed - first] if wanted else given.family
            attack = draw(seed, only, given.kind)
            again = shlex.join([f"--seed={seed}", "--count=1", *(f"--family={name}" for name in only),
                                *([f"--kind={given.kind}"] if given.kind else [])])  # fmt: skip
            result = field.attack(attack)
            reason = known(attack, result.finding) if result.result == "finding" else ""
            if reason:
                result.result = "known"
            sums[result.result] += 1
            faults = sum(each.count() for each in attack.episodes) - result.missed
            print(f"seed {seed}  {attack.kind}, {attack.variant}: {', '.join(attack.families)}: {result.result}"
                  f" ({faults} faults, {result.starts} starts, {result.seconds:.1f} s)", flush=True)  # fmt: skip
            if result.finding:
                tell(attack, result.finding, result.log, work, again)
            if not given.no_ledger:
                line = {
                    "seed": seed,
                    "again": again,
                    "commit": head,
                    "plans": plans,
                    "kind": attack.kind,
                    "families": attack.families,
                }
                ended = {"faults": faults, "result": result.result, "finding": reason or result.finding[:300]}
                append(given.ledger, line | ended)
            seed += 1
    print(f"{seed - first} sequences from seed {first}: {', '.join(f'{n} {name}' for name, n in sums.items())}")
    if not (given.no_ledger or given.no_page):
        subprocess.run(
            [sys.executable, str(HERE / "reliability_page.py"), str(ROOT / "docs" / "reliability.md")], check=True
        )
    return 1 if sums["finding"] else 0


def next_seed(ledger: Path) -> int:
    """One that has not been tried."""
    lines = ledger.read_text().splitlines() if ledger.exists() else []
    return max((json.loads(line)["seed"] for line in lines), default=-1) + 1


def append(ledger: Path, line: Mapping[str, Any]) -> None:
    with ledger.open("a") as file:
        file.write(json.dumps(line) + "\n")


def tell(attack: Any, finding: str, log: list[str], work: Path, again: str) -> None:
    """A failure, so that it can be repeated: its seed, all that was done, and what came of it."""
    print(f"  FOUND {finding}")
    for each in attack.episodes:
        print(f"    {json.dumps({key: value for key, value in asdict(each).items() if value})}")
    for line in log:
        print(f"    {line}")
    print(f"    left in {work / f'seed-{attack.seed}'}; again: make attack ARGS={shlex.quote(again)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
