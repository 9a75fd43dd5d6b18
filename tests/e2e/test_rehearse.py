"""`harness rehearse` on real runs and configs: the verdict, the recipe, and a run that stays as it was."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from harness.core.config import load_config
from harness.core.errors import CheckpointError, ConfigError, HarnessError
from harness.core.files import find
from harness.core.state import RunLedger
from harness.precision.recipe import load_recipe
from harness.rehearse.begin import of_run
from harness.rehearse.rehearsal import nudge
from harness.tools.rehearse import command
from tests.support.runs import ROOT, TEXT, events, harness, metrics, train

pytestmark = pytest.mark.slow

BAD, MARKED = 8, 28
"""The step whose window has the marked sample, and that sample."""


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A rehearsal in this process sets threads and matmul precision, and writes into the working folder."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "e2e"))
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(before[0])
    torch.set_float32_matmul_precision(before[1])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished FP8 run of 10 steps with checkpoints of steps 5 and 10. Not to be changed."""
    folder = tmp_path_factory.mktemp("run")
    done = train(folder, "--name", "r", "train.steps=10")
    assert done.returncode == 0, done.stdout
    return folder / "runs" / "r"


def rehearse(capsys: pytest.CaptureFixture[str], *words: str, **options: Any) -> dict[str, Any]:
    """The object that --json prints."""
    options = {"steps": 6, "no_picture": True, **options}
    assert command(list(words), as_json=True, **options) == 0
    return json.loads(capsys.readouterr().out)


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def config_with(target: str, marks: Sequence[int] = (MARKED,)) -> str:
    """The config of an `origin_models` target, on a text with marked samples; returns its path."""
    text = bytearray((TEXT / "chapters.txt").read_bytes()[:6000])
    for sample in marks:
        text[64 * sample + 8] = 7
    Path("text.txt").write_bytes(text)
    config = yaml.safe_load(find("configs", "tiny").read_text())
    config["model"] = {"target": f"origin_models:{target}", "args": {}}
    config["data"]["path"] = str(Path("text.txt").absolute())
    config["tracking"]["mlflow"] = False
    Path("bad.yaml").write_text(yaml.safe_dump(config))
    return "./bad.yaml"


def test_the_run_stays_as_it_was_and_goes_on_alike(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    copied = work / "runs" / "r"
    shutil.copytree(run, copied)
    before = contents(copied)
    generators = torch.get_rng_state()
    found = rehearse(capsys, str(copied), from_step=5, precisions="fp8", steps=3)
    assert contents(copied) == before
    assert torch.equal(torch.get_rng_state(), generators)

    # From the checkpoint the FP8 branch has the run's own bits; the reference has not.
    own = dict(metrics(run))
    losses = {branch["name"]: branch["losses"] for branch in found["branches"]}
    assert losses["fp8"] == [own[6], own[7], own[8]]
    assert losses["fp32"] != losses["fp8"]
    assert found["begin"]["step"] == 5
    assert (found["verdict"], found["own_precision"], found["bad"]) == ("sound", "fp8", [])
    assert not [note for note in found["notes"] if "differs from its journal" in note]

    # The run goes on with the same bits as one that was never rehearsed.
    never = tmp_path / "never"
    shutil.copytree(run, never / "runs" / "r")
    for folder in (work, never):
        done = train(folder, "--name", "r", "train.steps=13")
        assert done.returncode == 0, done.stdout
    assert metrics(copied) == metrics(never / "runs" / "r")
    assert metrics(copied)[-1][0] == 13


def test_the_object_has_all_that_a_program_needs(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rehearse(capsys, str(run), steps=4, precisions="bf16, fp8", no_picture=False)
    # No incident, and no checkpoint leaves four steps before the run's end but the one of step 5.
    assert (found["begin"]["step"], found["begin"]["steps"], found["begin"]["incident"]) == (
        5, 4, None,
    )  # fmt: skip
    assert [branch["name"] for branch in found["branches"]] == [
        "fp32", "fp32, one ulp apart", "bf16", "fp8",
    ]  # fmt: skip
    reference, control, _, fp8 = found["branches"]
    assert reference["gap"] is None
    assert abs(control["gap"]) < abs(fp8["gap"]), "one ulp is less than what FP8 rounds away"
    for branch in found["branches"]:
        assert len(branch["losses"]) == branch["steps"] == 4
        assert branch["fault"] is None
        assert branch["seconds_per_step"] > 0
        assert branch["peak_memory_gib"] > 0
    assert found["predicted_demotions"] == []
    slots = {(row["layer"], row["role"]) for row in found["slots"]}
    assert ("blocks.01.mlp.down", "grad_output") in slots
    assert len(slots) == 8 * 3
    assert all(row["sqnr_db"] > 5 for row in found["slots"]), "measured in however few steps"
    assert found["left_out"] == {}
    assert Path(found["recipe"]["path"]).is_file()
    assert Path(found["picture"]).read_bytes().startswith(b"\x89PNG")


def test_the_bad_window_is_the_datas_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rehearse(capsys, config=config_with("forward"), precisions="bf16", recipe=None, steps=9)
    assert found["verdict"] == "data"
    assert "window 7" in found["why"]
    by_name = {branch["name"]: branch for branch in found["branches"]}
    assert by_name["fp32"]["fault"]["step"] == BAD
    assert by_name["fp32, lr / 10"]["fault"]["step"] == BAD
    assert by_name["fp32, without windows"]["fault"] is None
    assert found["recipe"] is None, "no FP8 branch, no recipe"
    assert not list(tmp_path.glob("rehears*"))


def test_what_breaks_in_every_window_is_the_models_fault(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = rehearse(capsys, config=config_with("moody", marks=()), precisions="fp32", steps=5)
    assert found["verdict"] == "model"
    assert {branch["fault"]["step"] for branch in found["branches"]} == {4}


@pytest.mark.nightly
def test_what_only_fp16_cannot_hold_is_precision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_with("large")
    text = Path(path).read_text()
    Path(path).write_text(text.replace("recipe: fp8_hybrid", "recipe: fp16_scaler"))
    found = rehearse(capsys, config=path, precisions="bf16,fp16", steps=9)
    assert (found["verdict"], found["bad"]) == ("precision", ["fp16"])
    # The same of a run, from just before its step.
    shutil.copy(ROOT / "tests" / "e2e" / "origin_models.py", tmp_path)
    text_path = f"data.path={tmp_path / 'text.txt'}"
    done = train(tmp_path, "--config", path, "--name", "r", f"train.steps={BAD}", text_path)
    assert done.returncode == 0, done.stdout
    run = tmp_path / "runs" / "r"
    before = contents(run)
    found = rehearse(capsys, str(run), before=BAD, precisions="fp16", steps=9)
    assert (found["verdict"], found["begin"]["step"]) == ("precision", 5)
    assert found["begin"]["incident"] == BAD
    assert contents(run) == before
    with pytest.raises(ConfigError, match="give at least 3"):
        rehearse(capsys, str(run), before=BAD, precisions="fp16", steps=2)


def test_a_run_that_halted_is_rehearsed_from_before_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A marked sample in each window of the steps 7, 8 and 9.
    path = config_with("forward", marks=[31, 44, 40])
    shutil.copy(ROOT / "tests" / "e2e" / "origin_models.py", tmp_path)
    words = ("--config", path, "--name", "r", "train.steps=12", "guard.max_consecutive_skips=3")
    done = train(tmp_path, *words, f"data.path={tmp_path / 'text.txt'}")
    assert done.returncode == 3, done.stdout
    run = tmp_path / "runs" / "r"
    assert [event["step"] for event in events(run, "guard.halt")] == [9]
    before = contents(run)
    found = rehearse(capsys, str(run), precisions="bf16,fp8", steps=8)
    assert contents(run) == before
    assert (found["begin"]["step"], found["begin"]["incident"]) == (5, 9)
    assert found["verdict"] == "data"
    assert "window 6, 7, 8" in found["why"]
    assert "harness replay" in found["advice"]
    by_name = {branch["name"]: branch for branch in found["branches"]}
    assert by_name["fp8"]["fault"]["kind"] == "rollback"
    assert by_name["fp8"]["fault"]["step"] == 9
    assert not [note for note in found["notes"] if "differs from its journal" in note]


@pytest.mark.nightly
def test_a_rate_at_which_nothing_is_learnt_is_the_learning_rate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (f"data.path={TEXT}", "train.lr=1.0", "train.warmup_steps=1")
    found = rehearse(capsys, *words, config="tiny", precisions="fp32", steps=20)
    assert found["verdict"] == "learning rate"


@pytest.mark.nightly
def test_a_run_that_was_downgraded_has_its_reference_in_float32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # fp16 cannot hold a sample of each window of the steps 7 to 9: the whole run goes to bf16.
    path = config_with("large", marks=[31, 44, 40])
    shutil.copy(ROOT / "tests" / "e2e" / "origin_models.py", tmp_path)
    words = ("--config", path, "--name", "r", "--recipe", "fp16_scaler", "train.steps=18")
    done = train(tmp_path, *words, f"data.path={tmp_path / 'text.txt'}")
    assert done.returncode == 0, done.stdout
    run = tmp_path / "runs" / "r"
    (switched,) = events(run, "precision.switched")
    assert switched["lowered"] == "bf16"
    found = rehearse(capsys, str(run), from_step=15, precisions="fp16", steps=3)
    reference, _, fp16 = found["branches"]
    assert (reference["fell_back_to"], fp16["fell_back_to"]) == ("", "bf16")
    own = dict(metrics(run))
    assert fp16["losses"] == [own[step] for step in (16, 17, 18)]
    assert reference["losses"] != fp16["losses"]


def test_no_branch_repeats_a_run_whose_loss_scale_was_its_engines(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # What DeepSpeed's fp16 leaves behind: its name at every step, and the precision in the plan.
    copied = tmp_path / "r"
    shutil.copytree(run, copied)
    journal = copied / "journal.jsonl"
    journal.write_text(journal.read_text().replace('"engine": "single"', '"engine": "deepspeed"'))
    plan = json.loads((copied / "plan.json").read_text())
    (copied / "plan.json").write_text(json.dumps({**plan, "resolved": "autocast:fp16"}))
    found = rehearse(capsys, str(copied), before=7, precisions="fp16", steps=2)
    assert (found["own_precision"], found["verdict"]) == ("fp16", "sound")
    assert [note for note in found["notes"] if "loss scale was DeepSpeed's" in note]
    assert not [note for note in found["notes"] if "differs from its journal" in note]


def test_from_the_initial_weights_no_budget_is_spent_yet(run: Path, tmp_path: Path) -> None:
    # What the run spent in its later steps would halt a branch at its first skipped update.
    copied = tmp_path / "r"
    shutil.copytree(run, copied)
    spent = RunLedger(skips=50, switches=3, lowered="bf16", recent_skips=[9] * 50, attempt=2)
    (copied / "incidents.json").write_text(json.dumps(asdict(spent)))
    config = load_config(str(copied / "config.yaml"), [])
    for from_step in (0, None):
        begin = of_run(copied, config, 10, from_step, None)
        assert (begin.step, begin.attempt) == (0, 2), "on the present branch"
        ledger = begin.ledger
        assert (ledger.skips, ledger.switches, ledger.recent_skips) == (0, 0, [])
        assert ledger.lowered == ""


@pytest.fixture(scope="module")
def changed(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run`, resumed after step 10 at another rate, until step 13. Not to be changed."""
    folder = tmp_path_factory.mktemp("changed")
    shutil.copytree(run, folder / "runs" / "r")
    words = ("train.steps=13", "train.lr=0.0001", "--accept-changed", "train.lr")
    done = train(folder, "--name", "r", *words)
    assert done.returncode == 0, done.stdout
    return folder / "runs" / "r"


def test_steps_from_before_a_change_are_rehearsed_with_the_config_that_they_had(
    changed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rehearse(capsys, str(changed), from_step=5, precisions="fp8", steps=3)
    own = dict(metrics(changed))
    losses = {branch["name"]: branch["losses"] for branch in found["branches"]}
    assert losses["fp8"] == [own[6], own[7], own[8]]
    assert not [note for note in found["notes"] if "differs from its journal" in note]


def test_a_rehearsal_begins_with_the_config_of_its_first_step(changed: Path) -> None:
    config = load_config(str(changed / "config.yaml"), ["engine.name=auto"])
    # Steps 1 to 10 were done at the first rate, in a schedule of 10 steps. Step 11 was done after the change.
    for from_step, lr, total in ((0, 0.003, 10), (5, 0.003, 10), (10, 0.0001, 13)):
        begin = of_run(changed, config, 3, from_step, None)
        assert (begin.step, begin.config.train.lr, begin.config.train.steps) == (
            from_step, lr, total,
        )  # fmt: skip
        assert begin.steps == 3
        assert begin.config.engine.name == "auto", "one process, whatever the run had"

    # Of its own choice: a checkpoint that leaves the steps to the end of the schedule that it had.
    assert of_run(changed, config, 4, None, None).step == 5
    begin = of_run(changed, config, 8, None, None)
    assert (begin.step, begin.config.train.lr) == (0, 0.003)


def test_no_branch_repeats_steps_from_before_a_change_of_the_recipe(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "runs" / "r")
    words = ("train.steps=11", "--recipe", "bf16", "--accept-changed", "recipe")
    done = train(tmp_path, "--name", "r", *words)
    assert done.returncode == 0, done.stdout
    found = rehearse(capsys, str(tmp_path / "runs" / "r"), from_step=5, precisions="bf16", steps=1)
    assert [note for note in found["notes"] if "from fp8_hybrid to bf16" in note]
    assert not [note for note in found["notes"] if "differs from its journal" in note]


GROWING = {"layer": "blocks.0.mlp.down", "per_window": 1.0, "dim": 64, "layers": 2, "heads": 2}


@pytest.mark.nightly
def test_the_layer_that_leaves_fp8_is_predicted_and_the_recipe_keeps_it_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        f"data.path={TEXT}",
        "tracking.mlflow=false",
        "train.steps=40",
        "train.micro_batch=4",
        "model.target=benchmarks.outliers:growing",
        f"model.args={json.dumps({**GROWING, 'ffn': 176})}",
    )
    found = rehearse(capsys, *words, config="tiny", precisions="fp8", steps=40)
    assert found["predicted_demotions"] == ["blocks.00.mlp.down"]
    assert found["recipe"]["exclude"] == ["blocks.0.mlp.down"]
    assert found["slots"][0]["layer"] == "blocks.00.mlp.down"
    trial = found["branches"][-1]
    assert trial["name"] == "fp8, recipe written"

    # `--recipe` takes it, and the plan of such a run says that this layer is in bf16.
    recipe = load_recipe("rehearsed.yaml")
    assert recipe.ladder == load_recipe("fp8_hybrid").ladder
    done = train(tmp_path, "--recipe", "./rehearsed.yaml", "--name", "r", "train.steps=2", *words[1:2],
                 *words[4:], PYTHONPATH=str(ROOT))  # fmt: skip
    assert done.returncode == 0, done.stdout
    plan = json.loads((tmp_path / "runs" / "r" / "plan.json").read_text())
    precisions = {row["module"]: row["precision"] for row in plan["layers"]}
    assert precisions["blocks.0.mlp.down"] == "bf16"
    assert precisions["blocks.1.mlp.down"] == "fp8"

    # What is there is not overwritten, and nothing is trained before that is said.
    with pytest.raises(ConfigError, match="not overwritten"):
        rehearse(capsys, *words, config="tiny", precisions="fp8")


def test_what_cannot_be_rehearsed_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str, error: type[HarnessError] = ConfigError, **options: Any) -> str:
        with pytest.raises(error) as raised:
            rehearse(capsys, *words, **options)
        assert raised.value.exit_code == 2
        return str(raised.value)

    assert 'did you mean "fp16"' in refused(str(run), precisions="fp32,fp61")
    assert "names none" in refused(str(run), precisions=" , ")
    assert "name one run" in refused()
    assert "2 words" in refused(str(run), "train.lr=1")
    assert "a config has no checkpoints" in refused(config="tiny", from_step=5)
    assert "give one of them" in refused(str(run), from_step=5, before=8)
    assert "has no FP8 rung" in refused(str(run), recipe="bf16")
    assert "steps 5, 10" in refused(str(run), from_step=7, error=CheckpointError)
    assert "its schedule has ended" in refused(str(run), from_step=10)
    assert "its steps are 1 to 10" in refused(str(run), before=400)
    (tmp_path / "foreign").mkdir()
    assert "not a run" in refused(str(tmp_path / "foreign"))
    Path("file").write_text("")
    assert "is no folder" in refused(str(run), out=Path("file"))
    assert "file is a file" in refused(str(run), out=Path("file/below"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        assert "it cannot be written" in refused(str(run), out=Path("new"))

    # Of a loop of one's own only that loop knows the model.
    own = tmp_path / "own"
    shutil.copytree(run, own)
    (own / "config.yaml").unlink()
    assert "only that loop knows its model" in refused(str(own))

    # No checkpoint is left: the seed gives the initial weights, and not those of another run's checkpoint.
    bare = tmp_path / "bare"
    shutil.copytree(run, bare)
    shutil.rmtree(bare / "checkpoints")
    assert rehearse(capsys, str(bare), steps=1, precisions="fp32")["begin"]["step"] == 0
    with (bare / "journal.jsonl").open("a") as journal:
        event = {"kind": "event", "code": "run.started_from", "step": 3, "attempt": 1, "time": 0.0}
        journal.write(json.dumps(event) + "\n")
    assert "began from another's" in refused(str(bare), error=CheckpointError)


def test_the_control_is_one_unit_in_the_last_place_apart() -> None:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([0.0, -1.5]))
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    before = [parameter.detach().clone() for parameter in (model.weight, model.bias, frozen.weight)]
    nudge(torch.nn.Sequential(model, frozen))

    # Neighbours of one sign are neighbouring numbers if their bits are read as whole numbers.
    change = (model.weight.view(torch.int32) - before[0].view(torch.int32)).abs()
    assert bool((change == 1).all())
    assert bool((model.weight > before[0]).all())
    assert model.bias.tolist() == [0.0, -1.5 + 2**-23]
    assert torch.equal(frozen.weight, before[2])


def test_steps_of_zero_end_with_the_code_of_a_wrong_command(run: Path) -> None:
    done = harness(run.parent.parent, "rehearse", "runs/r", "--steps", "0")
    assert done.returncode == 2
    assert "--steps" in done.stderr
