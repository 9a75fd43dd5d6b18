"""How large a large run's page is, how long it takes to make, and how soon it can be used in a real browser.

    python -m benchmarks.report_page [--steps 10000] [--linears 128] [--rounds 3] [--out FILE]

The run is made up: `benchmarks.telemetry.Model`, recorded into a journal and a file of all slots. Chromium opens the
page from the disk (file://), without a network, in a fresh profile each time. Usable: all charts and tables are built
and the page answers; the time is the browser's own, from the begin of the navigation. CPU times are of this process.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.results_file import write_results
from benchmarks.telemetry import Model, plan
from harness.core.metrics import row
from harness.core.state import RunLedger
from harness.report.page import page
from harness.tracking.history import RunHistory
from harness.tracking.journal import JOURNAL, Journal
from harness.tracking.slot_file import SLOT_FILE, SlotFile

READY = "document.documentElement.dataset.ready"
USABLE = "performance.getEntriesByName('usable')[0].startTime"


def make_run(folder: Path, steps: int, linears: int) -> Model:
    """Write the folder of a made-up run; returns its model, which knows where its extremes are."""
    folder.mkdir(parents=True)
    model = Model(linears, steps)
    slots = SlotFile(folder / SLOT_FILE)
    ledger = RunLedger()
    with Journal(folder / JOURNAL) as journal:
        where = {"host": "benchmark"}
        journal.note(
            "run", tags={"ranks": "1"}, params={"train.steps": steps}, data={}, where=where
        )
        for number in range(1, steps + 1):
            facts = model.step(number)
            slots.add(1, number, facts.slots)  # pyright: ignore[reportArgumentType]
            journal.metrics(number, row(facts, ledger))
            if number in model.leaves:
                moved = {"demote": list(model.leaves[number]), "promote": [], "lowered": ""}
                journal.event(number, "precision.switched", **moved)
        journal.note("end", status="done")
    slots.close()
    (folder / "plan.json").write_text(json.dumps(plan(model)))
    return model


def usable_seconds(path: Path) -> float:
    """Seconds until the page in `path` can be used, in a fresh browser."""
    from tests.ui.browser import browser

    with browser() as opened:
        opened.open(path.resolve().as_uri())
        opened.wait(READY)
        return float(opened.ask(USABLE)) / 1000


def measure(work: Path, steps: int, linears: int, rounds: int) -> dict[str, Any]:
    """Make the run and its page in `work`, and open it `rounds` times."""
    make_run(work / "large", steps, linears)
    begun = time.process_time()
    text = page([RunHistory.read(work / "large")])
    spent = time.process_time() - begun
    made = work / "large.html"
    made.write_text(text)
    opened = [usable_seconds(made) for _ in range(rounds)]
    return {
        "steps": steps,
        "slots": 3 * linears,
        "page_mb": round(made.stat().st_size / 1e6, 2),
        "page_cpu_seconds": round(spent, 2),
        "usable_seconds_median": round(median(opened), 2),
        "usable_seconds": [round(each, 2) for each in opened],
        "cores": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--linears", type=int, default=128, help="FP8 layers; four make a block")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.steps, options.linears, options.rounds)
    print(json.dumps(found, indent=1))
    if options.out is not None:
        write_results(options.out, "benchmarks.report_page", None, 1, found)


if __name__ == "__main__":
    main()
