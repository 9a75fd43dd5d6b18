"""Measures what a real card does with this project: tests, bits, speed and memory.

    python -m benchmarks.proof                      # on a machine with an NVIDIA card, under half an hour
    python -m benchmarks.proof --minutes 10         # as many rows as fit; the first ones tell most
    python -m benchmarks.proof --only gemm native   # some rows
    python -m benchmarks.proof --resume FILE.json   # the rows that have not passed yet in an earlier record
    python -m benchmarks.proof --rehearse           # on a CPU, toy sizes: shows only that the rows run

A proof is a table, and each row answers one question. Each row runs in a process of its own with a time limit. A row
that crashes, hangs or runs out of memory becomes a line with its reason, and the others still run. The proof writes one
JSON file, one Markdown table and, with Transformer Engine, a record of its bits. JSON and table are written after every
row: what a rental's end interrupts goes on with `--resume`, on the same kind of card, with the same code and versions.

Exit codes:
0: all rows that could run passed
1: a row failed, or the proof was interrupted
2: wrong command line, or no folder to write to
4: no usable card
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.proof import page
from benchmarks.proof.children import FIRST, LEAST, ROOT, adopt_orphans, environment, run_row
from benchmarks.proof.registry import BUDGET, ROWS, Row, lacks

MINUTES = BUDGET / 60
PASSED, FAILED, USAGE, NO_CARD = 0, 1, 2, 4
RESULTS = ROOT / "benchmarks" / "results"
REHEARSALS = ROOT / "build"


class Interrupted(BaseException):
    """A signal asked to stop."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    out: Path = options.out or (REHEARSALS if options.rehearse else RESULTS)
    if problem := unwritable(out):
        say(f"proof: {out} cannot be written: {problem}; name another folder with --out")
        return USAGE
    earlier: Mapping[str, Any] = {}
    if options.resume:
        try:
            earlier = page.earlier_record(options.resume, options.rehearse)
        except (OSError, ValueError) as error:
            say(f"proof: {options.resume} cannot be resumed: {error}")
            return USAGE
    kept_rows = {row["name"]: row for row in earlier.get("rows", ()) if row["status"] == "passed"}
    wanted = {"machine", *kept_rows, *(options.only or [row.name for row in ROWS])}
    rows = [row for row in ROWS if row.name in wanted]
    adopt_orphans()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    began = time.monotonic()
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    with tempfile.TemporaryDirectory(prefix="proof-", ignore_cleanup_errors=True) as name:
        work = Path(name)

        def save(outcomes: Sequence[Mapping[str, Any]], complete: bool) -> list[Path]:
            """Write all that there is so far; returns the paths."""
            piece = page.Piece(date, as_command(options), (time.monotonic() - began) / 60)
            outcomes = with_kept(rows, kept_rows, outcomes)
            proof = page.record(
                outcomes,
                rehearsal=options.rehearse,
                complete=complete and len(outcomes) == len(ROWS),
                pieces=[*page.pieces(earlier), piece],
            )
            return write(page.Scrubber().all(proof), out, work / "keep")

        outcomes, complete = ask(
            rows, kept_rows, earlier, options.rehearse, 60 * options.minutes, work, save
        )
        if not outcomes or not usable(outcomes[0], options.rehearse):
            return no_card(outcomes)
        if others := page.differences(earlier, outcomes[0]["figures"]):
            say(
                f"proof: {options.resume} is of another {', '.join(others)}: its rows say nothing here"
            )
            say("  fix: leave --resume out, or run where and with what that record was made")
            return USAGE
        try:
            written = save(outcomes, complete)
        except OSError as error:  # full by now: minutes on a rented card must not be lost for that
            out = Path(tempfile.mkdtemp(prefix="proof-results-"))
            say(f"proof: {error}; the results are in {out}")
            written = save(outcomes, complete)
    failed = [row["name"] for row in outcomes if row["status"] == "failed"]
    farewell(options.rehearse, outcomes, written)
    return FAILED if failed or not complete else PASSED


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.proof",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="on the CPU at toy sizes, whatever card there is"
    )
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"for everything (default {MINUTES:g})"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="ROW", choices=names, help=f"of {', '.join(names)}"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where results go (default benchmarks/results)"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="RECORD",
        help="JSON of an earlier proof: its passed rows are kept, the others run",
    )
    options = parser.parse_args(arguments)
    if not 0 < options.minutes < 24 * 60:
        parser.error("--minutes must be more than 0 and less than a day")
    return options


def as_command(options: argparse.Namespace) -> str:
    """The command that runs the same rows again, without the folders of records."""
    words = ["python -m benchmarks.proof", *(["--rehearse"] if options.rehearse else [])]
    words += [f"--minutes {options.minutes:g}"] if options.minutes != MINUTES else []
    words += ["--only", *options.only] if options.only else []
    return " ".join([*words, *(["--resume", options.resume.name] if options.resume else [])])


def unwritable(folder: Path) -> str:
    """Why the folder cannot be written to; empty if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return str(error.strerror or error)


def ask(
    rows: Sequence[Row],
    kept_rows: Mapping[str, Mapping[str, Any]],
    resumed: Mapping[str, Any],
    rehearsal: bool,
    seconds: float,
    work: Path,
    save: Callable[[Sequence[Mapping[str, Any]], bool], object],
) -> tuple[list[dict[str, Any]], bool]:
    """The rows' outcomes, in order, and whether all rows were started.

    A row may run until the budgets of all rows up to it are used up. So it may use what earlier rows left over. If
    there is less time than all budgets, the first rows have theirs, and the last ones are not started.

    kept_rows: outcomes of the earlier record that stand; the row of the machine always runs.
    resumed: that record. If it is of another machine or code, only the row of the machine is asked.
    save: is given the outcomes after every row.
    """
    keep = work / "keep"
    keep.mkdir()
    environ = environment(work, rehearsal, os.environ)
    began, used = time.monotonic(), 0.0
    to_run = [row for row in rows if row.name == "machine" or row.name not in kept_rows]
    scale = max(1.0, seconds / sum(row.budget for row in to_run))
    outcomes: list[dict[str, Any]] = []
    try:
        for row in rows:
            if outcomes and row.name in kept_rows:
                outcomes.append(dict(kept_rows[row.name]))
                continue
            used = min(seconds, used + scale * row.budget)
            machine = outcomes[0]["figures"] if outcomes else {}
            limit = began + used - time.monotonic()
            reason = lacks(row, machine) if outcomes else ""
            limit = limit if outcomes else max(limit, FIRST)
            if not reason and limit < LEAST:
                reason = f"no time left, the rows before it took theirs: more --minutes, or --only {row.name}"
            if reason:
                outcomes.append(skipped(row, reason))
            else:
                earlier = page.passed(outcomes)
                outcomes.append(
                    run_row(
                        row,
                        limit,
                        work,
                        rehearsal=rehearsal,
                        environ=environ,
                        earlier=earlier,
                        keep=keep,
                    )
                )
            tell(outcomes[-1])
            machine = outcomes[0]["figures"]
            if not usable(outcomes[0], rehearsal) or page.differences(resumed, machine):
                return outcomes, False
            with suppress(OSError):  # a full disk: the end says so, and takes another folder
                save(outcomes, False)
    except (KeyboardInterrupt, Interrupted):
        say("proof: interrupted")
        return outcomes, False
    return outcomes, True


def with_kept(
    rows: Sequence[Row],
    kept_rows: Mapping[str, Mapping[str, Any]],
    outcomes: Sequence[Mapping[str, Any]],
) -> list[Mapping[str, Any]]:
    """The outcomes so far with the kept rows that are still to come, in the order of `rows`.

    A record that is resumed is replaced. If this start is interrupted, what had passed must still be in it.
    """
    found = {**kept_rows, **{outcome["name"]: outcome for outcome in outcomes}}
    return [found[row.name] for row in rows if row.name in found]


def usable(machine: Mapping[str, Any], rehearsal: bool) -> bool:
    """Whether there is a card (or a rehearsal) for the rows after `machine`."""
    return bool(machine["figures"]) and (rehearsal or bool(machine["figures"].get("card")))


def skipped(row: Row, reason: str) -> dict[str, Any]:
    """The outcome of a row that was not started."""
    return {
        "name": row.name,
        "question": row.question,
        "status": "not run",
        "reason": reason,
        "summary": "",
        "figures": {},
        "seconds": 0.0,
    }


def no_card(outcomes: Sequence[Mapping[str, Any]]) -> int:
    """Print why no card can be used."""
    if not outcomes:
        return FAILED
    machine = outcomes[0]
    say("proof: no card that can be used, so there is nothing to prove here")
    say(f"  why: {machine['figures'].get('problem') or machine['reason']}")
    say("  to see that the rows run, on a CPU at toy sizes: python -m benchmarks.proof --rehearse")
    for line in machine.get("log", []):
        say(f"  | {line}")
    return NO_CARD


def write(proof: Mapping[str, Any], out: Path, keep: Path) -> list[Path]:
    """Write the JSON, the table, and the files that rows kept. Returns the paths."""
    machine = next(row["figures"] for row in proof["rows"] if row["name"] == "machine")
    name = page.stem(machine, proof["rehearsal"], proof["complete"])
    written = [out / f"{name}.json", out / f"{name}.md"]
    if proof["complete"] and not proof["rehearsal"]:
        # What `save` wrote while rows were missing.
        partial = page.stem(machine, rehearsal=False, complete=False)
        for ending in ("json", "md"):
            (out / f"{partial}.{ending}").unlink(missing_ok=True)
    written[0].write_text(json.dumps(proof, allow_nan=False, indent=1) + "\n", encoding="utf-8")
    written[1].write_text(page.markdown(proof), encoding="utf-8")
    for path in sorted(keep.glob("*.json")):
        written.append(out / f"{name}_{path.name}")
        kept = page.Scrubber().all(json.loads(path.read_text(encoding="utf-8")))
        written[-1].write_text(json.dumps(kept, allow_nan=False) + "\n", encoding="utf-8")
    return written


def tell(outcome: Mapping[str, Any]) -> None:
    """Print one line when a row ends."""
    said = "; ".join(filter(None, (outcome["reason"], outcome["summary"])))
    say(f"{outcome['name']:17s} {outcome['status']:8s} {outcome['seconds']:5.0f} s  {said}")


def farewell(
    rehearsal: bool, outcomes: Sequence[Mapping[str, Any]], written: Sequence[Path]
) -> None:
    """Print which files there are, and what to do with them."""
    count = {
        status: sum(row["status"] == status for row in outcomes)
        for status in ("passed", "failed", "not run")
    }
    say("")
    say(", ".join(f"{number} {status}" for status, number in count.items()))
    for path in written:
        say(f"  {path}")
    if rehearsal:
        say(page.REHEARSAL)
        return
    say(
        "Host and user names, your folders and identities of the card are taken out of these files; look for yourself."
    )
    say(
        "To share them: commit them on a branch of their own and send it as a pull request, failed rows and all."
    )
    say(f"To use them:   harness estimate --calibration {written[0]}")


def say(text: str) -> None:
    """Print text, also on a terminal that lacks some of its characters."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    print(text.encode(encoding, errors="replace").decode(encoding), flush=True)


def _interrupt(number: int, frame: object) -> None:
    raise Interrupted


if __name__ == "__main__":
    sys.exit(main())
