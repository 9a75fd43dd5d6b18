"""What a run's page shows, as plain data: the page's script (`page.js`) makes tables and charts of it.

Everything here is numbers, texts, lists and mappings for strict JSON. Texts come from run folders that somebody else
may have written: `RunHistory` has made them fit to be shown and cut them, and the script treats them as text alone.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from harness.core.errors import ConfigError, clipped, clock, number_of, shown, some
from harness.core.facts import SWITCH_DELAY, jsonable
from harness.core.memory import size_text
from harness.core.plan_text import fold, rung_lines
from harness.core.secrets import scrubbed
from harness.profiling.report import headings, profiles, rows, title
from harness.profiling.report import notes as profile_notes
from harness.report import tool, typed
from harness.report.charts import charts, marks_of_scale
from harness.report.differences import Difference, differences, likely_causes
from harness.report.divergence import compare
from harness.report.explain import catalogue, described, flights, plain, streaks
from harness.report.hunt import SHOWN, hunted
from harness.report.inspect import account, counts
from harness.report.overview import Severity, severities
from harness.report.page_slots import content as slots_of
from harness.report.sides import Gap, Side, loss_gaps, notes
from harness.report.spent import Checkpoint, Spent, read_spent
from harness.tracking.history import MAX_TEXT, SWITCHED, RunHistory
from harness.tracking.journal import run_page
from harness.tracking.store import Destination

MAX_EVENTS = 600
MOST_MOVES = 200
_MOST_NAMES = 500
MAX_CONFIG = 64 << 10
MOST_LAYERS = 2000
LOCAL_PAGES = "http://127.0.0.1:5000"
ROOM = 2_400_000
"""Bytes that the series of all slots of a page may take, before they become text."""
MOST_DIFFERENCES = 500
_MOST_CAUSES = 8
_MOST_MACHINES = 8
_LONGEST_VALUE = 300
_MOST_DETAILS = 1000
_HEAD = ("kind", "step", "attempt", "time", "code", "text")
_LAST_ALERTS = 8
_ROLLBACK = "guard.rollback"
# What an event is on the axis, by its code.
_KINDS = {
    SWITCHED: "switch",
    "precision.demote": "switch",
    "precision.promote": "switch",
    "precision.lowered": "switch",
    _ROLLBACK: "rollback",
    "guard.halt": "halt",
    "run.failed": "halt",
    "run.stopped": "resume",
    "run.resumed": "resume",
    "run.started_from": "resume",
    "run.changed": "resume",
}
_BY_END = {".skip": "skip"}
_BY_BEGINNING = {"scaler.": "scale", "checkpoint.": "checkpoint"}
_LABELS = {
    "switch": "demote, promote",
    "rollback": "rollback",
    "halt": "halt, failure",
    "skip": "update skipped",
    "scale": "loss scale",
    "checkpoint": "checkpoint",
    "resume": "resume, stop",
    "other": "other",
}
"""Kinds of events, in the order of the page's filter."""


def of_run(history: RunHistory, room: int = ROOM) -> dict[str, Any]:
    """The content of one run. room: bytes that the series of its slots may take."""
    spent = read_spent(history)
    events = _events(history, spent)
    times = Counter(event["code"] for event in history.events)
    # Long lists are cut. How many entries were left out stands beside them.
    return {
        "name": shown(history.run_dir.name),
        "running": not history.outcome.get("status"),
        "account": account(history),
        "link": _link(history.run_dir),
        "plan": _plan(history.plan),
        "config": _config(history.run_dir),
        "charts": charts(history),
        "events": events,
        "events_left_out": max(0, len(history.events) - MAX_EVENTS),
        "moves": [*islice(_moves(history), MOST_MOVES)],
        "moves_left_out": max(0, times[SWITCHED] - MOST_MOVES),
        "rollbacks": [*islice(_rollbacks(history), MOST_MOVES)],
        "rollbacks_left_out": max(0, times[_ROLLBACK] - MOST_MOVES),
        "replays": _replays(history.run_dir),
        "checkpoints": [_checkpoint(each) for each in spent.checkpoints],
        "cost": _cost(history, spent),
        "measured": [*_profiles(history), *_hunt(history)],
        "slots": slots_of(history, room),
    }


def explanations(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Code -> its explanation of the runbook, for the codes of these runs' events."""
    found: dict[str, Any] = {}
    for run in runs:
        for event in run["events"]:
            code = event["code"]
            if code in found:
                continue
            try:
                entry = catalogue().find(code)
            except ConfigError:  # of another program, or of another version
                continue
            found[code] = [[label, plain(text)] for label, text in entry.fields.items()]
    return found


def kinds() -> list[tuple[str, str]]:
    """(kind, label) of events."""
    return list(_LABELS.items())


def _profiles(history: RunHistory) -> Iterator[dict[str, Any]]:
    """A table for each profile of the run (`train.profile_steps`)."""
    for _, profile in profiles(history.run_dir):
        cells = [list(map(shown, row)) for row in rows(profile)]
        lines = [shown(line) for line in profile_notes(profile)]
        names = headings(profile)
        # All but the first and the last column are numbers.
        numbers = list(range(1, len(names) - 1))
        yield _table(title(profile), names, cells, numbers, lines)


def _hunt(history: RunHistory) -> Iterator[dict[str, Any]]:
    """The layers whose gradients grew most, if the run measured them (`guard.hunt`)."""
    layers = hunted(history)
    if not layers:
        return
    cells: list[list[str]] = []
    for each in layers[:SHOWN]:
        usual, growth = [
            "-" if math.isnan(figure) else f"{figure:.4g}" for figure in (each.usual, each.growth)
        ]
        figures = (usual, f"{each.largest:.4g}", str(each.at), growth)
        cells.append([shown(each.layer), str(each.steps), *figures])
    lines: list[str] = []
    if len(layers) > SHOWN:
        text = f"The {SHOWN} of {len(layers)} layers that grew most; all are in journal.jsonl."
        lines.append(text)
    names = ["layer", "steps", "usual norm", "largest norm", "at step", "largest / usual"]
    yield _table("Gradient norms by layer", names, cells, [1, 2, 3, 4, 5], lines)


def _table(
    heading: str,
    names: Sequence[str],
    cells: Sequence[Sequence[str]],
    numbers: Sequence[int],
    lines: Sequence[str],
) -> dict[str, Any]:
    """numbers: columns that are aligned right. lines: under the table."""
    return {"title": heading, "headings": names, "rows": cells, "numbers": numbers, "notes": lines}


def _plan(plan: Mapping[str, Any]) -> dict[str, Any] | None:
    if not plan:
        return None
    rows: list[list[Any]] = []
    folded = fold(plan["layers"])
    for row in folded[:MOST_LAYERS]:
        shape = "x".join(map(str, row.shape))
        rows.append([row.name, row.count, row.precision, row.backend, shape, row.reason])
    return {
        "lines": [shown(line) for line in rung_lines(plan)],
        "layers": rows,
        "left_out": max(0, len(folded) - MOST_LAYERS),
    }


def _link(run_dir: Path) -> dict[str, str] | None:
    """The run in MLflow; None before the first delivery, which gives the run its id there.

    href: of its page. command: what shows that page, where no server does; empty where one does.
    """
    destination = Destination.load(run_dir)
    page = run_page(run_dir)
    if destination is None or not page:
        return None
    if destination.uri.startswith(("http://", "https://")):
        return {"href": shown(scrubbed(destination.uri + page)), "command": ""}
    command = f"mlflow ui --backend-store-uri {shlex.quote(destination.uri)}"
    return {"href": f"{LOCAL_PAGES}{page}", "command": shown(scrubbed(command))}


def _config(run_dir: Path) -> str | None:
    """The config that the run was started with; a loop of the user's own has none."""
    try:
        with (run_dir / "config.yaml").open("rb") as stream:
            text = stream.read(MAX_CONFIG).decode(errors="replace")
    except OSError:
        return None
    return shown(scrubbed(text))


def _events(history: RunHistory, spent: Spent) -> list[dict[str, Any]]:
    """Events of the journal, changes of the loss scale and saves, in the order of their steps.

    Of very many events of the journal those that matter most are taken.
    """
    # From the worst to the least, as they are declared; of one severity the first ones stay.
    known = severities()
    taken: list[Mapping[str, Any]] = []
    for severity in Severity:
        for each in history.events:
            of_event = known.get(each["code"], Severity.INFO)
            if of_event == severity:
                taken.append(each)
    taken = taken[:MAX_EVENTS]
    found = [_event(history, event) for event in taken]
    for step, text in marks_of_scale(history):
        found.append(_mark(step, "loss scale", "scale", text))
    for each in spent.checkpoints:
        mark = _mark(each.step, "checkpoint", "checkpoint", _saved(each))
        found.append(mark | {"attempt": each.attempt, "time": _moment(each.time)})
    found.sort(key=lambda event: (event["step"], event["attempt"]))
    return found


def _event(history: RunHistory, event: Mapping[str, Any]) -> dict[str, Any]:
    code = event["code"]
    return {
        "step": event["step"],
        "attempt": event["attempt"],
        "time": _moment(event.get("time")),
        "code": code,
        "kind": _kind(code),
        "severity": str(severities().get(code, Severity.INFO)),
        "text": described(event),
        "details": _details(event),
        "undone": _undone(history, event),
    }


def _mark(step: int, code: str, kind: str, text: str) -> dict[str, Any]:
    """An event that the journal has as something else."""
    return {"step": step, "attempt": 0, "time": "", "code": code, "kind": kind, "severity": "info",
            "text": text, "details": [], "undone": False}  # fmt: skip


def _kind(code: str) -> str:
    if code in _KINDS:
        return _KINDS[code]
    for end, kind in _BY_END.items():
        if code.endswith(end):
            return kind
    for beginning, kind in _BY_BEGINNING.items():
        if code.startswith(beginning):
            return kind
    return "other"


def _details(event: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The event's own fields as texts."""
    found: list[tuple[str, str]] = []
    left = _MOST_DETAILS
    for name, value in event.items():
        if name in _HEAD or value in ("", [], {}):
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        text = clipped(text, left)
        left = max(0, left - len(text))
        found.append((clipped(str(name), MAX_TEXT), text))
        if not left:
            break
    return found


def _moment(seconds: float | None) -> str:
    """Local time; "-" for an event without a time, which another program may have written."""
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _moves(history: RunHistory) -> Iterator[dict[str, Any]]:
    """Every switch between FP8 and BF16, with the evidence for it.

    That is the last verdict of the fallback before the switch, which acts SWITCH_DELAY steps after it.
    """
    # By attempt, because a rollback starts another one.
    verdicts: dict[int, Mapping[str, Any]] = {}
    for event in history.events:
        if event["code"] != SWITCHED:
            if event["code"].startswith("precision."):
                verdicts[event["attempt"]] = event
            continue
        evidence = verdicts.get(event["attempt"], {})
        if evidence and evidence["step"] < event["step"] - SWITCH_DELAY:
            evidence = {}
        yield {
            "step": event["step"],
            "demote": some(event["demote"], _MOST_NAMES),
            "promote": some(event["promote"], _MOST_NAMES),
            "whole_run": event.get("lowered", ""),
            "why": described(evidence) if evidence else "",
            "slots": _observed(evidence),
            "undone": _undone(history, event),
        }


def _undone(history: RunHistory, event: Mapping[str, Any]) -> bool:
    """Whether a rollback discarded the step of an event; a rollback itself stands."""
    is_rollback = event["code"] == _ROLLBACK
    return not is_rollback and history.replaced(event["attempt"], event["step"])


def _observed(evidence: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The figures behind a verdict of the fallback: slot, figure, and its values, the newest last."""
    found: list[dict[str, Any]] = []
    for layers in evidence.get("evidence", {}).values():
        for layer in layers.values():
            slots = layer.get("slots") if isinstance(layer, dict) else None
            if not isinstance(slots, dict):
                continue
            for slot, figures in slots.items():
                if not isinstance(figures, dict):
                    continue
                for figure, values in figures.items():
                    text = clipped(json.dumps(values), _MOST_DETAILS)
                    found.append({"slot": slot, "figure": figure, "values": text.strip("[]")})
    return found[:MAX_EVENTS]


def _rollbacks(history: RunHistory) -> Iterator[dict[str, Any]]:
    """Every rollback, with the alerts of its attempt that led to it."""
    of_attempt: dict[int, list[Mapping[str, Any]]] = {}
    for event in history.events:
        before = of_attempt.setdefault(event["attempt"], [])
        before.append(event)
        if event["code"] != _ROLLBACK:
            continue
        alerts = catalogue().ranked({each["code"] for each in before})
        # What led to it: alerts of that attempt alone.
        led = streaks([each for each in before if each["code"] in alerts])[-_LAST_ALERTS:]
        yield {
            "step": event["step"],
            "to_step": event.get("to_step"),
            "source": str(event.get("source", "")),
            "why": str(event.get("reason", "")),
            "windows": clipped(", ".join(map(str, event.get("passed_over", ()))), _MOST_DETAILS),
            "led": [[each.steps, each.times, each.last_text] for each in led],
        }


def _replays(run_dir: Path) -> list[tuple[int, str]]:
    """(step, command) of the steps that can be run again."""
    command = f"{tool('harness')} replay {shown(typed(run_dir))}"
    return [(step, f"{command} --step {step}") for step in flights(run_dir)[:_LAST_ALERTS]]


def _checkpoint(each: Checkpoint) -> list[Any]:
    """step, attempt, time, seconds, bytes, state."""
    state = "saved"
    if each.good:
        state = "good"
    if each.deleted:
        state += ", deleted since"
    elif not each.size:
        state += ", not in the folder"
    seconds = None if each.seconds is None else jsonable(each.seconds)
    return [each.step, each.attempt, _moment(each.time), seconds, each.size, state]


def _saved(each: Checkpoint) -> str:
    text = "saved"
    if each.seconds is not None:
        text += f" in {each.seconds:.3g} s"
    if each.good:
        text += ", and good: a rollback may return to it"
    return text


def _cost(history: RunHistory, spent: Spent) -> list[tuple[str, str]]:
    """Lines (label, text) on what the run took."""
    lines = [("time", f"{clock(spent.seconds)} in {number_of(max(1, spent.processes), 'start')}")]
    lines += _rank_hours(history, spent)

    # What was paid for and does not count.
    found = counts(history)
    abandoned = history.thrown_away
    if abandoned:
        share = spent.thrown_away / spent.seconds if spent.seconds else 0.0
        steps = number_of(abandoned, "step")
        lost = f"{clock(spent.thrown_away)}, {share:.1%} of the time"
        lines.append(("thrown away", f"{steps} by rollbacks: {lost}"))
    lines.append(("updates skipped", f"{found['skipped']} of {number_of(found['steps'], 'step')}"))

    # Saves are written beside training, so their time is not lost.
    saves = [each.seconds for each in spent.checkpoints if each.seconds is not None]
    size = sum(each.size for each in spent.checkpoints)
    if spent.checkpoints:
        text = f"{number_of(len(spent.checkpoints), 'save')}, {clock(sum(saves))} of writing beside training"
        lines.append(("checkpoints", f"{text}; {size_text(size)} on disk now"))
    return lines


def _rank_hours(history: RunHistory, spent: Spent) -> Iterator[tuple[str, str]]:
    """Hours times ranks, by number of ranks and card where these changed; nothing if a number of ranks is none."""
    total = 0.0
    parts: list[str] = []
    for (ranks, card), seconds in spent.by_machine.items():
        # The tag is a text of the journal, so it is counted with only if it is a number of a sensible size.
        if not ranks.isdecimal() or len(ranks) >= 7:
            return
        total += seconds / 3600 * int(ranks)
        named = card or history.plan.get("tier") or "not recorded"
        text = f"{number_of(int(ranks), 'rank')} on {shown(clipped(named, MAX_TEXT))}"
        if len(spent.by_machine) > 1:
            text += f" for {clock(seconds)}"
        parts.append(text)
    if parts:
        yield "rank hours", f"{total:.3g}: {some(parts, _MOST_MACHINES)}"


def compared(a: RunHistory, b: RunHistory) -> dict[str, Any]:
    """In which settings two runs differ, how far their losses are apart, and where they diverge."""
    given = differences(a, b)
    found = compare(a, b)
    causes = likely_causes(found, a, b)
    sides = Side("A", [a]), Side("B", [b])

    first = ""
    if found.splits:
        split = found.splits[0]
        first = f"step {split.step}, {split.tensor} {split.kind}: A {split.a!r}, B {split.b!r}"
    likely = () if causes is None else causes.likely
    return {
        "given": [_difference(each) for each in given[:MOST_DIFFERENCES]],
        "left_out": max(0, len(given) - MOST_DIFFERENCES),
        "gaps": [_gap(gap) for gap in loss_gaps(*sides)],
        "notes": notes(*sides, is_measured=True),
        # How many steps were compared, the first and the last of them.
        "steps": [found.steps, found.first, found.last],
        "first": shown(first),
        "evidence": "" if causes is None else causes.evidence,
        "causes": [_difference(each) for each in likely[:_MOST_CAUSES]],
    }


def _gap(gap: Gap) -> list[Any]:
    """Which loss of which steps, in A, in B, and their difference."""
    return [gap.name, f"{gap.a:.4f}", f"{gap.b:.4f}", f"{gap.gap:+.4f}"]


def _difference(each: Difference) -> list[str]:
    """kind, key, value in A, value in B."""
    values = [
        "-" if value is None else clipped(str(value), _LONGEST_VALUE) for value in (each.a, each.b)
    ]
    return [each.kind, shown(each.key), *map(shown, values)]
