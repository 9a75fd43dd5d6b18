"""Reads the trace of a profile event by event, and writes it compressed and of bounded size. Torch-free.

torch's profiler writes JSON in Chrome's trace format, hundreds of megabytes for some steps of a large model. So it is
never read whole. A trace that is too large is cut at one moment: events that begin later are left out, and the file
says so. The result is valid JSON in any case, which https://ui.perfetto.dev opens.
"""

from __future__ import annotations

import gzip
import json
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.core.files import atomic_file
from harness.profiling.table import MARK, Events

MOST_BYTES = 128 << 20
"""Most bytes of JSON in a trace, before it is compressed to about a tenth."""
# The key after which the events follow, and what is between two of them.
_BEGINS = re.compile(r'"traceEvents"\s*:\s*\[')
_BLANK = re.compile(r"[\s,]*")
# Characters that are read at a time.
_CHUNK = 1 << 20
# Characters of the largest event that is read. One with the shapes of all of a model's parameters has some 100,000.
_LARGEST = 32 << 20


def read_events(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The events of a trace, each with its length in characters. Ends where the file is no longer JSON."""
    decoder = json.JSONDecoder(strict=False)
    with path.open(encoding="utf-8", errors="replace") as stream:
        # Skip what is before the list of events; it is short and lies in the first chunk.
        text = stream.read(_CHUNK)
        begins = _BEGINS.search(text)
        if begins is None:
            return
        place = begins.end()

        while True:
            blank = _BLANK.match(text, place)
            place = place if blank is None else blank.end()
            if text.startswith("]", place):
                return
            try:
                event, end = decoder.raw_decode(text, place)
            except ValueError:
                # Most likely the event goes on in the next chunk. An event over _LARGEST is taken for broken JSON.
                more = stream.read(_CHUNK)
                if not more or len(text) - place > _LARGEST:
                    return
                text = text[place:] + more
                place = 0
                continue
            if isinstance(event, dict):
                yield event, end - place
            place = end


def write_trace(source: Path, target: Path, most: int = MOST_BYTES) -> tuple[Events, str]:
    """Write the trace in `source` to `target` (.json.gz), at most `most` bytes of JSON.

    Returns the events for the table, and a line on what was cut; empty if nothing was. Raises OSError.
    """
    # Two passes over the source: one to find where to cut, one to write. Neither holds all events in memory.
    until = _cut(source, most)
    events = Events()
    left_out = 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(target) as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as stream:
        stream.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = b""
        for event, _ in read_events(source):
            begins = _time(event)
            if until is not None and begins is not None and begins >= until:
                left_out += 1
                continue
            # A step that goes on past the cut is incomplete: without its mark the table leaves it out.
            if not (_is_mark(event) and until is not None and _ends(event) > until):
                events.add(event)
            stream.write(separator + json.dumps(event, separators=(",", ":")).encode())
            separator = b",\n"

        # The key `cut` tells a reader of the file that events are missing. Perfetto ignores it.
        cut = ""
        if left_out:
            cut = f"the trace is cut: {left_out:,} later events are left out, as it may have {most >> 20} MiB of JSON"
        stream.write(f'\n], "cut": {json.dumps(cut)}}}\n'.encode())
    return events, cut


def _cut(source: Path, most: int) -> float | None:
    """The time from which on events are left out, microseconds; None if all of them fit into `most` bytes."""
    if source.stat().st_size <= most:
        return None

    # Beginning and size of every event, in arrays: a trace may have millions. Events without a time are always kept.
    times = array("d")
    sizes = array("q")
    kept = 0
    for event, size in read_events(source):
        begins = _time(event)
        if begins is None:
            kept += size
        else:
            times.append(begins)
            sizes.append(size)

    # A file is not in the order of time. Take events in that order until the bytes are spent.
    for place in sorted(range(len(times)), key=times.__getitem__):
        kept += sizes[place]
        if kept > most:
            return times[place]
    return None


def _time(event: dict[str, Any]) -> float | None:
    """When an event begins; None for names of processes and threads, which are always kept."""
    begins = event.get("ts")
    return begins if event.get("ph") != "M" and isinstance(begins, int | float) else None


def _is_mark(event: dict[str, Any]) -> bool:
    return str(event.get("name", "")).startswith(MARK)


def _ends(event: dict[str, Any]) -> float:
    begins, duration = event.get("ts", 0), event.get("dur", 0)
    return float(begins) + float(duration)
