"""A standing enemy: random sequences of faults against tiny runs, for so many minutes: `make attack`.

    python tests/faults/attack.py --minutes 20 --seed 1000
    python tests/faults/attack.py --seed 1234 --count 1           a failure again, as it was printed
    python tests/faults/attack.py --open                          all failures of the ledger again, as they were

Every sequence is drawn from its seed alone (attack_plans), carried out and judged (attack_run). One line for each goes
into the ledger, whose sums are in docs/studies/reliability.md. Exit code 1 if something was found that is not known.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

from attack_plans import FAMILIES, KINDS, Attack, Episode, draw  # noqa: E402
from reliability_page import commit  # noqa: E402

LEDGER = HERE / "attack_ledger.jsonl"
RESULTS: tuple[str, ...] = ("same", "refused", "finding")


def main() -> int:
    """The command line. A line of the ledger may be "known" too: a gap that was open when it was written."""
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--minutes", type=float, default=20.0)
    words.add_argument(
        "--seed",
        type=int,
        help="of the first sequence, the next ones follow [default: one not tried]",
    )
    words.add_argument("--count", type=int, default=0, help="sequences, instead of minutes")
    words.add_argument("--family", action="append", default=[], help="only these")
    words.add_argument("--kind", default="", help=", ".join(KINDS))
    words.add_argument("--each", action="store_true", help="one sequence of each family")
    words.add_argument(
        "--open", action="store_true", help="again what the ledger has as found or known, as it was"
    )
    words.add_argument("--ledger", type=Path, default=LEDGER)
    words.add_argument("--no-ledger", action="store_true")
    words.add_argument(
        "--no-page", action="store_true", help="leave docs/studies/reliability.md as it is"
    )
    words.add_argument(
        "--work", type=Path, help="folder for what the sequences leave, kept where one fails"
    )
    given = words.parse_args()
    work = given.work or Path(tempfile.mkdtemp(prefix="attack-"))
    work.mkdir(parents=True, exist_ok=True)

    from attack_damage import preload

    os.environ["LD_PRELOAD"] = preload(work, HERE)  # before the warm processes' server starts
    os.environ["OMP_NUM_THREADS"] = "1"
    from attack_field import Field
    from attack_run import attack_once

    began, head, sums = time.monotonic(), commit(), dict.fromkeys(RESULTS, 0)
    with Field(work) as field:
        for attack, name in attacks(given):
            result = attack_once(field, attack)
            sums[result.result] += 1
            faults = sum(each.count() for each in attack.episodes) - result.missed
            print(f"seed {attack.seed}  {attack.kind}, {attack.variant}: {', '.join(attack.families)}: {result.result}"
                  f" ({faults} faults, {result.starts} starts, {result.seconds:.1f} s)", flush=True)  # fmt: skip
            if result.finding:
                tell(attack, result.finding, result.log, work, name["again"])
            if not given.no_ledger:
                line = {
                    "seed": attack.seed,
                    **name,
                    "commit": head,
                    "kind": attack.kind,
                    "families": attack.families,
                }
                line |= {"faults": faults, "result": result.result, "finding": result.finding[:300]}
                if changes := [each.change for each in attack.episodes if each.change]:
                    line["changes"] = changes
                append(given.ledger, line | ({"attack": asdict(attack)} if result.finding else {}))
            if not given.count and not given.each and time.monotonic() - began > 60 * given.minutes:
                break
    print(f"{sum(sums.values())} sequences: {', '.join(f'{n} {name}' for name, n in sums.items())}")
    if not (given.no_ledger or given.no_page):
        page = [
            str(HERE / "reliability_page.py"),
            str(ROOT / "docs" / "studies" / "reliability.md"),
        ]
        subprocess.run([sys.executable, *page], check=True)
    return 1 if sums["finding"] else 0


def attacks(given: argparse.Namespace) -> Iterator[tuple[Attack, dict[str, str]]]:
    """What is to be carried out, each with what it is called: arguments that draw it, by plans of that hash."""
    if given.open:
        last = {(line["again"], line["plans"]): line for line in read(given.ledger)}
        for (again, plans), line in last.items():
            if line["result"] in ("known", "finding"):
                kept = line["attack"]
                episodes = [Episode(**each) for each in kept["episodes"]]
                yield Attack(**{**kept, "episodes": episodes}), {"again": again, "plans": plans}
        return
    plans = hashlib.sha256((HERE / "attack_plans.py").read_bytes()).hexdigest()[:8]
    first = (
        max((line["seed"] for line in read(given.ledger)), default=-1) + 1
        if given.seed is None
        else given.seed
    )
    wanted = [[name] for name in FAMILIES] if given.each else []
    count = given.count or len(wanted)
    for number in range(count) if count else itertools.count():
        only = wanted[number] if wanted else given.family
        words = [f"--seed={first + number}", "--count=1", *(f"--family={name}" for name in only)]
        again = shlex.join([*words, *([f"--kind={given.kind}"] if given.kind else [])])
        yield draw(first + number, only, given.kind), {"again": again, "plans": plans}


def read(ledger: Path) -> list[dict[str, Any]]:
    """Its lines, oldest first."""
    return [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []


def append(ledger: Path, line: Mapping[str, Any]) -> None:
    with ledger.open("a") as file:
        file.write(json.dumps(line) + "\n")


def tell(attack: Attack, finding: str, log: list[str], work: Path, again: str) -> None:
    """A failure, so that it can be repeated: its seed, all that was done, and what came of it."""
    print(f"  FOUND {finding}")
    for each in attack.episodes:
        print(f"    {json.dumps({key: value for key, value in asdict(each).items() if value})}")
    for line in log:
        print(f"    {line}")
    print(
        f"    left in {work / f'seed-{attack.seed}'}; again: make attack ARGS={shlex.quote(again)}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
