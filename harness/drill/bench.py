"""Where a drill works: a folder of its own, the config with few steps, and runs that are started there. Torch-free.

Nothing of the user's is written to. The runs lie in the drill's folder, and so do their logs and the SQLite file that
stands in for the configured tracker.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from harness.core.config import RunConfig, merge
from harness.core.errors import EXIT_CODE_FILE, ConfigError, Problem
from harness.core.files import home, resource_dir, with_this_package
from harness.core.schema import validate
from harness.drill.child import MARK, Child, Missed, end_marked, marked
from harness.drill.judge import Ran, ended_well
from harness.drill.keeper import kept
from harness.run_folder import RUNS, is_checkpoint_name
from harness.tracking.existing import LOSS
from harness.tracking.history import RunHistory
from harness.tracking.journal import JOURNAL, read_rows

USERS, SHORT = "users.yaml", "short.yaml"
"""The user's config, and the one of the drill's runs: few steps, and nothing that writes outside of the folder."""
UNDISTURBED = "soak-1"
"""The run that all others are compared with."""
TRACKER = "sqlite:///mlflow.db"
"""Relative to the working folder of the runs, which is the drill's."""
# Variables of a launcher, and of the tracker that is configured.
_LEFT_OUT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "CROSS_RANK")
_LEFT_OUT_BEGIN = ("MLFLOW_", "TORCHELASTIC_", "MASTER_")
_HF = "hf:"


def users_config(config: RunConfig, here: Path) -> RunConfig:
    """`config` for a run that is started in another working folder than `here`, and that saves nowhere else.

    Paths become absolute: those of known keys, and texts in model.args and data.args that have a slash and name
    something that is there.
    """
    data = config.data.model_dump()
    for key in ("path", "cache", "tokenizer"):
        data[key] = _absolute(data[key], here)
    for source in data["mixture"]:
        source["path"] = _absolute(source["path"], here)
    data["args"] = _absolute_texts(data["args"], here)
    target = config.model.target
    if target.startswith(_HF):
        target = _HF + str(_absolute(target.removeprefix(_HF), here))
    over = {
        "recipe": _recipe(config.recipe, here),
        "data": data,
        "model": {"target": target, "args": _absolute_texts(config.model.args, here)},
        "checkpoint": {"emergency_path": None},
        "engine": {"deepspeed": _absolute(config.engine.deepspeed, here)},
    }
    return validate(RunConfig, merge(config.model_dump(mode="json"), over), "the config")


def short_config(config: RunConfig, steps: int) -> RunConfig:
    """`config` for the drill's runs: `steps` steps, a save after each quarter of them, no tracker and no report."""
    over = {
        "train": {"steps": steps, "eval_every": 0, "max_minutes": 0.0},
        "checkpoint": {"every": max(1, steps // 4)},
        "tracking": {"mlflow": False, "report": False},
    }
    return validate(RunConfig, merge(config.model_dump(mode="json"), over), "the config")


def _absolute(text: str | None, here: Path) -> str | None:
    """A path that is relative to `here`, made absolute. hf:NAME names no file."""
    if text is None or text.startswith(_HF):
        return text
    return str(here / home(text))


def _absolute_texts(args: Mapping[str, Any], here: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in args.items():
        is_path = isinstance(value, str) and "/" in value and os.path.exists(here / home(value))
        found[name] = _absolute(value, here) if is_path else value
    return found


def _recipe(name: str, here: Path) -> str:
    """A recipe that is no shipped one is a path."""
    if (resource_dir("recipes") / f"{name}.yaml").is_file():
        return name
    return str(here / home(name))


@dataclass
class Bench:
    """A drill's folder, and the runs in it.

    folder: absolute.
    config: of the drill's runs.
    delivers: whether the user's config sends its journal to MLflow.
    patience: seconds that any one event is waited for.
    """

    folder: Path
    config: RunConfig
    delivers: bool
    patience: float
    _here: Path = field(default_factory=Path.cwd)
    _mark: str = ""
    _undisturbed: RunHistory | None = None
    # Why there is none: a run that failed is not tried again by every exercise.
    _trouble: str = ""

    @classmethod
    def open(cls, folder: Path, config: RunConfig, steps: int, patience: float) -> Bench:
        """Make the folder, and write the configs into it. Raises ConfigError if anything is there."""
        folder = folder.absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            is_empty = not any(folder.iterdir())
        except OSError as error:
            what = f"cannot be used: {error.strerror}"
            raise ConfigError(Problem(what, str(folder), fix="name another --folder")) from error
        if not is_empty:
            fix = "name a new or empty --folder: a drill damages what it works on"
            raise ConfigError(Problem("is not empty", str(folder), fix=fix))
        users = users_config(config, Path.cwd())
        short = short_config(users, steps)
        for name, each in ((USERS, users), (SHORT, short)):
            text = yaml.safe_dump(each.model_dump(mode="json"), sort_keys=False)
            (folder / name).write_text(text)
        return cls(
            folder, short, config.tracking.mlflow, patience, _mark=f"{os.getpid()}-{time.time_ns()}"
        )

    @property
    def steps(self) -> int:
        """Steps of each run."""
        return self.config.train.steps

    def run(self, name: str) -> Path:
        """The folder of a run."""
        return self.folder / RUNS / name

    def start(
        self,
        log: str,
        *words: str,
        variables: Mapping[str, str] | None = None,
        apart: bool = False,
    ) -> Child:
        """Start `python *words` in the drill's folder. log: name of its log. variables: of its environment."""
        line = [sys.executable, *words]
        environment = {**self._environment(), **(variables or {})}
        return Child(line, self.folder, environment, self.folder / "logs" / f"{log}.log", apart)

    def train(
        self,
        name: str,
        *overrides: str,
        program: Sequence[str] = ("-m", "harness.cli"),
        variables: Mapping[str, str] | None = None,
    ) -> Child:
        """Start `harness train` of the run `name`, or go on with it. program: what calls it, as words for Python."""
        words = [*program, "train", "--config", SHORT, "--name", name, *overrides]
        return self.start(name, *words, variables=variables)

    def to_its_end(self, name: str, *overrides: str) -> tuple[Ran, RunHistory]:
        """Start the run or go on with it, and wait for its end."""
        code = self.train(name, *overrides).finish(self.patience)
        return self.ran(name, code)

    def ran(self, name: str, code: int) -> tuple[Ran, RunHistory]:
        """What the folder says of a run whose last process ended with `code`. Raises Missed if it has no journal."""
        if not (self.run(name) / JOURNAL).is_file():
            raise Missed(f"{name} ended with {code} and has no journal, see logs/{name}.log")
        history = RunHistory.read(self.run(name))
        return Ran.of(history, code), history

    def undisturbed(self) -> RunHistory:
        """The run that all others are compared with, trained when first asked for. Raises Missed if it failed.

        It alone delivers to MLflow where the config wants that, into the drill's SQLite file.
        """
        if self._trouble:
            raise Missed(self._trouble)
        if self._undisturbed is None:
            wanted = f"tracking.mlflow={str(self.delivers).lower()}"
            self._trouble = f"the undisturbed run failed, see logs/{UNDISTURBED}.log"
            ran, history = self.to_its_end(UNDISTURBED, wanted)
            check = ended_well(ran, self.steps)
            if not check.holds:
                self._trouble += f": {check.seen}"
                raise Missed(self._trouble)
            self._trouble = ""
            self._undisturbed = history
        return self._undisturbed

    def discard_checkpoints(self, exercise: str) -> None:
        """Delete the checkpoints of an exercise's runs; journals and logs stay."""
        for run in self.run(exercise).parent.glob(f"{exercise}*"):
            shutil.rmtree(run / "checkpoints", ignore_errors=True)

    def kept(self) -> AbstractContextManager[None]:
        """Context in which every process that was started here ends with this one, even if that is killed."""
        return kept(self._mark)

    def has_processes(self) -> bool:
        """Whether any process that was started here, or that such a process started, still lives."""
        return bool(marked(self._mark))

    def sweep(self) -> None:
        """End every process that was started here and still lives."""
        end_marked(self._mark)

    def _environment(self) -> dict[str, str]:
        """This process's, without a launcher's variables and without the configured tracker."""
        found: dict[str, str] = {}
        for name, value in with_this_package().items():
            if name in (*_LEFT_OUT, EXIT_CODE_FILE) or name.startswith(_LEFT_OUT_BEGIN):
                continue
            found[name] = value
        # A user's own code is searched in the folder where the drill was started.
        found["PYTHONPATH"] = os.pathsep.join([found["PYTHONPATH"], str(self._here)])
        return found | {"MLFLOW_TRACKING_URI": TRACKER, MARK: self._mark}


def last_step(run: Path) -> int:
    """The last step with a loss in the journal; 0 if there is none yet."""
    if not (run / JOURNAL).is_file():
        return 0
    last = 0
    for row in read_rows(run / JOURNAL):
        if row["kind"] == "metrics" and LOSS in row["metrics"]:
            last = max(last, row["step"])
    return last


def saved_steps(run: Path) -> list[int]:
    """Steps of the checkpoints that are committed, ascending."""
    found = [path for path in (run / "checkpoints").glob("step-*") if is_checkpoint_name(path)]
    return sorted(int(path.name.removeprefix("step-")) for path in found)


def is_saving(run: Path) -> bool:
    """Whether a checkpoint is being written: it has its temporary name."""
    return any((run / "checkpoints").glob(".tmp-step-*"))
