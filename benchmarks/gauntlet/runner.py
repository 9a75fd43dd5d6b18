"""One loop on one scenario, in a forked process of its own: so that it may crash, hang or be killed.

The parent imports the libraries and computes nothing.
"""

from __future__ import annotations

import json
import math
import os
import runpy
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.gauntlet import loops, ours
from benchmarks.gauntlet.ours import Event
from benchmarks.gauntlet.scenarios import Scenario, data, model, overrides
from harness.core.state import seed_everything

ROOT = Path(__file__).resolve().parents[2]
OURS = "ours"
PATIENCE = 1800
"""Seconds after which a process is taken to hang."""
STARTS = 6
"""Processes of one run at most: a process that was killed is started again."""
DEAD = "http://127.0.0.1:9"
"""The address of the tracker of the scenario in which there is none."""


@dataclass
class Result:
    """What one loop did in one scenario.

    status: done, NaN (all steps done, weights not finite), crashed, halted or hangs.
    why: the last line of a crash, or the reason of a halt.
    loss: of the weights that are left, in fp32 on the validation samples, nats per byte; None if not finite, or if the
        loop did not come to its end.
    lost: steps computed, or planned and not done, whose update is not in the weights that are left.
    events: what ours reported.
    cause: whose fault the first bad step is, by `harness replay`.
    """

    status: str
    why: str = ""
    loss: float | None = None
    lost: int = 0
    events: list[Event] = field(default_factory=list[Event])
    cause: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run(loop: str, scenario: Scenario, on: bool, steps: int, folder: Path) -> Result:
    """Runs it in `folder`, which is made."""
    folder.mkdir(parents=True)
    action = _action(loop, scenario, on, steps)
    code = 0
    for _ in range(STARTS):
        code = fork(action, folder)
        if code != -signal.SIGKILL:
            break
        if scenario.cuts:
            _cut(folder, loop)
    return _read(loop, code, folder, steps)


def fork(action: Callable[[], object], folder: Path) -> int:
    """The exit code of a child that does `action` in `folder`; negative for the signal that ended it."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)

    # The child never returns. What it prints goes to a file.
    code = 1
    try:
        signal.alarm(PATIENCE)
        os.chdir(folder)
        log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {"OMP_NUM_THREADS": "1", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        os.environ["MLFLOW_TRACKING_URI"] = DEAD
        action()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", flush=True)
    os._exit(code)


def held_out(scenario: Scenario, weights: Path) -> float:
    """The loss of the scenario's model with these weights, in fp32, nats per byte. Runs in a child."""
    seed_everything(0)
    network = model(scenario.name, on=True)
    found = load_file(weights) if weights.suffix == ".safetensors" else torch.load(weights)
    wanted = network.state_dict()
    network.load_state_dict({name: found[name] for name in wanted})
    _, validation = data(scenario.name, on=False)
    samples = [validation[number] for number in range(len(validation))]
    inputs, targets = (
        torch.stack([each[key] for each in samples]) for key in ("inputs", "targets")
    )
    with torch.no_grad():
        return float(network(inputs, targets))


def _action(loop: str, scenario: Scenario, on: bool, steps: int) -> Callable[[], object]:
    if loop != OURS:
        return lambda: loops.train(loop, scenario, on, steps)
    arguments = ["--config", "tiny", "--recipe", scenario.recipe, "--name", ours.RUN]

    def start() -> None:
        sys.argv = ["launch/train.py", *arguments, *overrides(scenario, on, steps)]
        runpy.run_path(str(ROOT / "launch" / "train.py"), run_name="__main__")

    return start


def _read(loop: str, code: int, folder: Path, steps: int) -> Result:
    """What the processes left in `folder`."""
    last_line = ""
    for line in (folder / "log.txt").read_text(errors="replace").splitlines():
        if line.strip():
            last_line = line.strip()
    if loop == OURS:
        found = ours.read(folder / "runs" / ours.RUN, code)
        why = last_line if found.status == "crashed" else found.why
        result = Result(found.status, why, lost=found.lost(steps))
        result.events = found.events
        return result

    done = (folder / loops.WEIGHTS).exists()
    rows: list[dict[str, Any]] = []
    if (folder / loops.STEPS_FILE).exists():
        lines = (folder / loops.STEPS_FILE).read_text().splitlines()
        rows = [json.loads(line) for line in lines]
    result = Result("done" if done else "crashed", "" if done else last_line)
    if code == -signal.SIGALRM:
        result.status = "hangs"
    result.lost = max(steps, len(rows)) - loops.useful_steps(rows, done)
    return result


def measure(result: Result, loop: str, scenario: Scenario, folder: Path) -> None:
    """Adds the loss of the weights that are left."""
    if result.status != "done":
        return
    weights = folder / loops.WEIGHTS
    if loop == OURS:
        weights = ours.weights(folder / "runs" / ours.RUN)
    answer = folder / "loss.json"
    code = fork(lambda: answer.write_text(json.dumps(held_out(scenario, weights))), folder)
    if code:
        raise SystemExit(
            f"{scenario.name}, {loop}: the loss was not measured: see {folder}/log.txt"
        )
    loss = json.loads(answer.read_text())
    if math.isfinite(loss):
        result.loss = loss
    else:
        result.status = "NaN"


def ask_replay(result: Result, folder: Path) -> None:
    """Adds what `harness replay` says of the first bad step that ours has a record of."""
    run_folder = folder / "runs" / ours.RUN
    step = ours.bad_step(run_folder)
    if not step:
        return
    replay = import_module("harness.tools.replay").replay
    fork(lambda: replay(run_folder, step, anomaly=False), folder)
    result.cause = ours.cause(run_folder, step)


def _cut(folder: Path, loop: str) -> None:
    """Cuts the newest saved weights to half, as a machine that died in a save may leave them."""
    saved = folder / "state.pt"
    if loop == OURS:
        saved = ours.weights(folder / "runs" / ours.RUN)
    elif (folder / "state").is_dir():
        saved = folder / "state" / "model.safetensors"
    os.truncate(saved, saved.stat().st_size // 2)
