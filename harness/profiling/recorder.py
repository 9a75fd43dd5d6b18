"""Profiles some steps of a loop, ours or the user's own, with torch's profiler.

The loop says when a step begins and ends (`StepProfiler.begins`, `ends`). torch's profiler runs from the beginning of
the first step to the end of the last one. It only watches: the steps compute the same bits.

After the last step the trace is written and read back into a table. Training waits for that, about as long as for some
steps. A profile that cannot be made never fails the run: `Profiled` says why.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from harness.core.files import write_json
from harness.profiling.report import Profile, named_steps, write_text
from harness.profiling.table import MARK, table
from harness.profiling.trace_file import MOST_BYTES, write_trace

FOLDER = "profile"
"""The folder of profiles in a run's folder."""


@dataclass(frozen=True, slots=True)
class Profiled:
    """The outcome of a profile.

    text: the outcome for people.
    files: the written files, relative to the run's folder; empty if the profile could not be made.
    """

    text: str
    files: tuple[str, ...] = ()


class StepProfiler:
    """Profiles the steps `first` to `last` of a run, once.

    folder: of the run.
    rank: of this process; other ranks than 0 have files of their own.
    device: where the model trains.
    most: most bytes of JSON in the trace.
    """

    def __init__(
        self,
        folder: Path,
        first: int,
        last: int,
        device: torch.device,
        rank: int = 0,
        most: int = MOST_BYTES,
    ) -> None:
        self.first = first
        self.last = last
        self._folder = folder
        self._device = device
        self._rank = rank
        self._most = most
        self._profiler: profile | None = None
        self._mark: record_function | None = None
        # The profiled steps so far, without a gap. A resume may begin them after `first`.
        self._steps: list[int] = []
        # Whether the profile was made or given up: there is one for each start.
        self._over = False

    def missed(self, next_step: int) -> bool:
        """Whether a resume at `next_step` comes after these steps, and no earlier start has profiled any of them."""
        if next_step <= self.last or self._over:
            return False
        for path in (self._folder / FOLDER).glob("steps-*.table.json"):
            made = Profile.read(path)
            if made is not None and any(self.first <= step <= self.last for step in made.steps):
                return False
        return True

    def begins(self, step: int) -> Profiled | None:
        """Call before a step begins. Returns the outcome if the profile ends here, else None.

        A step that does not follow the last one, as after a rollback, ends the profile with the steps so far.
        """
        if self._over:
            return None
        if self._profiler is not None and step != self._steps[-1] + 1:
            return self.close()
        if not self.first <= step <= self.last:
            return None

        if self._profiler is None:
            try:
                self._profiler = self._start()
            except (RuntimeError, OSError) as error:
                self._over = True
                return Profiled(f"the profiler does not start: {error}")
        self._steps.append(step)
        self._mark = record_function(f"{MARK}{step}")
        self._mark.__enter__()
        return None

    def ends(self, step: int) -> Profiled | None:
        """Call after a step has ended. Returns the outcome if the profile ends here, else None."""
        self._end_mark()
        if self._profiler is None:
            return None
        if step != self._steps[-1]:
            # A user's own loop may record only every n-th step. Then several steps ran since `begins`, and their time
            # must not be shown as that of one step.
            profiler, self._profiler, self._over = self._profiler, None, True
            profiler.stop()
            what = f"step {step} was recorded after step {self._steps[-1] - 1}"
            return Profiled(f"{what}: only loops that record every step can be profiled")
        return self.close() if step == self.last else None

    def close(self) -> Profiled | None:
        """End a profile that has begun, and write it. None if none has begun, or no step of it has ended.

        The loop calls it at the end of the run, whatever ended it.
        """
        profiler, self._profiler = self._profiler, None
        if self._mark is not None:
            # The last step never ended: the loop was over, or the step raised. It does not count.
            self._end_mark()
            self._steps.pop()
        if profiler is None:
            return None
        self._over = True
        try:
            # The device may still compute kernels of these steps.
            self._wait()
            profiler.stop()
            return self._written(profiler) if self._steps else None
        except (RuntimeError, OSError, ValueError) as error:
            return Profiled(f"{self._names()} could not be written: {error}")

    def _start(self) -> profile:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # Without this the profiler's library writes a line to the terminal at its start and its end.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        # With shapes the profiler also records the types of operands, which say in which precision a GEMM runs.
        profiler = profile(activities=activities, record_shapes=True)
        # Kernels of earlier steps must have ended: they are none of this profile.
        self._wait()
        profiler.start()
        return profiler

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _end_mark(self) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None

    def _names(self) -> str:
        """The profile with its steps, as the subject of a sentence."""
        return f"the profile of {named_steps(self._steps)}"

    def _written(self, profiler: profile) -> Profiled:
        """Write trace and table. Raises OSError."""
        folder = self._folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        name = f"steps-{self._steps[0]:06d}-{self._steps[-1]:06d}"
        if self._rank:
            name += f"-rank-{self._rank}"

        # torch can only write its JSON whole, whatever its size. The bounded trace is made of that temporary file.
        raw = folder / f".{name}.json"
        trace = folder / f"{name}.json.gz"
        try:
            profiler.export_chrome_trace(str(raw))
            events, cut = write_trace(raw, trace, self._most)
        finally:
            raw.unlink(missing_ok=True)

        events.keep(self._steps)
        found = table(events)
        files = [trace]
        text = f"{self._names()}: {FOLDER}/{trace.name} for https://ui.perfetto.dev"
        if found is not None:
            made = Profile.of(found, self._rank, cut)
            path = folder / f"{name}.table.json"
            write_json(path, made.as_dict())
            files += [path, write_text(made, path)]
            text += f", {FOLDER}/{files[-1].name}: {made.summary()}"
        if cut:
            text += f"; {cut}"
        relative: list[str] = [str(path.relative_to(self._folder)) for path in files]
        return Profiled(text, tuple(relative))


def profiler_of(
    folder: Path | None, steps: tuple[int, int] | None, device: Any, rank: int, ranks: Any
) -> StepProfiler | None:
    """The profiler of this rank; None if it profiles nothing.

    steps: train.profile_steps.
    ranks: train.profile_ranks.
    """
    if folder is None or steps is None or (rank and ranks != "all"):
        return None
    return StepProfiler(folder, *steps, device, rank)
