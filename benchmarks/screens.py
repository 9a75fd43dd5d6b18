"""Pictures of what commands show, for the pages of docs/guide: docs/images/<name>.png.

    python -m benchmarks.screens [estimate doctor doctor_card runs compare follow profile drill] [--out FOLDER]

Each command runs in a folder with a few short runs of the config `tiny`, and what it prints is photographed in Chromium
as a terminal shows it. `harness compare` and `harness drill` make a picture and a page themselves: these are taken.
`--work FOLDER` keeps the runs and the drill for the next time.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

from tests.ui.browser import Browser, browser

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
COLUMNS = 110
# These tables have one line a row, however long.
WIDER = {"runs": 155, "profile": 135}
# Enough for black text on white with a few colours, in a third of the bytes.
SHADES = 24
# Names as of a user's first run.
RUN, OTHER = "quickstart-fp8_hybrid", "slower"

LINES = {
    "estimate": "harness estimate --card H100 --card T4 --price H100=2.20 --price T4=0.35 --config tiny",
    "doctor": "harness doctor --config mine.yaml",
    "doctor_card": "harness doctor --card --memory-share 0.0001 --soak 1",
    "runs": "harness runs",
    "follow": "harness inspect runs/live --follow --slots 8",
    "profile": f"harness profile runs/{RUN} --card H100",
}
NAMES = (*LINES, "compare", "drill")
# Where the part begins that a picture shows, if it does not show all that is printed.
BEGINS = {"doctor_card": "Answers, bit for bit"}

# A model with three kinds of defects.
MODEL = """
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Mine(nn.Module):
    vocab_size = 256

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 100)
        self.up = nn.Linear(100, 400)
        self.down = nn.Linear(400, 100)
        self.out = nn.Linear(100, 256)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(inputs)
        x = x + self.down(F.gelu(self.up(x)))
        x = x / x.std(-1, keepdim=True)
        logits = self.out(x)
        probabilities = logits.float().softmax(-1)
        return F.nll_loss(torch.log(probabilities).flatten(0, 1), targets.flatten())


def build() -> Mine:
    return Mine()
"""
CONFIG = """
recipe: bf16
train: {steps: 100, global_batch: 8, micro_batch: 4, eval_every: 0}
data: {path: text, context: 64, val_samples: 8}
model: {target: "mine:build"}
"""


class Folder:
    """A user's folder: text, a model of his own, and runs as they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        shutil.copytree(ROOT / "tests" / "golden" / "text", path / "text", dirs_exist_ok=True)
        (path / "mine.py").write_text(MODEL)
        (path / "mine.yaml").write_text(CONFIG)

    def start(self, *words: str, colours: bool = False) -> subprocess.Popen[str]:
        """Start `harness` with `words`; what it prints is its stdout."""
        variables = os.environ | {
            "PYTHONPATH": f"{ROOT}:{self.path}",
            "COLUMNS": str(COLUMNS),
            "OMP_NUM_THREADS": "1",
        }
        if colours:
            variables["FORCE_COLOR"] = "1"
        return subprocess.Popen(
            [sys.executable, "-m", "harness.cli", *words],
            cwd=self.path,
            env=variables,
            stdout=subprocess.PIPE,
            text=True,
        )

    def output(self, line: str, *, colours: bool = True) -> str:
        """What the command `line` prints. Ends the program if it fails."""
        process = self.start(*shlex.split(line)[1:], colours=colours)
        text, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"{line} ended with {process.returncode}:\n{text}")
        return text

    def begin(self, name: str, *overrides: str) -> subprocess.Popen[str]:
        """Start a run of `tiny`."""
        given = ("data.path=text", "tracking.mlflow=false", "train.steps=12", *overrides)
        return self.start("train", "--config", "tiny", "--name", name, *given)

    def train(self, name: str, *overrides: str) -> None:
        """A whole run of `tiny`, if there is none of that name."""
        if (self.path / "runs" / name).exists():
            return
        process = self.begin(name, *overrides)
        text, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"{name} ended with {process.returncode}:\n{text}")

    def interrupt(self, name: str, number: int) -> None:
        """A run that gets a signal after its first steps, if there is none of that name."""
        if (self.path / "runs" / name).exists():
            return
        process = self.begin(name, "train.steps=1000")
        assert process.stdout is not None
        for line in process.stdout:
            if re.match(r"step +3/", line):
                process.send_signal(number)
                break
        process.communicate()


def of_runs(folder: Folder) -> str:
    """`harness runs` of runs that ended in several ways."""
    folder.train(RUN, "train.profile_steps=[8,10]")
    folder.train(OTHER, "train.lr=0.001")
    folder.interrupt("preempted", signal.SIGTERM)
    folder.interrupt("killed", signal.SIGKILL)
    (folder.path / "runs" / "notes").mkdir(exist_ok=True)
    (folder.path / "runs" / "notes" / "notes.txt").write_text("no run")
    return folder.output(LINES["runs"])


def of_follow(folder: Folder) -> str:
    """The last view of a run that still trains."""
    shutil.rmtree(folder.path / "runs" / "live", ignore_errors=True)
    trains = folder.begin("live", "train.steps=40")
    while not (folder.path / "runs" / "live" / "journal.jsonl").exists() and trains.poll() is None:
        time.sleep(0.1)
    text = folder.output(LINES["follow"], colours=False)
    trains.communicate()
    views = [f"live: {view}" for view in text.split("live: ")[1:]]
    return [view for view in views if view.startswith("live: running")][-1]


def of_profile(folder: Folder) -> str:
    """A step's time beside the predicted one."""
    folder.train(RUN, "train.profile_steps=[8,10]")
    return folder.output(LINES["profile"])


def terminal(line: str, text: str, columns: int) -> str:
    """The page that shows a command and what it printed, with the colours of `text`."""
    console = Console(record=True, width=columns, file=io.StringIO(), highlight=False)
    console.print(Text(f"$ {line}\n", "bold"))
    console.print(Text.from_ansi(text.rstrip()))
    style = (
        "margin: 0; padding: 14px; display: inline-block; font: 13px 'DejaVu Sans Mono', monospace"
    )
    return console.export_html(
        inline_styles=True,
        code_format=f'<meta charset="utf-8"><body style="margin: 0"><pre style="{style}">{{code}}</pre></body>',
    )


def photograph(page: Browser, html: Path, image: Path) -> None:
    """A photograph of a page as large as what is on it; of a page with headings the part before the second one."""
    page.open(html.as_uri())
    page.wait("document.body && document.readyState === 'complete'")
    shown = "(document.querySelector('body > pre') || document.documentElement)"
    width, height = (page.ask(f"Math.ceil({shown}.scroll{side})") for side in ("Width", "Height"))
    height = page.ask("document.querySelector('h2')?.offsetTop") or height
    page.resize(width, height)
    page.photograph(image)
    Image.open(image).convert("RGB").quantize(SHADES).save(image, optimize=True)


def picture(name: str, folder: Folder, out: Path) -> None:
    """Make the picture `name` in the folder `out`."""
    image = out / f"{name}.png"
    if name == "compare":
        folder.train(RUN, "train.profile_steps=[8,10]")
        folder.train(OTHER, "train.lr=0.001")
        folder.output(f"harness compare {RUN} {OTHER}")
        shutil.copy(folder.path / f"compare-{RUN}-{OTHER}.png", image)
        return
    html = folder.path / f"{name}.html"
    if name == "drill":
        drilled = folder.path / "drills" / "tiny-fp8_hybrid" / "drill.html"
        if not drilled.exists():
            folder.output("harness drill --config tiny data.path=text")
        shutil.copy(drilled, html)
    else:
        special = {"runs": of_runs, "follow": of_follow, "profile": of_profile}
        made = special[name](folder) if name in special else folder.output(LINES[name])
        if name in BEGINS:
            made = f"...\n{made[made.index(BEGINS[name]) :]}"
        html.write_text(terminal(LINES[name], made, WIDER.get(name, COLUMNS)))
    with browser(width=1000, height=400) as page:
        photograph(page, html, image)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", default=NAMES)
    parser.add_argument("--out", type=Path, default=IMAGES)
    parser.add_argument("--work", type=Path, help="folder that is kept; default: a temporary one")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        work.mkdir(exist_ok=True)
        folder = Folder(work.resolve())
        for name in options.names:
            picture(name, folder, options.out)
            print(options.out / f"{name}.png")


if __name__ == "__main__":
    main()
