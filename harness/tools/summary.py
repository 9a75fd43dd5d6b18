"""The short honest account of a run: how well, in which precision really, what happened, where to look next."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.core.errors import some
from harness.tools.postmortem import HALTED, command_line, learned_little, next_steps, post_mortem
from harness.tools.record import SWITCHED, Record, bare
from harness.tools.shell import short, tool
from harness.tracking.position import POSITION, delivered, tracking_uri

MAX_NAMED = 8


def summary(run_dir: Path) -> RenderableType:
    """What to print when a run has ended, with crop=False, as commands are not wrapped.

    Raises ConfigError if `run_dir` is no run folder.
    """
    record = Record.read(run_dir)
    table = Table.grid(padding=(0, 2))
    halted = record.outcome.get("status") == HALTED
    for label, text in [*account(record), *_where(record)]:
        told = f"{HALTED}, see the post-mortem below" if halted and label == "outcome" else text
        table.add_row(Text(label, style="bold"), Text(told))
    if halted:
        return Group(Text(), table, post_mortem(record))
    return Group(Text(), table, *(command_line(*each) for each in next_steps(record)))


def account(record: Record) -> list[tuple[str, str]]:
    """(label, text) of everything but where to look: outcome, loss, precision with proof, steps, speed, events."""
    lines = [("outcome", _outcome(record)), ("loss", _loss(record)), ("precision", _precision(record))]
    proof = fp8_proof(record)
    if proof:
        lines.append(("FP8 proof", proof))
    lines += [("steps", _steps(record)), ("speed", _speed(record))]
    counts = Counter(event["code"] for event in record.events)
    told = ", ".join(f"{code} x {count}" for code, count in sorted(counts.items())) or "none"
    return [*lines, ("events", told)]


def fp8_proof(record: Record) -> str:
    """How many of the planned FP8 slots ever saw a nonzero amax, and which did not; empty where none was planned."""
    names = {bare(slot): slot for slot in record.slots()}
    expected = record.expected_slots() | set(names)
    if not expected:
        dynamic = [layer for layer in record.plan.get("layers", ()) if layer["precision"] == "fp8"]
        return "none: dynamic scaling keeps no amax" if dynamic else ""
    logged = [names.get(slot, slot) for slot in sorted(expected)]
    silent = [slot for slot in logged if not any(v > 0 for v in record.series.get(f"fp8_amax/{slot}", {}).values())]
    text = f"{len(expected) - len(silent)} of {len(expected)} FP8 slots saw a nonzero amax"
    return f"{text}; none seen by: {some(silent, MAX_NAMED)}" if silent else text


def counts(record: Record) -> dict[str, int]:
    """Steps, applied and skipped updates of the branch that counts; rollbacks and demotions of the whole run."""
    applied = record.series.get("train/step_applied", {})
    rollbacks = record.last("guard/rollbacks") or 0
    demoted = sum(len(event["demote"]) for event in record.events if event["code"] == SWITCHED)
    return {
        "steps": len(applied),
        "applied": sum(value == 1 for value in applied.values()),
        "skipped": sum(value == 0 for value in applied.values()),
        "rollbacks": int(rollbacks),
        "demotions": demoted,
    }


def _outcome(record: Record) -> str:
    outcome = record.outcome
    if not outcome.get("status"):
        return "not ended: still running, or killed"
    reason = f": {outcome['reason']}" if outcome.get("reason") else ""
    at = f" at step {outcome['step']}" if "step" in outcome else ""
    return f"{outcome['status']}{at}{reason}"


def _loss(record: Record) -> str:
    nats = record.last("val/loss")
    if nats is None:
        last = record.last("train/loss")
        return "no validation" + (f"; last training loss {last:.4f} nats per byte" if last is not None else "")
    bits = nats / math.log(2)
    text = f"validation {bits:.4f} bits per byte ({nats:.4f} nats)"
    unigram = record.run["data"].get("unigram_bits_per_byte")
    if not unigram:
        return text
    little = "; little more is learned than how often each byte occurs" if learned_little(record) else ""
    return f"{text}; unigram entropy of the corpus {unigram:.4f}, ratio {bits / unigram:.3f}{little}"


def _precision(record: Record) -> str:
    plan = record.plan
    if not plan:
        return "no plan.json"
    effective = plan.get("effective") or "not recorded"
    return f"requested {plan['requested']}, resolved {plan['resolved']}, effective {effective}"


def _steps(record: Record) -> str:
    found = counts(record)
    demoted = sorted({span[0] for span in record.demotions()})
    text = f"{found['steps']}: {found['applied']} applied, {found['skipped']} skipped; rollbacks {found['rollbacks']}; "
    return text + f"demotions {found['demotions']}" + (f" ({some(demoted, MAX_NAMED)})" if demoted else "")


def _speed(record: Record) -> str:
    rates = [value for value in record.series.get("train/tokens_per_second", {}).values() if math.isfinite(value)]
    return f"{statistics.median(rates):,.0f} tokens/s (median)" if rates else "not measured"


def _where(record: Record) -> list[tuple[str, str]]:
    run_dir = record.run_dir
    lines = [("MLflow", _mlflow(run_dir))]
    if (run_dir / "report.html").exists():
        lines.append(("report", short(run_dir / "report.html")))
    if record.slots():
        lines.append(("FP8 slots", f"{tool('harness')} inspect {short(run_dir)}"))
    return lines


def _mlflow(run_dir: Path) -> str:
    if not (run_dir / POSITION).exists() and not (run_dir / "shipper.log").exists():
        return "off"
    if not delivered(run_dir):
        command = f"{tool('harness')} sync {short(run_dir)}"
        return f"not all delivered (see {short(run_dir / 'shipper.log')}); later: {command}"
    uri = tracking_uri()
    if uri.startswith(("http://", "https://")):
        return f"delivered to {uri}"
    return f"delivered; {tool('mlflow')} ui --backend-store-uri {uri}"
