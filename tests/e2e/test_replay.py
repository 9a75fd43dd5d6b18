"""`harness replay` on real runs: module, direction, sample, precision, and whether the bits come back."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from harness.build import join_worker
from harness.checkpoint.store import Store
from harness.core.config import load_config
from harness.core.errors import ConfigError
from harness.core.facts import StepFacts
from harness.core.files import find
from harness.core.state import RunLedger
from harness.replay.kept import keep, restore
from harness.tools.replay import rebuild, replay
from tests.support.runs import ROOT, events, harness, metrics, train

pytestmark = pytest.mark.faults(10)

BAD = 8
"""The step whose window has the marked sample; the checkpoint before it is of step 5."""
MARKED = 28
"""That sample. The windows of steps 7 to 10 are 31 45 77 74, 44 53 28 75, 40 20 72 83 and 10 13 63 41."""


def start(
    folder: Path, target: str, *arguments: str, marks: Sequence[int] = (MARKED,), **launch: Any
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Train `origin_models:<target>` on a text with a marked byte in the samples `marks`."""
    shutil.copy(ROOT / "tests" / "e2e" / "origin_models.py", folder)
    text = (ROOT / "tests" / "golden" / "text" / "chapters.txt").read_bytes()
    text = bytearray(text[:6000])
    for sample in marks:
        text[64 * sample + 8] = 7
    (folder / "text.txt").write_bytes(text)
    config = yaml.safe_load(find("configs", "tiny").read_text())
    config["model"] = {"target": f"origin_models:{target}", "args": {}}
    (folder / "bad.yaml").write_text(yaml.safe_dump(config))
    fixed = (
        "--config",
        "bad.yaml",
        "--name",
        "r",
        f"data.path={folder / 'text.txt'}",
        f"train.steps={BAD}",
    )
    done = train(folder, *fixed, *arguments, **launch)
    return folder / "runs" / "r", done


@pytest.fixture(scope="module")
def backward_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that skipped one step, whose gradient was NaN from block 1 on backwards. Not to be changed."""
    run, done = start(tmp_path_factory.mktemp("backward"), "backward")
    assert done.returncode == 0, done.stdout
    assert [step for step, applied in metrics(run, "train/step_applied") if applied == 0.0] == [BAD]
    assert f"harness replay {run.relative_to(run.parent.parent)} --step {BAD}" in done.stdout
    return run


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """A replay in this process sets threads and matmul precision."""
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(before[0])
    torch.set_float32_matmul_precision(before[1])


def in_process(
    run: Path, step: int, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[dict[str, Any], str]:
    """(replay.json, what the terminal shows)."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    shown: list[str] = []
    assert replay(run, step, options.get("anomaly", False), shown.append) == 0
    return report(run, step), "\n".join(shown)


def report(run: Path, step: int) -> dict[str, Any]:
    return json.loads((run / "flight" / f"step-{step:08d}" / "replay.json").read_text())


def contents(run: Path) -> dict[str, str]:
    files = (path for path in run.rglob("*") if path.is_file() and path.name != "replay.json")
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


@pytest.mark.slow
def test_the_module_the_direction_and_the_sample_are_named(backward_run: Path) -> None:
    before = contents(backward_run)
    done = harness(backward_run.parent.parent, "replay", "runs/r", "--step", str(BAD), "--anomaly")
    assert done.returncode == 0, done.stdout + done.stderr
    assert contents(backward_run) == before, "nothing but the report is written into the run"
    answer = report(backward_run, BAD)
    assert answer["cause"] == "model or data"
    assert (answer["base"], answer["difference"]) == (5, None), (
        "two steps and the bad one, bit for bit"
    )
    origin = answer["finding"]
    assert (origin["module"], origin["direction"], origin["operation"]) == (
        "marks",
        "backward",
        "SqrtBackward0",
    )
    assert origin["tensor"] == "gradient of its input"
    assert "origin_models.py:" in origin["where"]
    assert "zero.sqrt()" in origin["where"]
    assert origin["nan"] == 64 * 64, "one sample of the two, 64 tokens of 64 features"
    assert answer["finding_in_float32"]["module"] == "marks"
    assert [sample["number"] for sample in answer["samples"] if sample["bad"]] == [MARKED]
    bad = {each["parameter"] for each in answer["gradients"] if each["bad"]}
    assert "embed.weight" in bad
    assert "blocks.1.mlp.down.weight" not in bad, "it lies behind the guilty place"
    assert "Error detected in SqrtBackward0" in answer["anomaly"]
    assert "zero.sqrt()" in answer["anomaly"], "autograd's own trace shows the line"
    for words in (
        "module marks (Backward)",
        f"sample {MARKED} ",
        "verdict: model or data",
        "bit for bit",
    ):
        assert words in done.stdout


@pytest.mark.slow
def test_what_only_fp16_cannot_hold_is_told_as_numerics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, done = start(tmp_path, "large", "--recipe", "fp16_scaler")
    assert done.returncode == 0, done.stdout
    assert [event["step"] for event in events(run, "nonfinite.skip")] == [BAD]
    answer, _ = in_process(run, BAD, monkeypatch)
    assert answer["cause"] == "numerics"
    assert answer["difference"] is None
    origin = answer["finding"]
    assert (origin["module"], origin["direction"], origin["dtype"]) == (
        "marks.up",
        "forward",
        "float16",
    )
    assert (origin["nan"], origin["inf"], origin["micro_batch"]) == (0, 64 * 64, 2)
    assert origin["operation"] == "torch.nn.functional.linear"
    assert "loud = self.up(" in origin["where"]
    assert [sample["number"] for sample in answer["samples"] if sample["bad"]] == [MARKED]
    assert math.isfinite(answer["in_float32"]["loss"])
    assert answer["finding_in_float32"] is None


@pytest.mark.slow
def test_another_loss_than_the_journals_is_not_reproducible(
    backward_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "r"
    shutil.copytree(backward_run, run)
    config = run / "config.yaml"
    config.write_text(
        config.read_text().replace(f"steps: {BAD}", "steps: 500")
    )  # as a resume may; lr depends on it
    journal = run / "journal.jsonl"
    loss = dict(metrics(run))[7]
    other = float(torch.tensor(loss).nextafter(torch.tensor(9.0)))
    text = journal.read_text()
    assert text.count(f'"train/loss": {loss!r}') == 1
    journal.write_text(text.replace(f'"train/loss": {loss!r}', f'"train/loss": {other!r}'))
    answer, shown = in_process(run, BAD, monkeypatch)
    assert answer["cause"] == "not reproducible"
    assert answer["difference"] == {
        "step": 7,
        "metric": "train/loss",
        "journal": other,
        "here": loss,
    }, "one bit"
    assert "from step 7 on" in shown
    assert answer["finding"]["module"] == "marks", (
        "and the finding of the replay is reported all the same"
    )


@pytest.mark.slow
def test_steps_without_a_record(backward_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, shown = in_process(backward_run, 7, monkeypatch)
    assert answer["cause"] == "sound"
    assert answer["base"] == 5
    assert "steps 6 to 7 reproduced bit for bit" in shown
    with pytest.raises(ConfigError, match=rf"steps with a record \({BAD}\)") as raised:
        replay(backward_run, 400, False)
    assert raised.value.exit_code == 2
    assert not (backward_run / "flight" / "step-00000400").exists()


@pytest.mark.slow
def test_a_run_folder_that_takes_no_file_has_its_answer_on_the_screen(
    backward_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(backward_run, tmp_path / "r", symlinks=True)
    shutil.rmtree(run / "flight" / "step-00000007", ignore_errors=True)
    (run / "flight" / "step-00000007").write_bytes(b"")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shown: list[str] = []
    assert replay(run, 7, False, shown.append) == 0
    assert "steps 6 to 7 reproduced bit for bit" in "\n".join(shown)
    assert re.fullmatch("no report: .*replay.json: .*", shown[-1])


@pytest.mark.slow
def test_a_step_under_anothers_loss_scale_is_refused(backward_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(backward_run, tmp_path / "r", symlinks=True)
    record = next((run / "flight").glob("step-*/record.json"))
    record.write_text(json.dumps({**json.loads(record.read_text()), "engine": "deepspeed"}))
    replay(run, BAD, False, lambda text: None)
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps({**plan, "resolved": "autocast:fp16"}))
    with pytest.raises(ConfigError, match="step 8: DeepSpeed's fp16 cannot be replayed"):
        replay(run, BAD, False, lambda text: None)


def no_room(
    facts: StepFacts, samples: Sequence[int], codes: Sequence[str], ledger: RunLedger
) -> bool:
    """A flight recorder on a full disk."""
    raise OSError(28, "No space left on device")


@pytest.mark.slow
def test_a_record_that_cannot_be_kept_is_an_event_and_ends_nothing(
    backward_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = load_config(str(backward_run / "config.yaml"))
    worker = join_worker(config, "python")
    again = rebuild(backward_run, tmp_path, worker, config, config.recipe, RunLedger(), 1)
    again.start(5, Store(backward_run / "checkpoints", readonly=True))
    again.run.keep_flight = no_room
    facts = [again.advance().facts for _ in range(4)]
    again.close()
    assert [each.applied for each in facts] == [True, True, False, True], (
        "the fault fired, and training went on"
    )
    assert [
        (event["step"], event["text"]) for event in events(again.run.folder, "flight.failed")
    ] == [(BAD, "[Errno 28] No space left on device")]


def test_what_is_due_before_a_step_is_done_before_every_run_of_it(
    backward_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = load_config(str(backward_run / "config.yaml"), ["guard.rollback_lr_factor=0.5"])
    worker = join_worker(config, "python")
    once = RunLedger(attempt=2, returned_to=[0])
    again = rebuild(backward_run, tmp_path, worker, config, "fp8_hybrid", once, 1)
    plain = rebuild(backward_run, tmp_path, worker, config, "fp8_hybrid", RunLedger(), 1)
    layer = again.run.precision.slot_names[0].rpartition(".")[0]
    again.run.state.switches.append((1, [layer], [], ""))
    kept = keep(again.run)
    first = again.take()
    restore(again.run, kept)
    assert again.run.precision.demoted == (), "the switch is undone with the state"
    second = again.take()
    other = plain.take()
    again.close()
    plain.close()
    assert first.demoted == second.demoted == (layer,)
    assert (first.loss, first.lr) == (second.loss, second.lr)
    assert first.lr == other.lr / 2
    assert first.loss != other.loss, "the layer ran in bf16"


@pytest.mark.slow
def test_a_fault_that_no_checkpoint_holds_is_not_reproducible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, done = start(tmp_path, "moody", "train.steps=6")
    assert done.returncode == 0, done.stdout
    assert [event["step"] for event in events(run, "nonfinite.skip")] == [4]
    answer, _ = in_process(run, 4, monkeypatch)
    assert (answer["cause"], answer["base"], answer["was_bad"]) == ("not reproducible", 0, True)


@pytest.mark.slow
def test_steps_on_both_sides_of_a_rollback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, done = start(
        tmp_path, "backward", "train.steps=13", "checkpoint.healthy_steps=1", "guard.snapshot_every=2",
        "guard.max_consecutive_skips=2", "guard.rollback_lr_factor=0.5", marks=(28, 20),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    (rollback,) = events(run, "guard.rollback")
    assert (rollback["to_step"], rollback["source"], rollback["passed_over"]) == (
        6,
        "memory",
        [7, 8],
    )
    for step, sample in ((8, 28), (9, 20)):
        answer, _ = in_process(run, step, monkeypatch)
        assert (answer["attempt"], answer["difference"], answer["cause"]) == (
            1,
            None,
            "model or data",
        )
        assert [each["number"] for each in answer["samples"] if each["bad"]] == [sample]
    answer, _ = in_process(run, 10, monkeypatch)
    assert (answer["attempt"], answer["base"], answer["window"]) == (2, 5, 11)
    assert (answer["difference"], answer["cause"]) == (None, "sound")
    assert answer["here"]["lr"] == dict(metrics(run, "train/lr", attempt=2))[10]


@pytest.mark.nightly
@pytest.mark.dist
def test_a_run_of_two_ranks_is_replayed_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    )
    run, done = start(tmp_path, "backward", "engine.name=ddp", launcher=torchrun)
    assert done.returncode == 0, done.stdout
    answer, shown = in_process(run, BAD, monkeypatch)
    assert (answer["ranks"], answer["cause"]) == (2, "model or data")
    assert answer["difference"] is None, (
        "one micro-batch a rank, and a division by two: not a bit is lost"
    )
    assert [(each["number"], each["rank"]) for each in answer["samples"] if each["bad"]] == [
        (MARKED, 1)
    ]
    assert answer["finding"]["module"] == "marks"
    assert "ranks: the run had 2" in shown
    shutil.rmtree(run / "flight")
    without, _ = in_process(run, BAD, monkeypatch)
    assert (without["ranks"], without["difference"]) == (2, None), (
        "the journal says on how many ranks it ran"
    )
    assert [(each["number"], each["rank"]) for each in without["samples"] if each["bad"]] == [
        (MARKED, 1)
    ]
