"""`engine.deterministic` proves itself at the start: it costs the run no bit, and names an operation that is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from harness.checkpoint.policy import load_ledger, save_ledger
from harness.checkpoint.store import Store
from tests.support.matrix import rest_nightly
from tests.support.pairs import assert_same_state, different, figures, ran, state
from tests.support.runs import ROOT, events, harness, train, train_ranks

ON = "engine.deterministic=true"
STEPS = 4


def run_of(folder: Path, *arguments: str) -> Path:
    """The folder of a finished run of one process with the models beside this file."""
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / "tests" / "e2e" / "random_models.py", folder)
    done = train(folder, "--name", "r", f"train.steps={STEPS}", *arguments)
    assert done.returncode == 0, done.stdout
    return folder / "runs" / "r"


def assert_same_run(proven: Path, plain: Path) -> None:
    """Every figure and bit of the state; only the first one has proven itself."""
    assert len(events(proven, "deterministic.proven")) == 1
    assert not events(plain, "deterministic.proven")
    assert different(figures(proven), figures(plain)) == []
    assert_same_state(state(proven, STEPS), state(plain, STEPS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        ("--recipe", "fp8_hybrid", "model.target=random_models:kept"),
        ("--recipe", "fp16_scaler", "train.optimizer=sgd"),
        pytest.param(
            ("--recipe", "fp32", "train.optimizer=muon", "data.context=32"),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            ("--recipe", "fp8_hybrid", "engine.compile=blocks"), marks=pytest.mark.nightly
        ),
    ],
    ids=["fp8", "fp16", "muon", "compiled"],
)
def test_the_proof_costs_the_run_no_bit(tmp_path: Path, case: tuple[str, ...]) -> None:
    proven = run_of(tmp_path / "proven", *case, ON)
    assert_same_run(proven, run_of(tmp_path / "plain", *case))


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("engine", rest_nightly(["ddp", "fsdp"], "fsdp"))
def test_on_ranks_it_costs_no_bit(tmp_path: Path, engine: str) -> None:
    proven = ran(tmp_path / "proven", engine, "r", ON, steps=STEPS)
    assert_same_run(proven, ran(tmp_path / "plain", engine, "r", steps=STEPS))


@pytest.mark.slow
def test_a_resume_proves_itself_again_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    every = (ON, "checkpoint.every=2", "train.schedule=constant")
    straight = run_of(tmp_path / "straight", *every)
    run_of(tmp_path / "twice", *every, "train.steps=2")
    twice = run_of(tmp_path / "twice", *every)
    assert [event["step"] for event in events(twice, "deterministic.proven")] == [0, 2]
    assert events(twice, "resume.mismatch") == []
    assert_same_state(state(twice, STEPS), state(straight, STEPS))


@pytest.mark.slow
def test_a_resume_proves_the_precision_that_the_run_was_downgraded_to(tmp_path: Path) -> None:
    """Killed after a rollback to before its downgrade: the checkpoint is of fp16, and the run goes on in bf16."""
    small = ("data.context=16", "data.val_samples=2", "train.global_batch=2", "train.micro_batch=2")
    model = ("--recipe", "fp16_scaler", "model.target=random_models:noise_in_fp16")
    of_run = (*small, *model, "train.schedule=constant")
    run = run_of(tmp_path, *of_run, "train.steps=2")
    _, meta = Store(run / "checkpoints", readonly=True).load(2)
    ledger = load_ledger(run)
    assert ledger.continues(meta["ledger"]), "it takes the run's identity from there"
    ledger.lowered = "bf16"
    ledger.go_back(2, [])
    save_ledger(run, ledger)

    # In fp16 the steps do not repeat, and the start would be refused.
    run_of(tmp_path, *of_run, ON, "--accept-changed", "engine.deterministic")
    assert [event["step"] for event in events(run, "deterministic.proven")] == [2]
    assert "fp16" not in json.loads((run / "plan.json").read_text())["effective"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("noise", "in the forward of gpt.blocks.0.extra"),
        ("noise_behind", "in the backward of gpt.blocks.0.extra"),
        ("unwritten", "it reads memory that nothing has written"),
    ],
)
def test_an_operation_that_does_not_repeat_is_named(tmp_path: Path, model: str, named: str) -> None:
    shutil.copy(ROOT / "tests" / "e2e" / "random_models.py", tmp_path)
    line = ("--name", "r", f"train.steps={STEPS}", f"model.target=random_models:{model}")
    done = train(tmp_path, *line, ON)
    assert done.returncode == 2, done.stdout
    assert "the same step gives other bits" in done.stdout
    assert named in done.stdout
    assert "random_models.py" in done.stdout, "the line of the program"
    run = tmp_path / "runs" / "r"
    assert named in events(run, "deterministic.differs")[0]["text"]
    outcome = json.loads((run / "outcome.json").read_text())
    assert (outcome["exit_code"], outcome["step"]) == (2, 0)
    assert not list((run / "checkpoints").glob("step-*"))


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_agree_that_one_of_them_differs(tmp_path: Path) -> None:
    """Noise on one rank reaches the other one only in the update: the rank where it begins is named."""
    shutil.copy(ROOT / "tests" / "e2e" / "random_models.py", tmp_path)
    done = train_ranks(
        tmp_path,
        2,
        "--name",
        "r",
        ON,
        "train.steps=2",
        "model.target=random_models:noise_of_rank_1",
    )
    assert done.returncode == 2, done.stdout
    assert "in the forward of gpt.blocks.0.extra" in done.stdout
    assert "(rank 1)" in done.stdout


@pytest.mark.slow
def test_every_setting_is_logged(tmp_path: Path) -> None:
    run = run_of(tmp_path, "--recipe", "fp32", ON, "train.seed=7")
    (event,) = events(run, "deterministic.knobs")
    settings = event["knobs"]
    assert settings["train.seed"] == "7"
    assert settings["torch.use_deterministic_algorithms"] == "on"
    assert settings["cudnn.benchmark"] == "off"
    assert settings["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert settings["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    assert settings["NCCL_ALGO"] == "not set"
    assert "deterministic.proven" in harness(tmp_path, "explain", "deterministic.proven").stdout
