"""From the events of a profile to a table: what kind of work a step's time went to. Pure and torch-free.

All kinds together are the time of the steps, to the last nanosecond. An instant counts once, for the first of these
that applies:

1. On a CPU, the innermost operation that runs on the training thread (self time). On a GPU, the kernel that runs; of
   several at once, the one that began first.
2. Communication, where nothing else runs: what is hidden behind other work costs nothing.
3. Time between steps, where the host judges, validates or saves. What it computes then counts as this, too, and not as
   the work that a step does.
4. On a GPU, time in which the host waits for the device although the device is idle.
5. Gaps.

The events are those of torch's profiler in Chrome's trace format: times in microseconds.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from harness.core.errors import clipped, shown
from harness.profiling.kinds import (
    BETWEEN,
    COMMUNICATION,
    COPIES,
    GAPS,
    KINDS,
    OTHER,
    WAITS,
    gemms,
    is_wait,
    kernel_precision,
    kind_of_kernel,
    kind_of_op,
)

MARK = "harness step "
"""Begins the name of the annotation around each step."""
_MARK = re.compile(re.escape(MARK) + r"(\d{1,18})")
_NAME = 60
_ON_HOST = ("cpu_op", "user_annotation")
_RUNTIME = ("cuda_runtime", "cuda_driver")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Span(NamedTuple):
    """A stretch of time, in microseconds. name: the operation or kernel."""

    start: float
    end: float
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of work, in all profiled steps together.

    seconds: of time that nothing before it in the list above took.
    calls: operations, or kernels.
    mostly: the name that most of the time went to.
    """

    kind: str
    seconds: float
    calls: int
    mostly: str


@dataclass(frozen=True, slots=True)
class Table:
    """What profiled steps did.

    steps: their numbers.
    device: "cpu" or "cuda".
    seconds: of all of them, with what lies between them.
    rows: kinds that occurred, in the order of KINDS.
    waits, waited: how often the host waited for the device, and seconds, hidden behind the device's work or not.
    """

    steps: tuple[int, ...]
    device: str
    seconds: float
    rows: tuple[Row, ...]
    waits: int = 0
    waited: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


class _Event(NamedTuple):
    start: float
    end: float
    name: str
    kind: str
    identity: int | None
    is_mark: bool
    is_operation: bool


@dataclass
class Events:
    """The events of a trace that a table is made of; add them in any order.

    marks: steps, by number.
    host: operations by thread.
    device: (start, end, name, category, number of the operation that launched it).
    runtime: calls of the CUDA runtime.
    """

    marks: dict[int, tuple[float, float, Any]] = field(default_factory=dict)
    host: dict[Any, list[_Event]] = field(default_factory=lambda: defaultdict(list))
    device: list[tuple[float, float, str, str, int | None]] = field(default_factory=list)
    runtime: list[Span] = field(default_factory=list)

    def add(self, event: Mapping[str, Any]) -> None:
        """The next event; one that says nothing about time is ignored."""
        category = event.get("cat")
        if event.get("ph") != "X" or not isinstance(category, str):
            return
        # A trace is a file that may hold anything, so every field is checked before it is used.
        start, duration = event.get("ts"), event.get("dur")
        name, arguments = event.get("name"), event.get("args")
        if not isinstance(start, int | float) or not isinstance(duration, int | float):
            return
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return
        end = start + duration
        if not (math.isfinite(start) and duration >= 0 and math.isfinite(end)):
            return
        identity = arguments.get("External id")
        if not isinstance(identity, int):
            identity = None

        # What the host did, what the device did, and calls in which the host waits for it.
        if category in _ON_HOST:
            mark = _MARK.fullmatch(name)
            thread = (event.get("pid"), event.get("tid"))
            if mark and category == "user_annotation":
                self.marks[int(mark[1])] = (start, end, thread)
            kind = _of_op(name, arguments)
            is_operation = category == "cpu_op" or bool(kind)
            made = _Event(start, end, name, kind, identity, mark is not None, is_operation)
            self.host[thread].append(made)
        elif category in _ON_DEVICE:
            self.device.append((start, end, name, category, identity))
        elif category in _RUNTIME and is_wait(name):
            self.runtime.append(Span(start, end, WAITS, name))

    def keep(self, steps: Sequence[int]) -> None:
        """Count these steps only."""
        self.marks = {step: mark for step, mark in self.marks.items() if step in steps}


def _of_op(name: str, arguments: Mapping[str, Any]) -> str:
    types = arguments.get("Input type", ())
    if not isinstance(types, list):
        types = ()
    texts = [str(each) for each in types]

    # The second argument of `_to_copy` is the new type, if there is one.
    retypes = True
    given = arguments.get("Concrete Inputs")
    if isinstance(given, list) and len(given) > 1:
        retypes = bool(given[1])
    return kind_of_op(name, texts, retypes=retypes)


def table(events: Events) -> Table | None:
    """The table of the steps that `events` has; None if it has no whole step."""
    if not events.marks:
        return None
    steps = tuple(sorted(events.marks))
    marks = sorted(events.marks.values(), key=lambda mark: mark[:2])
    begin = marks[0][0]
    end = max(mark[1] for mark in marks)
    if end <= begin:
        return None
    training_thread = marks[0][2]

    # The operations of each thread, and what kind of operation launched which kernel.
    on_threads: dict[Any, list[Span]] = {}
    launched: dict[int | None, str] = {}
    calls: dict[str, int] = defaultdict(int)
    for thread, found in events.host.items():
        counted = calls if thread == training_thread and not events.device else None
        on_threads[thread] = _self_times(found, marks, counted, launched)

    # What runs, what communicates, and what the host does.
    if events.device:
        kernels = [_kernel(*each, launched) for each in events.device]
        for each in kernels:
            calls[each.kind] += 1
        # The device may still work on the last step. What no step launched, as in a cut trace, makes none longer.
        end = max([end, *(each.end for each in kernels if each.kind != BETWEEN)])
        runs = [each for each in kernels if each.kind != COMMUNICATION]
        communicates = [each for each in kernels if each.kind == COMMUNICATION]
        waits = events.runtime
    else:
        runs = on_threads.get(training_thread, [])
        communicates = []
        for thread, spans in on_threads.items():
            if thread != training_thread:
                communicates += [each for each in spans if each.kind == COMMUNICATION]
        waits = []
    between = _outside(marks, begin)

    # Each takes what those before it have left.
    totals: dict[tuple[str, str], float] = defaultdict(float)
    free = [(begin, end)]
    for spans in (runs, communicates, between, waits):
        free = _take(free, spans, totals)
    totals[GAPS, ""] = sum(stop - start for start, stop in free)
    inside = [each for each in waits if each.end > begin and each.start < end]
    return Table(
        steps,
        "cuda" if events.device else "cpu",
        (end - begin) / 1e6,
        _rows(totals, calls),
        len(inside),
        sum(each.end - each.start for each in inside) / 1e6,
    )


def _rows(totals: Mapping[tuple[str, str], float], calls: Mapping[str, int]) -> tuple[Row, ...]:
    rows: list[Row] = []
    for kind in KINDS:
        names = {name: spent for (each, name), spent in totals.items() if each == kind}
        spent = sum(names.values())
        if spent > 0 or calls.get(kind):
            mostly = max(names, key=lambda name: names[name], default="")
            rows.append(Row(kind, spent / 1e6, calls.get(kind, 0), shown(clipped(mostly, _NAME))))
    return tuple(rows)


def _self_times(
    events: Sequence[_Event],
    marks: Sequence[tuple[float, float, Any]],
    calls: dict[str, int] | None,
    launched: dict[int | None, str],
) -> list[Span]:
    """The time of each operation of a thread without that of the operations in it, in order.

    An operation whose name does not say its kind is of the kind of the one around it. Work of an optimizer and of
    attention stays that, whatever it is made of. Annotations of no kind have no time of their own.

    marks: of the steps, in order; what begins in none of them is of the kind BETWEEN.
    calls: counted by kind; None: not counted.
    launched: the kind by the number of each operation, written here.
    """
    spans: list[Span] = []
    stack: list[tuple[_Event, str]] = []
    cursor = -math.inf
    begins = [mark[0] for mark in marks]

    # Time belongs to the innermost operation that is running: the last one on the stack.
    def emit(until: float) -> None:
        nonlocal cursor
        if stack:
            event, kind = stack[-1]
            if until > cursor and event.is_operation and not event.is_mark:
                spans.append(Span(cursor, until, kind or OTHER, event.name))
        cursor = max(cursor, until)

    # Of two that start together the longer one comes first, as the other is inside of it.
    for event in sorted(events, key=lambda each: (each.start, -each.end)):
        # Those that ended before this one began give up the stack.
        while stack and stack[-1][0].end <= event.start:
            emit(stack[-1][0].end)
            stack.pop()
        emit(event.start)
        around = stack[-1][1] if stack else ""
        kind = event.kind or around
        if around and around not in (OTHER, WAITS) and not event.is_mark:
            kind = _within(around, kind)

        # What begins outside of every step belongs to none.
        step = bisect_right(begins, event.start) - 1
        if step < 0 or event.start >= marks[step][1]:
            kind = BETWEEN
        if calls is not None and event.kind and kind != around:
            calls[kind] += 1
        if event.identity is not None:
            launched[event.identity] = kind
        stack.append((event, kind))
    while stack:
        emit(stack[-1][0].end)
        stack.pop()
    return spans


def _within(around: str, own: str) -> str:
    """The kind of an operation of kind `own` in one of kind `around`."""
    # A cast or a sum inside of a norm is a part of it; a GEMM is one wherever it is, but in an optimizer or attention.
    if own.startswith("GEMMs") and around in ("casts", "norms"):
        return own
    return own if own == COMMUNICATION else around


def _kernel(
    start: float,
    end: float,
    name: str,
    category: str,
    identity: int | None,
    launched: Mapping[int | None, str],
) -> Span:
    """A kernel, of the kind of the operation that launched it, or of its own name's."""
    by_launch = launched.get(identity, "")
    if by_launch == BETWEEN:
        return Span(start, end, BETWEEN, name)
    if category != "kernel":
        return Span(start, end, COPIES, name)
    own = kind_of_kernel(name)
    if own == COMMUNICATION or by_launch in ("", OTHER, WAITS):
        return Span(start, end, own or OTHER, name)
    # Float32 operands may be multiplied in TF32: only the kernel knows.
    if by_launch == gemms("fp32") and kernel_precision(name) == "tf32":
        by_launch = gemms("tf32")
    return Span(start, end, by_launch, name)


def _outside(marks: Sequence[tuple[float, float, Any]], begin: float) -> list[Span]:
    """The time between the marks of steps."""
    spans: list[Span] = []
    cursor = begin
    for start, end, _ in marks:
        if start > cursor:
            spans.append(Span(cursor, start, BETWEEN, ""))
        cursor = max(cursor, end)
    return spans


def _take(
    free: Sequence[tuple[float, float]],
    spans: Iterable[Span],
    totals: dict[tuple[str, str], float],
) -> list[tuple[float, float]]:
    """Give `spans` the free time that they cover, each instant to the first of them; returns what is left.

    free: disjoint stretches, in order.
    totals: microseconds by kind and name, added to.
    """
    # Disjoint first, so that one pass over both lists is enough.
    disjoint: list[Span] = []
    covered = -math.inf
    for span in sorted(spans):
        begins = max(span.start, covered)
        if span.end > begins:
            disjoint.append(span._replace(start=begins))
            covered = span.end

    left: list[tuple[float, float]] = []
    place = 0
    for start, end in free:
        cursor = start
        while place < len(disjoint) and disjoint[place].end <= cursor:
            place += 1
        # The last one may reach into the next free stretch, so `place` stays at it.
        at = place
        while at < len(disjoint) and disjoint[at].start < end:
            span = disjoint[at]
            begins = max(span.start, cursor)
            ends = min(span.end, end)
            if begins > cursor:
                left.append((cursor, begins))
            totals[span.kind, span.name] += ends - begins
            cursor = ends
            at += 1
        place = max(place, at - 1)
        if cursor < end:
            left.append((cursor, end))
    return left
