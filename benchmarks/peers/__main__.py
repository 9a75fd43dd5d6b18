"""Trains one model in the loops of several libraries, in turns: speed, memory, loss and lines of code.

    python -m benchmarks.peers --list
    python -m benchmarks.peers [--loops NAME ...] [--shapes NAME ...] [--rounds 3] [--json FILE]

Every loop trains the same weights with the same AdamW, clipping and samples. A turn begins from the initial weights, in
a process of its own: `--steps` steps whose losses are compared with those of plain PyTorch, then `--timed` steps that
are timed. Loops take turns in each round, and another one begins each round. A ratio is of two times of one round.

A loop whose losses, samples or tokens differ from those of plain PyTorch is an error and gets no figures. Without
`--shapes` a GPU trains the large models, and a CPU the tiny ones. On a CPU, FP8 is emulated: times there say nothing
about a GPU. No card has run this yet.

Exit codes: 0: all loops that can run here agree; 1: a loop failed or trained something else; 2: wrong command line.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.loops import LOOPS, PLAIN
from benchmarks.peers.report import FORMULA, Turn, figures, table
from benchmarks.peers.shapes import SHAPES
from benchmarks.results_file import write_results

PACKAGES = ("torch", "torchao", "accelerate", "lightning", "transformers", "transformer-engine")
MINUTES = 60


def versions() -> dict[str, str]:
    """Installed version of each library; "not installed" without one."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def turn_of(loop: str, shape: str, steps: int, timed: int) -> Turn | str:
    """Run a turn in a process of its own. Returns its result, or why it failed: the last line of its stderr."""
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        out = Path(folder) / "turn.json"
        command = [sys.executable, "-m", "benchmarks.peers.turn", loop, shape]
        command += [str(steps), str(timed), str(out)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=60 * MINUTES, check=False
            )
        except subprocess.TimeoutExpired:
            return f"it was stopped after {MINUTES} minutes"
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["it said nothing"]
            return f"exit code {done.returncode}: {lines[-1]}"
        return json.loads(out.read_text())


def measure(
    loops: Sequence[str], shape: str, steps: int, timed: int, rounds: int
) -> dict[str, Any]:
    """Measure all loops on one shape. Returns the figures of each loop, or why it cannot run here."""
    absent: dict[str, str] = {}
    turns: dict[str, list[Turn | str]] = {}
    for name in loops:
        reason = LOOPS[name].lacks()
        if reason:
            absent[name] = reason
        else:
            turns[name] = []

    # Another loop begins each round: the first one may find the machine colder than the others do.
    order = list(turns)
    for number in range(rounds):
        first = number % len(order)
        for name in order[first:] + order[:first]:
            print(f"  {shape}, round {number + 1}: {name}", file=sys.stderr, flush=True)
            turns[name].append(turn_of(name, shape, steps, timed))

    # In the order of `loops`.
    found = figures(turns)
    return {name: found.get(name) or {"absent": absent[name]} for name in loops}


def listed() -> str:
    """The text of `--list`."""
    lines = ["loops:"]
    for loop in LOOPS.values():
        lines.append(f"  {loop.name} ({loop.precision}): {loop.what}")
        lines.append(f"    {loop.guide}")
        reason = loop.lacks()
        if reason:
            lines.append(f"    not here: {reason}")
    lines.append("shapes:")
    for shape in SHAPES.values():
        tokens = f"{shape.batch} x {shape.tokens} tokens a step"
        lines.append(f"  {shape.name}: {shape.what}, {tokens}")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--list", action="store_true", help="loops and shapes, and what cannot run here"
    )
    parser.add_argument(
        "--loops", nargs="+", choices=list(LOOPS), metavar="NAME", default=list(LOOPS)
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), metavar="NAME")
    parser.add_argument("--steps", type=int, default=20, help="steps whose losses are compared")
    parser.add_argument("--timed", type=int, default=20, help="steps that are timed after them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args(arguments)
    if min(options.steps, options.timed, options.rounds) < 1:
        parser.error("--steps, --timed and --rounds must be at least 1")
    if options.shapes is None:
        on_cpu = not torch.cuda.is_available()
        options.shapes = [shape.name for shape in SHAPES.values() if shape.small == on_cpu]
    # Plain PyTorch always runs, as all others are compared with it.
    options.loops = [PLAIN, *(name for name in options.loops if name != PLAIN)]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        print(listed())
        return 0

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    threads = torch.get_num_threads()
    print(f"{platform.machine()}, {threads} thread(s), {card}; {versions()}")
    print(FORMULA)

    results: dict[str, dict[str, Any]] = {}
    for name in options.shapes:
        shape = SHAPES[name]
        results[name] = measure(options.loops, name, options.steps, options.timed, options.rounds)
        print(f"\n{name}: {shape.batch} x {shape.tokens} tokens a step, {options.steps} steps\n")
        print(table(results[name]), flush=True)
        # Write after each shape, so that the figures of a rented card survive if a later shape is stopped.
        if options.json:
            record = {
                "card": card,
                "versions": versions(),
                "formula": FORMULA,
                "steps": options.steps,
                "timed": options.timed,
                "rounds": options.rounds,
                "shapes": results,
            }
            write_results(options.json, "benchmarks.peers", arguments, threads, record)

    failed = False
    for rows in results.values():
        failed = failed or any("error" in row for row in rows.values())
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
