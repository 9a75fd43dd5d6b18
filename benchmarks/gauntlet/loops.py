"""The other loops, as people write them. Each clips at 1.0, saves every 20 steps and resumes from its last save.

fp32          torch alone: the clean run that losses are compared with
bare bf16     torch alone, under autocast. In the scenarios of fp16 autocast is to float16, without a loss scale
bare FP8      the same with the native backend's FP8 Linears, whose scales roll after every step. No gate on updates, no
              guard, no fallback: an FP8 layer in a plain loop
accelerate    Accelerator(mixed_precision="bf16")
Lightning     Fabric(precision="bf16-mixed")

All of them have the weights, samples, optimizer and schedule of `harness train`.
"""

from __future__ import annotations

import importlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from benchmarks.gauntlet import samples
from benchmarks.gauntlet.scenarios import Scenario, config, data
from benchmarks.linear import backend_on
from harness.core.state import seed_everything
from harness.models import build_model
from harness.optim.optimizers import build_optimizer
from harness.optim.schedule import Schedule

EVERY = 20
"""Steps between saves, and between losses sent to a tracker."""
CPU = torch.device("cpu")
STEPS_FILE, WEIGHTS = "steps.jsonl", "weights.pt"
NEEDED = {"accelerate": "accelerate", "Lightning": "lightning_fabric"}
"""The package of each loop that needs one."""


class Loop(ABC):
    """One loop, which runs in the folder of its run.

    state: the file or folder to which it saves.
    half: "bf16" or "fp16", the type to which autocast casts.
    """

    state = Path("state.pt")

    def __init__(self, model: nn.Module, optimizer: Optimizer, max_norm: float, half: str) -> None:
        self.model: Any = model
        self.optimizer: Any = optimizer
        self.max_norm = max_norm
        self.dtype = torch.float16 if half == "fp16" else torch.bfloat16

    @abstractmethod
    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Make one update. Returns the loss, 0-d."""

    def save(self, step: int) -> None:
        torch.save(self.everything(step), self.state)

    def load(self) -> int:
        """Load the last save. Returns the number of the last step in it."""
        found = torch.load(self.state, weights_only=False)
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        return found["step"]

    def everything(self, step: int) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": step,
        }


class Bare(Loop):
    """torch alone."""

    def context(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=self.dtype)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self.context():
            loss = self.model(inputs, targets)
        loss.backward()
        return self.finish(loss)

    def finish(self, loss: Tensor) -> Tensor:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class Float32(Bare):
    """torch alone, without autocast."""

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()


class BareFp8(Bare):
    """FP8 Linears in a plain loop."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, max_norm: float, half: str) -> None:
        super().__init__(model, optimizer, max_norm, half)
        self.backend = backend_on(model, "native", "fp8")
        # The flag by which a gate would skip an update. There is no gate here: it stays 0, and the scales always roll.
        self.always = torch.zeros(())

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.backend.begin_window(sample=False)
        with self.backend.context():
            loss = self.model(inputs, targets)
        with self.backend.backward_context():
            loss.backward()
        # One process: there are no other ranks to reduce over.
        self.backend.end_window(self.backend.amax(), self.always, lambda values: values)
        return self.finish(loss)

    def everything(self, step: int) -> dict[str, Any]:
        return {**super().everything(step), "scales": self.backend.state_dict()}

    def load(self) -> int:
        step = super().load()
        found = torch.load(self.state, weights_only=False)
        self.backend.load_state_dict(*found["scales"])
        return step


class Accelerate(Loop):
    """Hugging Face's accelerate."""

    state = Path("state")

    def __init__(self, model: nn.Module, optimizer: Optimizer, max_norm: float, half: str) -> None:
        library = importlib.import_module("accelerate")
        self.accelerator: Any = library.Accelerator(mixed_precision="bf16", cpu=True)
        prepared, wrapped = self.accelerator.prepare(model, optimizer)
        super().__init__(prepared, wrapped, max_norm, half)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.model(inputs, targets)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def save(self, step: int) -> None:
        self.accelerator.save_state(str(self.state))
        Path("step.json").write_text(json.dumps(step))

    def load(self) -> int:
        self.accelerator.load_state(str(self.state))
        return json.loads(Path("step.json").read_text())


class Lightning(Loop):
    """Lightning Fabric: Lightning's own loop in the user's hands, with the Trainer's precision and saves."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, max_norm: float, half: str) -> None:
        library = importlib.import_module("lightning_fabric")
        self.fabric: Any = library.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        prepared, wrapped = self.fabric.setup(model, optimizer)
        super().__init__(prepared, wrapped, max_norm, half)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.model(inputs, targets)
        self.fabric.backward(loss)
        self.fabric.clip_gradients(self.model, self.optimizer, max_norm=self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def save(self, step: int) -> None:
        parts = {"model": self.model, "optimizer": self.optimizer, "step": step}
        self.fabric.save(self.state, parts)

    def load(self) -> int:
        rest = self.fabric.load(self.state, {"model": self.model, "optimizer": self.optimizer})
        return rest["step"]


LOOPS: dict[str, type[Loop]] = {
    "fp32": Float32,
    "bare bf16": Bare,
    "bare FP8": BareFp8,
    "accelerate": Accelerate,
    "Lightning": Lightning,
}


def train(name: str, scenario: Scenario, on: bool, steps: int) -> None:
    """Train in the current folder, or go on from the last save in it.

    Writes a row for each step into steps.jsonl, and the weights at the end into weights.pt.
    on: whether the scenario's fault is in it; without it this is the clean run.
    """
    settings = config(scenario, on, steps)
    torch.set_num_threads(settings.train.threads)
    seed_everything(settings.train.seed)
    model = build_model(settings.model)
    optimizer = build_optimizer(model, settings.train, CPU)
    rate = Schedule.of(settings.train)
    loop = LOOPS[name](model, optimizer, settings.train.max_grad_norm, scenario.half)
    done = loop.load() if loop.state.exists() else 0

    # Without this fault the tracker's server is there until after the last step.
    tracker_fails = scenario.tracker and on
    send_loss = _tracker(scenario.at if tracker_fails else steps + 1)

    with Path(STEPS_FILE).open("a", buffering=1) as stream:
        for step, batch in enumerate(_batches(scenario, on, done, steps), start=done + 1):
            for group in loop.optimizer.param_groups:
                group["lr"].fill_(rate(step - 1))
            loss = float(loop.step(batch["inputs"], batch["targets"]))
            stream.write(json.dumps({"step": step, "loss": loss}) + "\n")
            if step % EVERY == 0:
                loop.save(step)
                send_loss(loss, step)
    torch.save({name: value.clone() for name, value in model.state_dict().items()}, WEIGHTS)


def _batches(scenario: Scenario, on: bool, done: int, steps: int) -> Iterator[dict[str, Tensor]]:
    """The batches after step `done`, one for each window, through torch's DataLoader."""
    text: Any = data(scenario.name, on)[0]
    windows = [samples.window(index) for index in range(done, steps)]
    return iter(DataLoader(text, batch_sampler=windows))


def _tracker(gone: int) -> Callable[[float, int], None]:
    """A function that sends a loss to MLflow as the trackers of these libraries do: within the step, raising errors.

    gone: the first step without a server. Before it nothing is sent, which stands for a server that answers.
    """

    def send(loss: float, step: int) -> None:
        if step >= gone:
            client: Any = importlib.import_module("mlflow").MlflowClient()
            client.log_metric("gauntlet", "loss", loss, step=step)

    return send


def useful_steps(steps: list[dict[str, Any]], done: bool) -> int:
    """How many updates the weights at the end contain.

    Updates after the first NaN or infinite loss do not count: they train a model that is lost. In a run that failed
    (`done` is false) those after the last save do not count.
    """
    # A step that ran again after a restart counts as it ran last.
    attempt: dict[int, float] = {row["step"]: row["loss"] for row in steps}
    last = max(attempt, default=0)
    if not done:
        last -= last % EVERY
    for step in range(1, last + 1):
        if not math.isfinite(attempt[step]):
            return step - 1
    return last
