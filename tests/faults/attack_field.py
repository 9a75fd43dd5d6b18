"""Where sequences of the attack are carried out: runs to attack, those that they are compared with, and MLflow."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

from attack_job import Job, attend
from attack_oracle import Rows, compare_history
from attack_plans import ALONE, VARIANTS, Episode
from resume_models import write_text
from resume_runs import BATCH, arguments, codes
from tracking_server import RealServer

from tests.support.runs import ROOT, TEXT

CACHE = ROOT / "build" / "attack"
# Windows whose loss is NaN, forwards in which FP8 tensors outgrow their scales, steps between snapshots in memory, and
# what must come of it.
PATHS = {
    "plain": ((), (), 0, ""),
    "rolled": ((9, 20, 21), (), 0, "guard.rollback"),
    "remembered": ((9, 20, 21), (), 5, "guard.rollback"),
    "switched": ((9,), (16, 24), 0, "precision.demote"),
}
COMMON = ("--name", "r", "--recipe", "recipe.yaml", "data.path=text", "train.eval_every=10", "tracking.report=false",
          "engine.timeout_seconds=10", "tracking.drain_seconds=1")  # fmt: skip


class Field:
    """Where sequences are carried out: a folder for each, and the undisturbed runs that they are compared with."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self._undisturbed: dict[tuple[str, str, bool], Path] = {}
        self._stack = ExitStack()
        self._server: RealServer | None = None

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def command(self, folder: Path, variant: str, tracked: bool) -> tuple[str, ...]:
        """Text, recipe and arguments of a run in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        steps, text = VARIANTS[variant], folder / "text"
        if not text.exists():
            shutil.copytree(TEXT, text) if variant == "plain" else write_text(
                text, steps * BATCH + 60
            )
            shutil.copy(ROOT / "recipes" / "fp8_hybrid.yaml", folder / "recipe.yaml")
        fixed = (
            "--config",
            "tiny",
            *COMMON,
            f"tracking.mlflow={str(tracked).lower()}",
            f"train.steps={steps}",
        )
        if variant == "plain":
            return (*fixed, "checkpoint.every=5")
        bad, outlier, snapshots, _ = PATHS[variant]
        own = arguments(text, "recipe.yaml", steps, bad=bad, outlier=outlier)
        given = ("--name", "r", "--recipe", "recipe.yaml")
        kept = [each for each in own if not each.startswith("data.path=") and each not in given]
        guard = (
            "guard.max_consecutive_skips=2",
            "checkpoint.healthy_steps=3",
            f"guard.snapshot_every={snapshots}",
        )
        return (*fixed, *kept, *guard, "checkpoint.every=4")

    def undisturbed(self, variant: str, kind: str, tracked: bool) -> Path:
        """The run folder of one that nothing happened to, kept for as long as the harness is the same."""
        kind = "python" if kind in ALONE else kind.removesuffix(" ranks")
        key = (variant, kind, tracked)
        if key not in self._undisturbed:
            name = f"{variant}-{kind}{'-tracked' * tracked}"
            folder = self.work / f"undisturbed-{name}"
            shutil.rmtree(folder, ignore_errors=True)
            command = self.command(folder, variant, tracked=False)
            kept = CACHE / f"{name}-{_fingerprint(command, folder / 'text')}"
            if not kept.exists():
                self._undisturbed_run(folder, variant, kind, command)
                CACHE.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(dir=CACHE) as made, suppress(OSError):
                    shutil.copytree(folder / "runs" / "r", Path(made) / "r")
                    (Path(made) / "r").rename(kept)  # another attack may have been faster
            self._undisturbed[key] = kept
        return self._undisturbed[key]

    def _undisturbed_run(
        self, folder: Path, variant: str, kind: str, command: tuple[str, ...]
    ) -> None:
        run = folder / "runs" / "r"
        job = Job(folder, kind if kind == "python" else f"{kind} ranks", command, [])
        ended = attend(job, Episode("none"), {})
        assert ended.codes in ([0], [0, 0]), ended.output
        assert PATHS[variant][-1] in {*codes(run), ""}, ended.output
        assert not compare_history(run, run, VARIANTS[variant], Rows())

    def server(self) -> RealServer:
        """A real MLflow server, for all sequences that want one."""
        if self._server is None:
            folder = self.work / "server"
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier attack in the same place
            folder.mkdir()
            self._server = RealServer(folder)
            self._stack.callback(self._server.kill)
            self._server.start()
        return self._server


def _fingerprint(command: tuple[str, ...], text: Path) -> str:
    """Of everything that an undisturbed run depends on."""
    found = hashlib.sha256(repr(command).replace(str(text.parent), "").encode())
    own = [Path(__file__).with_name(name) for name in ("resume_models.py", "attack_driver.py")]
    for path in [
        *sorted((ROOT / "harness").rglob("*.[pt]*")),
        *sorted((ROOT / "recipes").iterdir()),
        *own,
        *text.iterdir(),
    ]:
        if path.is_file() and path.suffix != ".pyc":
            found.update(path.read_bytes())
    return found.hexdigest()[:16]
