"""Figures and outcomes of fault tests, kept for docs/studies/reliability.md when FAULT_FIGURES names a file.

And what every process that runs tests does once.
"""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

FILE = os.environ.get("FAULT_FIGURES", "")


def pytest_configure() -> None:
    """Under nohup hang-ups are ignored, and the programs that tests start would ignore them too, but for this."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        # A handler is not passed on to another program. This process goes on after a hang-up, as asked.
        signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections: each full one would take a second, and code asks for some."""
    gc.collect()
    gc.freeze()


def write(record: Mapping[str, Any]) -> None:
    """One line in one write: the workers of pytest-xdist share the file."""
    if FILE:
        descriptor = os.open(FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(descriptor, (json.dumps(record) + "\n").encode())
        os.close(descriptor)


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`figure(row, what, value, n=0, target="")`: something measured for a row of the fault matrix.

    value: a number with its unit, as text; or, as (good, n), how many of n trials ended well. target: what was to be
    reached. The test asserts what must hold; this only records.
    """

    def tell(
        row: int, what: str, value: str | tuple[int, int], n: int = 0, target: str = ""
    ) -> None:
        write(
            {"kind": "figure", "row": row, "what": what, "value": value, "n": n, "target": target}
            | {"test": request.node.nodeid}
        )

    return tell


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """The outcome of every fault test, by the rows of its marker: `@pytest.mark.faults(1, 2)`."""
    report = yield
    marks = list(item.iter_markers("faults"))
    if marks and (report.when == "call" or report.outcome != "passed"):
        rows = sorted({row for mark in marks for row in mark.args})
        write(
            {"kind": "test", "test": item.nodeid, "rows": rows, "outcome": report.outcome}
            | {"seconds": round(report.duration, 2)}
        )
    return report
