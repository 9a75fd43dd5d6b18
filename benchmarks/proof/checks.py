"""Rows that compare: tests/gpu, Transformer Engine's bits, the fused kernel's bits, memory with its estimate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from xml.etree import ElementTree

from benchmarks.proof import page
from benchmarks.proof.children import ROOT
from benchmarks.proof.registry import Answer, NotHere, Task
from harness.capability.cards import CARDS

KERNEL_HOME = "harness.precision.backends.native_triton"
CONFIG = "llama3_8b_8layers"
GIB = 2**30
_PATIENCE = 4.0
# Rows that measure memory in eager mode, and the recipe that `harness estimate` takes for them. It estimates
# Transformer Engine by the native backend, and says so.
ESTIMATED = {"native": "fp8_hybrid", "te": "fp8_hybrid", "torchao": "fp8_dynamic"}
BF16 = "autocast:bf16"
MODEL_ARGS = ("vocab", "dim", "layers", "heads", "kv_heads", "ffn")
TOLERANCE = 0.1


def tests(task: Task) -> Answer:
    """Run tests/gpu with pytest, but for whole runs, which take minutes."""
    return by_pytest(task, "-m", "gpu and not slow", "tests/gpu")


def fsdp(task: Task) -> Answer:
    """Run the tests of FSDP2 that compare it with a single process; `make test-gpu` has those beside DDP, too."""
    return by_pytest(task, "-m", "gpu", "-k", "single", "tests/gpu/test_fsdp_gpu.py")


def by_pytest(task: Task, *chosen: str) -> Answer:
    """Run tests and count what came out. chosen: pytest's arguments that say which.

    Warnings are no errors here, because they differ between versions of torch.
    """
    report = task.folder / "junit.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
    ]
    command += ["--color=no", f"--junitxml={report}", *chosen]
    code, output = run(command, max(1.0, task.left() - 6), gently=True)
    sys.stdout.write(output)
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        begun = [line.split()[0] for line in output.splitlines() if line.startswith("tests/gpu/")]
        why = (
            f"did not come back from {begun[-1] if begun else 'collecting'}"
            if code is None
            else f"ended with {code}"
        )
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
        failed = (
            "pytest was stopped before its end"
            if code is None
            else f"pytest ended with code {code}"
        )
    return Answer(told, figures, failed)


def golden(task: Task) -> Answer:
    """Record Transformer Engine's rolls and casts on this card, keep the record, and compare it bit for bit."""
    from benchmarks import te_golden
    from harness.core.files import write_json

    record = te_golden.record()
    write_json(task.keep / "te_golden.json", record)
    found = te_golden.disagreements(record)
    told = f"{len(record['sequences'])} sequences and {len(record['casts'])} casts of 65,536 values"
    figures = {"transformer_engine": record["transformer_engine"], "disagreements": found}
    return Answer(
        f"{told}, Transformer Engine {record['transformer_engine']}", figures, "; ".join(found)
    )


def kernels(task: Task) -> Answer:
    """Compare the kernels of native FP8 with their references in torch operations: casts and transposes bit for bit."""
    if find_spec(KERNEL_HOME) is None:
        raise NotHere("this version has no fused kernel")
    home = import_module(KERNEL_HOME)
    found: list[str] = []
    for check in (home.check, home.check_turn, home.check_stats):
        found += check(task.device)
    return Answer(
        "casts and transposes equal bit for bit, statistics within rounding"
        if not found
        else "differs",
        {"differences": found},
        "; ".join(found),
    )


def estimated(task: Task) -> Answer:
    """Compare peak memory and time of the eager step rows with the predictions of `harness estimate`.

    The row fails if memory is off by more than TOLERANCE. Times never fail it. They are predicted with the roofline
    rates that this proof has measured.
    """
    measured = {name: task.earlier[name] for name in ESTIMATED if name in task.earlier}
    if not measured:
        raise NotHere(f"no row before this one measured memory ({', '.join(ESTIMATED)})")
    card = task.earlier["machine"]["card"]["name"]
    short = next((name for name, known in CARDS.items() if known.name == card), None)
    if short is None:
        raise NotHere(f"`harness estimate` knows no {card}")
    calibration = task.folder / "roofline.json"
    calibration.write_text(json.dumps({"roofline": page.roofline(task.earlier)}), encoding="utf-8")
    figures: dict[str, Any] = {"card": short, "rows": {}}
    wrong: list[str] = []
    for name, row in measured.items():
        size = [
            f"model.args.{key}={value}" for key, value in row["model"].items() if key in MODEL_ARGS
        ]
        command = [
            "--card",
            short,
            "--config",
            CONFIG,
            "--recipe",
            ESTIMATED[name],
            "--calibration",
            str(calibration),
        ]
        predicted = predict(
            [*command, *size, f"data.context={row['model']['context']}"], task.left()
        )
        sixteen, fp8 = row["contenders"]["16 bit"], row["contenders"]["fp8"]
        found = {
            "calibrated": predicted["calibrated"],
            "fp8": {
                "rung": predicted["estimated"],
                **beside(fp8, predicted["peak_gib"], predicted["step_ms"]),
            },
            "16 bit": {
                "rung": BF16,
                **beside(sixteen, predicted["bf16_peak_gib"], predicted["bf16_step_ms"]),
            },
            "ratio": {"measured": fp8["ratio"]["median"], "predicted": predicted["ratio_vs_bf16"]},
        }
        figures["rows"][name] = found
        task.note(figures)
        wrong += [
            f"{name}, {each['rung']}: {each['measured_gib']:.2f} GiB, predicted {each['predicted_gib']:.2f}"
            for each, contender in ((found["fp8"], fp8), (found["16 bit"], sixteen))
            if each["rung"] == contender["rung"] and abs(each["gib_ratio"] - 1) > TOLERANCE
        ]
    told = "; ".join(
        f"{name}: {found['fp8']['measured_gib']:.2f} GiB ({found['fp8']['gib_ratio']:.2f} of the prediction), "
        f"time ratio {found['ratio']['measured']:.3f} (predicted {found['ratio']['predicted']:.3f})"
        for name, found in figures["rows"].items()
    )
    return Answer(told, figures, "; ".join(wrong))


def beside(contender: Mapping[str, Any], gib: float, milliseconds: float) -> dict[str, float]:
    """The measured and the predicted value, and their ratio."""
    peak, seconds = contender["peak"] / GIB, contender["seconds"]["median"]
    return {
        "measured_gib": peak,
        "predicted_gib": gib,
        "gib_ratio": peak / gib,
        "measured_ms": 1e3 * seconds,
        "predicted_ms": milliseconds,
        "ms_ratio": 1e3 * seconds / milliseconds,
    }


def predict(arguments: Sequence[str], seconds: float) -> dict[str, Any]:
    """The output of `harness estimate --json`, which runs on a fake card. Raises NotHere if it fails."""
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    code, output = run(
        [sys.executable, "-m", "harness.cli", "estimate", *arguments, "--json"], seconds, env=hidden
    )
    if code is None:
        raise NotHere(f"harness estimate took more than {seconds:.0f} s")
    if code != 0:
        raise NotHere(f"harness estimate ended with {code}: {' '.join(output.split())[-300:]}")
    return json.loads(output[output.index("{") :])


def run(
    command: Sequence[str],
    seconds: float,
    *,
    gently: bool = False,
    env: Mapping[str, str] | None = None,
) -> tuple[int | None, str]:
    """Exit code (None: stopped after `seconds`) and output of a command in the checkout.

    gently: stop it first as Ctrl-C does, so that it can report how far it came. If it goes on, it is killed.
    """
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env
        )
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
