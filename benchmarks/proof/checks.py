"""Rows that compare: tests/gpu, Transformer Engine's bits, the fused kernel's bits, memory with its estimate."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from xml.etree import ElementTree

from benchmarks.proof.children import ROOT
from benchmarks.proof.registry import Answer, NotHere, Task

KERNEL_HOME = "harness.precision.backends.native_triton"
CONFIG = "llama3_8b_8layers"
GIB = 2**30
_PATIENCE = 4.0
# Names in the estimate of the rows that measured memory.
RECIPES = {"native": "fp8_hybrid", "16 bit": "bf16"}


def tests(task: Task) -> Answer:
    """tests/gpu by pytest. Warnings do not fail them here: other versions of torch have other ones."""
    report = task.folder / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider"]
    command += ["--color=no", f"--junitxml={report}", "tests/gpu"]
    code, output = run(command, max(1.0, task.left() - 6), gently=True)
    sys.stdout.write(output)
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        begun = [line.split()[0] for line in output.splitlines() if line.startswith("tests/gpu/")]
        why = f"did not come back from {begun[-1] if begun else 'collecting'}" if code is None else f"ended with {code}"
        raise RuntimeError(f"pytest {why} and wrote no report") from None
    outcomes: dict[str, list[dict[str, str]]] = {"passed": [], "failed": [], "skipped": []}
    for case in cases:
        name = f"{case.get('classname', '').removeprefix('tests.gpu.')}::{case.get('name', '')}"
        found = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
        kind = "passed" if found is None else "skipped" if found.tag == "skipped" else "failed"
        why = "" if found is None else " ".join((found.get("message") or "").split())[:300]
        outcomes[kind].append({"test": name, "why": why})
    counts = {kind: len(found) for kind, found in outcomes.items()}
    skips = sorted({each["why"] for each in outcomes["skipped"]})
    if not outcomes["passed"] and not outcomes["failed"]:
        raise NotHere("; ".join(skips) or "pytest found no tests")
    figures = {"counts": counts, "failures": outcomes["failed"], "skipped_for": skips}
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    failed = "; ".join(each["test"] for each in outcomes["failed"])
    if not failed and code != 0:
        failed = "pytest was stopped before its end" if code is None else f"pytest ended with code {code}"
    return Answer(told, figures, failed)


def golden(task: Task) -> Answer:
    """A record of Transformer Engine's rolls and casts on this card, kept, and compared bit for bit."""
    from benchmarks import te_golden
    from harness.core.atomic import write_json

    record = te_golden.record()
    write_json(task.keep / "te_golden.json", record)
    found = te_golden.disagreements(record)
    told = f"{len(record['sequences'])} sequences and {len(record['casts'])} casts of 65,536 values"
    figures = {"transformer_engine": record["transformer_engine"], "disagreements": found}
    return Answer(f"{told}, Transformer Engine {record['transformer_engine']}", figures, "; ".join(found))


def kernels(task: Task) -> Answer:
    """The fused quantise kernel against the reference in torch ops, bit for bit."""
    if find_spec(KERNEL_HOME) is None:
        raise NotHere("this version has no fused kernel")
    if find_spec("triton") is None:
        raise NotHere("triton is not installed: FP8 casts are torch's own ops here")
    found: Sequence[str] = import_module(KERNEL_HOME).check(task.device)
    return Answer("equal bit for bit" if not found else "differs", {"differences": list(found)}, "; ".join(found))


def memory(task: Task) -> Answer:
    """The height of the step rows' memory over what `harness estimate` says of that card and config."""
    measured = {name: row for name, row in task.earlier.items() if "contenders" in row and row.get("backend")}
    if not measured:
        raise NotHere("no row before this one measured memory")
    code, _ = run([sys.executable, "-m", "harness.cli", "estimate", "--help"], 60)
    if code != 0:
        raise NotHere("this version has no `harness estimate`")
    raise NotHere("not written yet")


def run(command: Sequence[str], seconds: float, *, gently: bool = False) -> tuple[int | None, str]:
    """Exit code (None: stopped after `seconds`) and output of a command in the checkout.

    gently: as by Ctrl-C, so that it can tell how far it came; if it does not end then either, it is killed.
    """
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        stopped = False
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            stopped = True
            if gently:
                child.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_PATIENCE)
            child.kill()
            child.wait()
        output.seek(0)
        return None if stopped else child.returncode, output.read().decode(errors="replace")


def estimate(arguments: Sequence[str], seconds: float) -> dict[str, Any]:
    """`harness estimate ... --json`. Raises NotHere if it does not answer."""
    code, output = run([sys.executable, "-m", "harness.cli", "estimate", *arguments, "--json"], seconds)
    if code != 0:
        raise NotHere(f"harness estimate ended with {code}: {output.strip()[-200:]}")
    return json.loads(output[output.index("{") :])
