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
from harness.core.files import RUNS, home, resource_dir, with_this_package
from harness.core.schema import validate
from harness.drill.child import MARK, Child, Missed, end_marked, marked
from harness.drill.judge import Ran, ended_well
from harness.drill.keeper import kept
from harness.run_folder import is_checkpoint_name
from harness.tracking.existing import LOSS
from harness.tracking.history import RunHistory
from harness.tracking.journal import JOURNAL, read_rows

USERS, SHORT = "users.yaml", "short.yaml"
"""The user's config, and the one of the drill's runs: few steps, and nothing that writes outside of the folder."""
UNDISTURBED = "soak-1"
"""The run that all others are compared with."""
TRACKER = "sqlite:///mlflow.db"
"""Relative to the working folder of the runs, which is the drill's."""
# The drill may run under a launcher, and with a tracker configured. Its runs start without either.
_LEFT_OUT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "CROSS_RANK")
_LEFT_OUT_BEGIN = ("MLFLOW_", "TORCHELASTIC_", "MASTER_")
_HF = "hf:"


def users_config(config: RunConfig, here: Path) -> RunConfig:
    """`config` for a run that starts in another working folder than `here` and saves in its own folder alone.

    Relative paths become absolute. In model.args and data.args a text counts as a path if it has a slash and names an
    existing file or folder.
    """
    data = config.data.model_dump()
    for key in ("path", "cache", "tokenizer"):
        data[key] = _absolute(data[key], here)
    for source in data["mixture"]:
        source["path"] = _absolute(source["path"], here)
    data["args"] = _absolute_texts(data["args"], here)

    # hf: is followed by a folder.
    target = config.model.target
    if target.startswith(_HF):
        target = _HF + str(_absolute(target.removeprefix(_HF), here))

    # Without a fallback folder for emergency saves, which lies outside of the drill's.
    over = {
        "recipe": _recipe(config.recipe, here),
        "data": data,
        "model": {"target": target, "args": _absolute_texts(config.model.args, here)},
        "checkpoint": {"emergency_path": None},
        "engine": {"deepspeed": _absolute(config.engine.deepspeed, here)},
    }
    return validate(RunConfig, merge(config.model_dump(mode="json"), over), "the config")


def short_config(config: RunConfig, steps: int) -> RunConfig:
    """`config` for the drill's runs: `steps` steps, a save after each quarter of them, no tracker and no report.

    Validation is off as well, and so is the time limit: only an exercise may end a run early.
    """
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
    """`args` with absolute paths. Only what exists is taken for a path: a text with a slash may be anything."""
    found: dict[str, Any] = {}
    for name, value in args.items():
        if isinstance(value, str) and "/" in value and os.path.exists(here / home(value)):
            value = _absolute(value, here)
        found[name] = value
    return found


def _recipe(name: str, here: Path) -> str:
    """The recipe's name if it is a shipped one; else its absolute path."""
    if (resource_dir("recipes") / f"{name}.yaml").is_file():
        return name
    return str(here / home(name))


@dataclass
class Bench:
    """A drill's folder, and the runs in it.

    folder: the drill's, absolute.
    config: of the drill's runs.
    delivers: whether the user's config sends its journal to MLflow.
    patience: longest wait for any one event, seconds.
    """

    folder: Path
    config: RunConfig
    delivers: bool
    patience: float
    # Where the drill was started: modules of the user's own are imported from there.
    _here: Path = field(default_factory=Path.cwd)
    # Every started process has it in its environment and passes it on, so that all of them can be found and ended.
    _mark: str = ""
    # The undisturbed run, once it was trained; or why it failed. Later exercises fail with that reason at once.
    _undisturbed: RunHistory | None = None
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

        # The mark is unique: another drill on this machine must not end these runs.
        users = users_config(config, Path.cwd())
        short = short_config(users, steps)
        for name, each in ((USERS, users), (SHORT, short)):
            text = yaml.safe_dump(each.model_dump(mode="json"), sort_keys=False)
            (folder / name).write_text(text)
        mark = f"{os.getpid()}-{time.time_ns()}"
        return cls(folder, short, config.tracking.mlflow, patience, _mark=mark)

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
        separate_stderr: bool = False,
    ) -> Child:
        """Start `python *words` in the drill's folder.

        log: name of its log.
        variables: added to its environment.
        separate_stderr: see `Child`.
        """
        line = [sys.executable, *words]
        environment = {**self._environment(), **(variables or {})}
        path = self.folder / "logs" / f"{log}.log"
        return Child(line, self.folder, environment, path, separate_stderr)

    def train(
        self,
        name: str,
        *overrides: str,
        program: Sequence[str] = ("-m", "harness.cli"),
        variables: Mapping[str, str] | None = None,
    ) -> Child:
        """Start or resume the run `name` by `harness train`. program: Python's arguments that name the program."""
        words = [*program, "train", "--config", SHORT, "--name", name, *overrides]
        return self.start(name, *words, variables=variables)

    def to_its_end(self, name: str, *overrides: str) -> tuple[Ran, RunHistory]:
        """Start or resume the run, and wait for its end. Raises Missed as `ran` does, or after `patience`."""
        code = self.train(name, *overrides).finish(self.patience)
        return self.ran(name, code)

    def ran(self, name: str, code: int) -> tuple[Ran, RunHistory]:
        """The run as its folder records it. code: exit code of its last process. Raises Missed without a journal."""
        run = self.run(name)
        if not (run / JOURNAL).is_file():
            raise Missed(f"{name} ended with {code} and has no journal, see logs/{name}.log")
        history = RunHistory.read(run)
        return Ran.of(history, code), history

    def undisturbed(self) -> RunHistory:
        """The run that all others are compared with, trained when first asked for. Raises Missed if it failed.

        It alone delivers to MLflow where the config wants that, into the drill's SQLite file.
        """
        if self._trouble:
            raise Missed(self._trouble)
        if self._undisturbed is None:
            wanted = f"tracking.mlflow={str(self.delivers).lower()}"
            # Set before the run starts, so that it stands if the run raises. It is cleared after a good end.
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
        """Context in which every process that was started here ends with this one, even after SIGKILL."""
        return kept(self._mark)

    def has_processes(self) -> bool:
        """Whether a process that was started here, or a descendant of one, still lives."""
        return bool(marked(self._mark))

    def sweep(self) -> None:
        """End every process that was started here and still lives."""
        end_marked(self._mark)

    def _environment(self) -> dict[str, str]:
        """This process's environment, with the drill's tracker and without a launcher's variables.

        A child would take RANK and WORLD_SIZE of the drill's launcher for its own and wait for other ranks.
        """
        found: dict[str, str] = {}
        for name, value in with_this_package().items():
            if name in (*_LEFT_OUT, EXIT_CODE_FILE) or name.startswith(_LEFT_OUT_BEGIN):
                continue
            found[name] = value
        # The runs start in the drill's folder, but the user's modules are where the drill was started.
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
    found: list[int] = []
    for path in (run / "checkpoints").glob("step-*"):
        if is_checkpoint_name(path):
            step = path.name.removeprefix("step-")
            found.append(int(step))
    return sorted(found)


def is_saving(run: Path) -> bool:
    """Whether a checkpoint is being written: until its commit it has a temporary name."""
    return any((run / "checkpoints").glob(".tmp-step-*"))
