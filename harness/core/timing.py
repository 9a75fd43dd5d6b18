"""Times actions that take turns: on a card with CUDA events, on a CPU with the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from harness.core.errors import one_line

Action = Callable[[], object]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def wait(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(action: Action, repeats: int, device: torch.device) -> float:
    """Seconds of one call: the mean over `repeats` calls, including the wait for the end of the last one."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(repeats):
            action()
        return (time.perf_counter() - began) / repeats
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        action()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3 / repeats


def in_turns(
    actions: Mapping[str, Action], device: torch.device, turn: float, rounds: int, deadline: float
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of one call of each action, one entry for each round; and why an action was left out.

    In every round each action runs for about `turn` seconds. An action that raises is left out. The rounds end
    early at `deadline` (on the clock of time.monotonic()), but never before the first is complete.
    """
    reasons: dict[str, str] = {}
    repeats: dict[str, int] = {}
    for name, action in actions.items():
        try:
            # The first calls compile and allocate.
            for _ in range(3):
                action()
            wait(device)
            once = seconds(action, 3, device)
        except Exception as error:
            reasons[name] = one_line(error)
            continue
        repeats[name] = max(1, min(10_000, round(turn / max(once, 1e-7))))
    times: dict[str, list[float]] = {name: [] for name in repeats}

    # Turns, so that a machine that slows down slows all of them.
    for number in range(rounds):
        if number and time.monotonic() > deadline:
            break
        for name in list(times):
            try:
                times[name].append(seconds(actions[name], repeats[name], device))
            except Exception as error:
                reasons[name] = one_line(error)
                del times[name]
    return times, reasons


def rates(
    times: Mapping[str, Sequence[float]], work: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Work (FLOPs or bytes of one call) per second, with its spread."""
    return {name: spread([work[name] / each for each in values]) for name, values in times.items()}


def launch_seconds(device: torch.device, count: int, rounds: int) -> list[float]:
    """Seconds of one eager launch of a kernel that does next to nothing, one entry for each round of `count`."""
    x = torch.zeros(1, device=device)
    found: list[float] = []
    for number in range(rounds + 1):
        wait(device)
        began = time.perf_counter()
        for _ in range(count):
            x.add_(1.0)
        wait(device)
        # The first round warms up.
        if number:
            found.append((time.perf_counter() - began) / count)
    return found
