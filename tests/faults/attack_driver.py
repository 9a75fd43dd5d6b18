"""`harness train` to which things happen at given points of its way: python attack_driver.py ARGUMENTS.

The environment's ATTACK is a JSON list of {"at", "do", "rank"}: at a step (the state counts it: the update is in the
weights, nothing is judged or written) or a stage of the start, the save or the end, do something, once. Whatever was
done is a line in ATTACK_TOLD before it is done.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

MODES = {"kill": 1, "full": 2, "once": 3}
STAGES = ("join_worker", "build_plan", "build_data", "open_store", "open_telemetry", "build_run")


def tell(what: str) -> None:
    """Its own calls may be the ones that fail: once, or from some call on."""
    for _ in range(2):
        with suppress(OSError), open(os.environ["ATTACK_TOLD"], "a") as file:
            file.write(what + "\n")
            return


def set_disk(text: str) -> None:
    """A number is what is left free; else as small_disk.c says."""
    size = Path(os.environ["DISK_SIZE"])
    if text.isdecimal():
        used = sum(
            path.stat().st_size for path in Path(os.environ["DISK"]).rglob("*") if path.is_file()
        )
        text = str(used + int(text))
    temporary = size.with_suffix(f".{os.getpid()}")
    temporary.write_text(text)
    temporary.rename(size)


def train_one(seed: int, recipe: str) -> list[Any]:
    """Losses and weights of a small model in a loop of one's own; without torch's random numbers (the run's)."""
    import torch
    from torch import nn

    from harness import Precision

    def numbers(*shape: int, at: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return torch.sin(torch.arange(count, dtype=torch.float32) * (1.7 + at)).reshape(shape)

    model = nn.Sequential(*(nn.utils.skip_init(nn.Linear, 64, 64) for _ in range(2)))
    with torch.no_grad():
        for at, parameter in enumerate(model.parameters()):
            parameter.copy_(numbers(*parameter.shape, at=seed + at) / 8)
    precision = Precision.from_recipe(recipe)
    model = precision.prepare(model)
    optimizer = precision.wrap(torch.optim.SGD(model.parameters(), lr=0.01))
    losses: list[Any] = []
    for step in range(12):
        loss = model(numbers(32, 64, at=step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return [losses, *(parameter.detach().clone() for parameter in model.parameters())]


def train_beside(seed: int) -> None:
    """Two models in two threads end as each of them alone, which comes after."""
    from concurrent.futures import ThreadPoolExecutor

    import torch

    recipes = ("bf16", "fp8_hybrid")
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(train_one, (seed, seed + 1), recipes))
    for number, found in enumerate(together):
        alone = train_one(seed + number, recipes[number])
        same = found[0] == alone[0] and all(
            torch.equal(a, b) for a, b in zip(found[1:], alone[1:], strict=True)
        )
        if not same:
            raise RuntimeError(
                f"a model of {recipes[number]} in a thread beside another ends otherwise than alone"
            )


def act(what: Mapping[str, Any]) -> None:
    """One fault. do: a verb and its words."""
    verb, *words = what["do"]
    tell(json.dumps(what))
    match verb:
        case "signal":
            for name in words:
                os.kill(os.getpid(), signal.Signals[name])
        case "call":
            number, mode = words
            ctypes.CDLL(None).inject_arm(int(number), MODES[mode])
        case "disk":
            set_disk(words[0])
        case "gone":
            path = Path("runs") / "r" / words[0]
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(
                missing_ok=True
            )
        case "clock":
            Path("offset.new").write_text(words[0])
            os.replace("offset.new", "offset")
        case "threads":
            train_beside(int(words[0]))
        case "until":  # the attacker has made a file
            deadline = time.monotonic() + float(words[1])
            while not Path(words[0]).exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        case "wait":  # for whoever reads ATTACK_TOLD
            time.sleep(float(words[0]))
        case _:
            raise ValueError(verb)


def main() -> None:
    """Become the command."""
    rank = int(os.environ.get("RANK", "0"))
    waiting = [
        each for each in json.loads(os.environ.get("ATTACK", "[]")) if each.get("rank", 0) == rank
    ]
    if Path("clock.py").exists():
        runpy.run_path("clock.py")

    def due(place: int | str) -> None:
        for each in [each for each in waiting if each["at"] == place]:
            waiting.remove(each)
            act(each)

    def before(owner: Any, name: str, place: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)
        setattr(owner, name, lambda *given, **named: (due(place), real(*given, **named))[1])

    from harness import stop

    faulthandler.register(signal.SIGUSR2, all_threads=True)  # to tell where it hangs
    stop.end_while_importing()  # as launch/train.py
    due("begin")
    from harness import cli

    if waiting:
        from harness import run as loop
        from harness import telemetry
        from harness.checkpoint.store import Store
        from harness.tools import train as job

        for name in STAGES:
            before(job, name, name)
        before(Store, "save", "save")
        before(loop, "evaluate", "evaluate")
        before(telemetry, "write_outcome", "outcome")
        real = loop.next_step

        def step(run: Any) -> Any:
            pending = real(run)
            due(run.state.step)
            return pending

        loop.next_step = step
    cli.train_main()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
