"""Two ranks that were started from different things: both refuse before the first step, and say what differs.

Run as a script, this file is one rank of `launch/train.py`; CASE says what is odd about rank 1.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from harness.core.errors import ExitCode
from harness.tools.agreement import differences
from tests.support import warm
from tests.support.runs import ROOT, TEXT, rank_logs, start_ranks

pytestmark = pytest.mark.dist

OWN_MODEL = """
import torch
from harness.models.gpt import build as gpt

def build(**args):
    return gpt(**args)
"""
# The file is the same on both ranks; what it reads is not.
OWN_DATA = """
import os
import torch

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        x = torch.full((8,), float(number) + int(os.environ["RANK"]))
        return {"x": x, "y": x[:1]}

class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, x, y):
        return (self.layer(x) - y).square().mean()

def build(**args):
    return Regression()
"""
# What is odd about rank 1, the exit code of both ranks, and what both must say.
CASES = {
    "start": (
        ExitCode.USAGE,
        (
            "train.lr: 0.001 on rank 0, 0.002 on rank 1",
            "train.seed: 1 on rank 0, 2 on rank 1",
            "recipe ladder: ",
            "code model.target: odd_model.py with SHA-256 ",
        ),
    ),
    "data": (ExitCode.USAGE, ("data sha256: ",)),
    "version": (ExitCode.MACHINE, ("version torch: ", "9.9.9 on rank 1")),
    "layers": (ExitCode.USAGE, ("model extra: ", "missing on rank 0, ")),
}


def rank_main(folder: Path, case: str, rank: int) -> None:
    words = ["--config", "tiny", f"data.path={TEXT}", "tracking.mlflow=false", "train.steps=2"]
    recipe = "bf16" if case == "start" and rank else "fp32"
    words += ["--recipe", recipe, "train.lr=0.001", "train.seed=1"]
    if case == "start" and rank:
        words += ["train.lr=0.002", "train.seed=2"]
    if case in ("start", "layers"):
        # Each rank has a module path of its own, as on machines of their own.
        own = folder / f"machine-{rank}"
        own.mkdir()
        text = OWN_MODEL
        if case == "start" and rank:
            text += "\n# edited\n"
        if case == "layers":
            text = text.replace("return gpt(**args)", LAYERS)
        (own / "odd_model.py").write_text(text)
        sys.path.insert(0, str(own))
        words.append("model.target=odd_model:build")
    if case == "data":
        sys.path.insert(0, str(folder))
        words += ["data.path=null", "data.target=odd_data:Numbers", "model.target=odd_data:build"]
    if case == "version" and rank:
        import torch

        torch.__version__ = type(torch.__version__)("9.9.9")

    from harness.cli import train_main

    sys.argv = ["train.py", *words, "--name", "r"]
    train_main()


LAYERS = """import os
    model = gpt(**args)
    if os.environ["RANK"] == "1":
        model.extra = torch.nn.Parameter(torch.zeros(3))
    return model"""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_odd_rank_is_refused_by_every_rank(tmp_path: Path, case: str) -> None:
    code, told = CASES[case]
    (tmp_path / "odd_data.py").write_text(OWN_DATA)
    line = [__file__, str(tmp_path), case]
    processes = start_ranks(tmp_path, 2, line, PYTHONPATH=str(ROOT))
    try:
        codes = [each.wait(warm.PATIENCE) for each in processes]
    finally:
        for each in processes:
            each.kill()
    outputs = [log.read_text() for log in rank_logs(tmp_path, 2)]
    assert codes == [code, code], outputs
    for output in outputs:
        assert "rank 1 differs from rank 0" in output
        assert [words for words in told if words not in output] == [], output
        assert "why: " in output
        assert "fix: " in output
    assert not list(tmp_path.rglob("journal.jsonl")), "nothing was trained"


def test_the_odd_rank_of_many_is_found() -> None:
    usual = {"config": {"train.lr": 0.1, "train.steps": 5}, "version": {"torchao": "1"}}
    odd = {"config": {"train.lr": 0.2, "train.steps": 5}, "version": {"torchao": "1"}}
    (problem,) = differences([odd, usual, usual, usual]).values()
    assert problem.what == (
        "rank 0 differs from the other 3 ranks: train.lr: 0.2 on rank 0, 0.1 on ranks 1, 2, 3"
    )


def test_a_library_that_one_rank_lacks_is_no_difference() -> None:
    """The ladder of the recipe finds a rung without it."""
    lacks, has, other = ({"version": {"torchao": text}} for text in ("", "1", "2"))
    assert differences([lacks, has, has]) == {}
    assert list(differences([lacks, has, other])) == ["version"]


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"]))
