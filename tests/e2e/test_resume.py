"""Kill, stop and resume the real job: every loss once, bit-identical to an undisturbed run's, FP8 state included."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import load_file

from tests.support import warm
from tests.support.runs import (
    command,
    environment,
    events,
    harness,
    metrics,
    start,
    train,
    wait_for_checkpoint,
    wait_for_step,
)

STEPS = 40
ARGUMENTS = ("--name", "r", f"train.steps={STEPS}", "checkpoint.every=7")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = train(folder, *ARGUMENTS)
    assert done.returncode == 0, done.stdout
    run = folder / "runs" / "r"
    assert [step for step, _ in metrics(run)] == list(range(1, STEPS + 1))
    return run


def same_final_state(run: Path, other: Path) -> None:
    """The last checkpoints hold the same bytes, FP8 state, optimizer and all."""
    ours, theirs = (path / "checkpoints" / f"step-{STEPS:08d}" for path in (run, other))
    names = sorted(path.name for path in theirs.glob("*.safetensors"))
    assert {"fp8.safetensors", "model.safetensors", "optimizer.safetensors"} <= set(names)
    for name in names:
        a, b = load_file(ours / name), load_file(theirs / name)
        assert a.keys() == b.keys()
        for key, value in b.items():
            assert a[key].tobytes() == value.tobytes(), (name, key)


@pytest.mark.slow
@pytest.mark.faults(1)
def test_kill_minus_nine_at_three_steps(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r"
    generator = random.Random(os.environ.get("HARNESS_TEST_SEED", "7"))
    for step in sorted(generator.sample(range(2, STEPS - 3), 3)):
        process = start(tmp_path, *ARGUMENTS)
        wait_for_step(run, step, process)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "the fault must fire before the run ends"
    done = train(tmp_path, *ARGUMENTS)
    assert done.returncode == 0, done.stdout
    assert "resumed at step" in done.stdout
    assert metrics(run) == metrics(undisturbed), "every loss once, in order, to the last bit"
    assert metrics(run, "val/loss") == metrics(undisturbed, "val/loss")
    assert events(run, "resume.mismatch") == []
    same_final_state(run, undisturbed)


@pytest.mark.slow
@pytest.mark.faults(6)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_75(
    undisturbed: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "runs" / "r"
    arguments = (
        *ARGUMENTS[:-1],
        f"checkpoint.every={STEPS}",
    )  # none but the signal's own save before the last step
    process = start(tmp_path, *arguments)
    wait_for_step(run, 10, process)
    process.send_signal(number)
    process.send_signal(number)  # a second one during the save changes nothing
    assert process.wait(timeout=warm.PATIENCE) == 75
    outcome = json.loads((run / "outcome.json").read_text())
    assert (outcome["status"], outcome["exit_code"], outcome["reason"]) == (
        "stopped",
        75,
        number.name,
    )
    assert 10 <= outcome["step"] < STEPS
    assert (run / "checkpoints" / f"step-{outcome['step']:08d}" / "manifest.json").exists()
    done = train(tmp_path, *arguments)
    assert f"resumed at step {outcome['step']}" in done.stdout
    assert metrics(run) == metrics(undisturbed)
    same_final_state(run, undisturbed)


def test_a_longer_run_resumes_and_other_changes_are_refused_by_name(tmp_path: Path) -> None:
    short = ("--name", "r", "train.steps=6", "checkpoint.every=3")
    assert train(tmp_path, *short).returncode == 0
    refused = train(
        tmp_path,
        "--name",
        "r",
        "train.steps=8",
        "train.lr=1e-3",
        "data.context=32",
        "--recipe",
        "bf16",
    )
    assert refused.returncode == 2
    for key in ("train.lr", "data.context", "recipe"):
        assert f"runs/r: {key}" in refused.stdout
    for key in ("train.lr", "data.context", "recipe"):
        assert f"or --accept-changed {key}" in refused.stdout
    assert "train.steps" not in refused.stdout
    longer = train(tmp_path, "--name", "r", "train.steps=8", "checkpoint.every=2")
    assert longer.returncode == 0, longer.stdout
    assert "resumed at step 6" in longer.stdout
    assert [step for step, _ in metrics(tmp_path / "runs" / "r")] == list(range(1, 9))
    again = train(tmp_path, "--name", "r", "train.steps=8", "checkpoint.every=2")
    assert again.returncode == 0
    assert "has finished" in again.stdout


@pytest.mark.slow
def test_the_jump_of_the_rate_is_told_before_it_happens(tmp_path: Path) -> None:
    assert train(tmp_path, "--name", "r", "train.steps=12").returncode == 0
    longer = train(tmp_path, "--name", "r", "train.steps=40")
    assert longer.returncode == 0, longer.stdout
    run = tmp_path / "runs" / "r"
    rates = dict(metrics(run, "train/lr"))
    (jump,) = events(run, "train.lr_jump")
    assert (jump["last"], jump["next"]) == (rates[12], rates[13])
    assert rates[13] > 3 * rates[12]
    assert "train.steps 12 -> 40" in jump["text"]
    told, first = longer.stdout.index("train.lr_jump"), longer.stdout.index("step   13/40")
    assert told < first
    (changed,) = events(run, "run.changed")
    assert changed["changes"] == [["train.steps", 12, 40]]
    assert changed["accepted"] == []


@pytest.mark.slow
def test_a_run_that_starts_from_anothers_checkpoint_is_told_the_jump(tmp_path: Path) -> None:
    assert train(tmp_path, "--name", "a", "train.steps=12").returncode == 0
    source = "runs/a/checkpoints/step-00000012"
    done = train(
        tmp_path, "--name", "b", "--resume", source, "train.steps=14", "train.schedule=constant"
    )
    assert done.returncode == 0, done.stdout
    (jump,) = events(tmp_path / "runs" / "b", "train.lr_jump")
    assert jump["last"] == dict(metrics(tmp_path / "runs" / "a", "train/lr"))[12]
    assert jump["next"] == dict(metrics(tmp_path / "runs" / "b", "train/lr"))[13]
    assert "train.schedule cosine -> constant" in jump["text"]


@pytest.mark.slow
def test_a_rate_that_only_moves_on_is_no_jump(tmp_path: Path) -> None:
    wsd = ("--name", "r", "train.schedule=wsd")
    assert train(tmp_path, *wsd, "train.steps=5", "train.decay_share=0").returncode == 0
    assert train(tmp_path, *wsd, "train.steps=8", "train.decay_share=0").returncode == 0
    assert events(tmp_path / "runs" / "r", "train.lr_jump") == []
    rates = [rate for _, rate in metrics(tmp_path / "runs" / "r", "train/lr")]
    assert rates[4:] == rates[4:5] * 4


@pytest.mark.slow
def test_accepted_changes_are_made_written_down_and_replayed(tmp_path: Path) -> None:
    line = ("--name", "r", "checkpoint.every=3")
    assert train(tmp_path, *line, "train.steps=6").returncode == 0
    run = tmp_path / "runs" / "r"
    before = yaml.safe_load((run / "config.yaml").read_text())
    other = (*line, "train.steps=9", "train.lr=5e-5", "guard.spike_sigma=20")
    refused = train(tmp_path, *other, "--accept-changed", "train.lr")
    assert refused.returncode == 2
    assert "runs/r: guard.spike_sigma" in refused.stdout
    assert "runs/r: train.lr" not in refused.stdout
    unknown = train(tmp_path, *other, "--accept-changed", "train.rl")
    assert unknown.returncode == 2
    assert "--accept-changed train.rl: no such key" in unknown.stdout
    assert yaml.safe_load((run / "config.yaml").read_text()) == before
    one_by_one = ("--accept-changed", "train.lr", "--accept-changed", "guard.spike_sigma")
    done = train(tmp_path, *other, *one_by_one)
    assert done.returncode == 0, done.stdout
    assert "resumed at step 6" in done.stdout
    (changed,) = events(run, "run.changed")
    assert changed["changes"] == [
        ["guard.spike_sigma", 12.0, 20.0],
        ["train.lr", 3e-3, 5e-5],
        ["train.steps", 6, 9],
    ]
    assert changed["accepted"] == ["guard.spike_sigma", "train.lr"]
    assert changed["config"] == before
    assert len(events(run, "train.lr_jump")) == 1
    after = yaml.safe_load((run / "config.yaml").read_text())
    assert (after["train"]["lr"], after["guard"]["spike_sigma"]) == (5e-5, 20.0)
    again = train(tmp_path, *other, "train.steps=10")
    assert again.returncode == 0, "what was accepted is the run's config now"
    for step in (5, 8):  # one of either config
        replayed = harness(tmp_path, "replay", "runs/r", "--step", str(step))
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        assert "bit for bit" in replayed.stdout, replayed.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "told"),
    [(16, "samples 24 to 47 of the order of all epochs are skipped"),
     (4, "samples 12 to 23 of the order of all epochs are trained on again")],
)  # fmt: skip
def test_another_global_batch_says_which_samples_it_moves(
    batch: int, told: str, tmp_path: Path
) -> None:
    line = ("--name", "r", "train.micro_batch=4")
    assert train(tmp_path, *line, "train.steps=3", "train.global_batch=8").returncode == 0
    key = "train.global_batch"
    done = train(tmp_path, *line, "train.steps=5", f"{key}={batch}", "--accept-changed", key)
    assert done.returncode == 0, done.stdout
    (changed,) = events(tmp_path / "runs" / "r", "run.changed")
    assert told in changed["text"]


@pytest.mark.slow
def test_a_recipe_is_changed_only_by_the_door(tmp_path: Path) -> None:
    line = ("--name", "r", "checkpoint.every=3")
    assert train(tmp_path, *line, "train.steps=3").returncode == 0
    bf16 = (*line, "train.steps=5", "--recipe", "bf16")
    assert "or --accept-changed recipe" in train(tmp_path, *bf16).stdout
    done = train(tmp_path, *bf16, "--accept-changed", "recipe")
    assert done.returncode == 0, done.stdout
    run = tmp_path / "runs" / "r"
    (changed,) = events(run, "run.changed")
    assert changed["changes"] == [["recipe", "fp8_hybrid", "bf16"], ["train.steps", 3, 5]]
    assert json.loads((run / "plan.json").read_text())["resolved"] == "autocast:bf16"
    assert [step for step, _ in metrics(run)] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_what_does_not_load_or_cannot_be_accepted_changes_nothing(tmp_path: Path) -> None:
    line = ("--name", "r", "checkpoint.every=3")
    assert train(tmp_path, *line, "train.steps=3").returncode == 0
    run = tmp_path / "runs" / "r"
    kept = [(run / name).read_bytes() for name in ("config.yaml", "plan.json")]
    for override, told in (
        (
            "model.args={dim: 32, layers: 2, heads: 2, kv_heads: 2, ffn: 176, tied: true}",
            "in the checkpoint",
        ),
        ("train.optimizer=sgd", "is of another kind"),
        ("data.val_fraction=0.2", "the data that it began with"),
    ):
        key = override.partition("=")[0]
        key = "model.args.dim" if key == "model.args" else key
        refused = train(tmp_path, *line, "train.steps=6", override, "--accept-changed", key)
        assert refused.returncode == 2, refused.stdout
        assert told in refused.stdout
        assert [(run / name).read_bytes() for name in ("config.yaml", "plan.json")] == kept
    assert events(run, "run.changed") == []
    assert train(tmp_path, *line, "train.steps=6").returncode == 0


@pytest.mark.slow
@pytest.mark.faults(4)
def test_a_damaged_newest_checkpoint_is_set_aside(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r"
    stopped = start(tmp_path, *ARGUMENTS)
    wait_for_checkpoint(run, 14, stopped)
    os.killpg(stopped.pid, signal.SIGKILL)
    stopped.wait()
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    shard = newest / "fp8.safetensors"
    data = bytearray(shard.read_bytes())
    data[-3] ^= 0x10
    shard.write_bytes(data)
    done = train(tmp_path, *ARGUMENTS)
    assert done.returncode == 0, done.stdout
    assert "set aside" in done.stdout
    assert f"resumed at step {int(newest.name[-8:]) - 7}" in done.stdout
    assert list((run / "checkpoints").glob("quarantine-*"))
    assert metrics(run) == metrics(undisturbed)


@pytest.mark.slow
@pytest.mark.faults(7)
def test_the_second_run_in_one_folder_is_refused(tmp_path: Path) -> None:
    first = start(tmp_path, "--name", "r", "train.steps=2000", "checkpoint.every=0")
    wait_for_step(tmp_path / "runs" / "r", 2, first)
    second = train(tmp_path, "--name", "r", "train.steps=2000", "checkpoint.every=0")
    first.kill()
    first.wait()
    assert second.returncode == 2
    assert f"process {first.pid}" in second.stdout


@pytest.mark.slow
def test_the_default_name_finds_its_own_run_and_then_the_next(tmp_path: Path) -> None:
    few = ("train.steps=2", "--recipe", "fp32")
    for expected in ("tiny-fp32", "tiny-fp32-2"):
        assert train(tmp_path, *few).returncode == 0
        assert (tmp_path / "runs" / expected / "outcome.json").exists()
    never = train(tmp_path, *few, "--resume", "never", "--name", "tiny-fp32")
    assert never.returncode == 2
    assert "exists already" in never.stdout


@pytest.mark.slow
def test_start_from_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    assert train(tmp_path, "--name", "a", "train.steps=6", "checkpoint.every=3").returncode == 0
    source = "runs/a/checkpoints/step-00000003"
    done = train(tmp_path, "--name", "b", "train.steps=6", "checkpoint.every=3", "--resume", source)
    assert done.returncode == 0, done.stdout
    assert metrics(tmp_path / "runs" / "b") == metrics(tmp_path / "runs" / "a")[3:]


@pytest.mark.slow
def test_stopping_after_max_minutes(tmp_path: Path) -> None:
    done = train(tmp_path, "--name", "r", "train.steps=100000", "train.max_minutes=0.05")
    assert done.returncode == 75
    assert (
        "train.max_minutes"
        in json.loads((tmp_path / "runs" / "r" / "outcome.json").read_text())["reason"]
    )


@pytest.mark.slow
def test_output_to_a_closed_pipe_does_not_stop_training(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with open(os.devnull, "wb") as nowhere:
        process = warm.start(
            command("--name", "r", "train.steps=5")[1:],
            tmp_path,
            environment(),
            writer,
            nowhere.fileno(),
        )
    os.close(writer)
    os.close(reader)
    process.wait(timeout=warm.PATIENCE)
    assert [step for step, _ in metrics(tmp_path / "runs" / "r")] == [1, 2, 3, 4, 5]
