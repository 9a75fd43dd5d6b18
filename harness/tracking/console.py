"""The screen of a run: a live line on a terminal, plain lines in a log file.

A validation loss in nats per byte is shown in bits per byte, too (nats / ln 2).
"""

from __future__ import annotations

import errno
import math
import re
import sys
import time
from collections.abc import Mapping
from typing import IO, Any, cast

from rich.console import Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text

from harness.core.errors import clock, shown
from harness.core.facts import StepFacts
from harness.core.plan_text import HEADINGS, plan_rows, rung_lines
from harness.core.screen import Screen

LINES_PER_RUN = 30
"""Progress lines that a run writes into a log file, about."""
REFRESH_SECONDS = 0.25
SMOOTHING = 0.1
"""Weight of the newest step in the average pace."""
PLAIN_WIDTH = 120
# The code at the beginning of an alert.
_ALERT = re.compile(r"(?:step \d+: )?([a-z0-9]+\.[a-z_]+): ")


class Console:
    """One run's output.

    total_steps: length of the run; None if it is not known, and then steps get no lines.
    unit: unit of the losses; "loss": not known. tools/train.py sets it once the data are known.
    counted: what the speed counts. tools/train.py sets it with the unit.

    Nothing raises into training. A stream that went away (a closed pipe, a lost connection) is written to no more.
    """

    unit = "nats per byte"
    counted = "tokens"

    def __init__(self, total_steps: int | None, *, stream: IO[str] | None = None) -> None:
        self._total = total_steps or 0
        self._every = max(1, math.ceil(self._total / LINES_PER_RUN))
        self._stream = _Forgiving(stream or sys.stdout)
        self._first = True
        self._pace: float | None = None
        self._validation = "-"
        self._refreshed = 0.0
        self._explained: set[str] = set()
        self._rich = Screen(file=cast("IO[str]", self._stream), highlight=False, markup=False)
        self._progress: Progress | None = None
        if self._rich.is_terminal and total_steps:
            self._task, self._progress = _live(self._rich, total_steps)
        else:
            self._rich.width = PLAIN_WIDTH

    def step(
        self, facts: StepFacts, fp8_layers: int, fp8_total: int, skipped: int, rollbacks: int
    ) -> None:
        """Report one step.

        fp8_layers, fp8_total: layers that ran in FP8, of those planned for it.
        skipped: skipped updates, without those that a rollback undid.
        rollbacks: number so far.
        """
        done = facts.step
        if not self._total:
            return

        # The first step pays for compilation and cold caches. It says nothing about the rest.
        pace = facts.seconds
        if not self._first:
            if self._pace is not None:
                pace = self._pace + SMOOTHING * (facts.seconds - self._pace)
            self._pace = pace
        figures = self._figures(facts, pace)
        figures["fp8"] = f"{fp8_layers}/{fp8_total}"
        figures["skipped"] = str(skipped)

        # A terminal has one line, rewritten; a log gets the first step, the last, and LINES_PER_RUN between.
        due = self._first or done >= self._total
        self._first = False
        if self._progress is not None:
            self._update(self._progress, done, figures, due)
        elif due or done % self._every == 0:
            width = len(str(self._total)) + 2
            back = f"  rollbacks {rollbacks}" if rollbacks else ""
            line = f"step {done:>{width}}/{self._total}  loss {figures['loss']}  "
            line += f"lr {figures['lr']}  |g| {figures['norm']}  "
            line += f"{figures['rate']}{figures['mfu']}{figures['memory']}  "
            line += f"fp8 {figures['fp8']}  skipped {skipped}{back}  eta {figures['eta']}"
            self._plain(line)

    def _figures(self, facts: StepFacts, pace: float) -> dict[str, str]:
        """A step's figures as text; pace: average seconds of a step."""
        # What was not measured leaves no gap in the line.
        ideal = facts.ideal_seconds if pace > 0 else math.nan
        memory = mfu = ""
        if not math.isnan(facts.peak_memory):
            memory = f"  {facts.peak_memory:.1f} GiB"
        if not math.isnan(ideal):
            mfu = f"  MFU {ideal / pace:.0%}"
        return {
            "loss": f"{facts.loss:.4f}",
            "lr": f"{facts.lr:.1e}",
            "norm": f"{facts.grad_norm:.2f}",
            "rate": self._rate(facts.tokens, pace),
            "memory": memory,
            "mfu": mfu,
            "eta": clock((self._total - facts.step) * pace),
            "val": self._validation,
        }

    def _rate(self, tokens: int, pace: float) -> str:
        if not pace > 0:
            return rate(math.nan, self.counted)
        if not tokens:  # a loop of the user's own that does not count tokens
            return f"{1 / pace:.3g} steps/s"
        return rate(tokens / pace, self.counted)

    def validation(self, step: int, loss: float, accuracy: float | None = None) -> None:
        """Report a validation after `step` steps. loss: mean, in `unit`. accuracy: share of labels predicted right."""
        hits = "" if accuracy is None else f", accuracy {accuracy:.1%}"
        if self.unit == "nats per byte":
            bits = loss / math.log(2)
            self._validation = f"{bits:.3f} b/B"
            both = f"{loss:.4f} nats = {bits:.4f} bits per byte"
            self.say(f"validation after step {step}: {both}{hits}")
            return
        unit = "" if self.unit == "loss" else f" {self.unit}"
        self._validation = f"{loss:.3f}"
        self.say(f"validation after step {step}: loss {loss:.4f}{unit}{hits}")

    def event(self, text: str) -> None:
        """Print what the user should see, on a line of its own.

        The first alert of each code names the command that explains it.
        """
        alert = _ALERT.match(text)
        if alert and alert[1] not in self._explained:
            self._explained.add(alert[1])
            text = f"{text} [harness explain {alert[1]}]"
        self.say(Text(f"! {text}", style="yellow"))

    def say(self, content: RenderableType) -> None:
        """Print text, or anything that rich can render, above the live line if there is one."""
        if isinstance(content, str | Text) and self._progress is None:
            self._plain(str(content))
        else:
            self._rich.print(content, crop=False)

    def close(self) -> None:
        """End the live line, which stays on the screen; safe to call twice."""
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.stop()

    def _update(
        self,
        progress: Progress,
        done: int,
        figures: dict[str, str],
        due: bool,
    ) -> None:
        now = time.monotonic()
        refresh = due or now - self._refreshed >= REFRESH_SECONDS
        progress.update(self._task, completed=done, refresh=refresh, now=figures)
        if refresh:
            self._refreshed = now

    def _plain(self, line: str) -> None:
        self._stream.write(shown(line) + "\n")
        self._stream.flush()


class _Forgiving:
    """A text stream that writes nothing more once nobody reads it. (rich itself ends the process at a closed pipe.)

    A log on a full disk misses lines only while the disk is full.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lost = False

    def write(self, text: str) -> int:
        if not self._lost:
            try:
                return self._write(text)
            except (OSError, ValueError) as error:
                self._lost = not _is_full(error)
        return len(text)

    def _write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except UnicodeEncodeError as error:
            # A terminal that is not UTF-8 shows question marks.
            plain = text.encode(error.encoding, "replace").decode(error.encoding)
            return self._stream.write(plain)

    def flush(self) -> None:
        if not self._lost:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._lost = not _is_full(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def rate(per_second: float, counted: str = "tokens") -> str:
    """A speed as text, such as `9.8k tok/s` or `312 samples/s`."""
    what = "tok" if counted == "tokens" else counted
    if not math.isfinite(per_second):  # not measured yet
        return f"- {what}/s"
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if per_second >= limit:
            return f"{per_second / limit:.1f}{unit} {what}/s"
    return f"{per_second:.0f} {what}/s"


def _live(console: Screen, total: int) -> tuple[TaskID, Progress]:
    """A live line. Refreshed by hand: rich's own thread would compete with the training threads for the interpreter."""
    # Wide enough for the last step, such as 1000/1000, so that the line does not jump.
    width = 2 * len(str(total)) + 1
    steps = Column(no_wrap=True, min_width=width)
    progress = Progress(
        MofNCompleteColumn(table_column=steps),
        BarColumn(bar_width=None),
        TextColumn("loss {task.fields[now][loss]}"),
        TextColumn("val {task.fields[now][val]}"),
        TextColumn("{task.fields[now][rate]}{task.fields[now][mfu]}{task.fields[now][memory]}"),
        TextColumn("fp8 {task.fields[now][fp8]}"),
        TextColumn("skipped {task.fields[now][skipped]}"),
        TextColumn("eta {task.fields[now][eta]}"),
        console=console,
        auto_refresh=False,
        expand=True,
    )
    # Until the first step has figures.
    blank = dict.fromkeys(("loss", "val", "rate", "fp8", "skipped", "eta"), "-")
    blank |= {"mfu": "", "memory": ""}
    task = progress.add_task("", total=total, now=blank)
    progress.start()
    return task, progress


def plan_table(plan: Mapping[str, Any]) -> RenderableType:
    """The content of plan.json as a table for the terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    *short, why = HEADINGS
    for heading in short:
        table.add_column(heading, no_wrap=True)
    table.add_column(why)
    for row in plan_rows(plan):
        # The second column is the precision. Text: a shape in brackets is not rich's markup.
        style = "" if row[1].startswith("fp8") else "dim"
        table.add_row(*map(Text, row), style=style)
    rungs = [Text(line) for line in rung_lines(plan)]
    return Group(*rungs, Text(), table)
