"""`data.target` in real runs: losses per target that counts, exact resume, bad samples, replay, two ranks."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from harness.core.config import load_config
from harness.core.facts import IGNORED
from harness.core.state import seed_everything
from harness.data.dataset import DatasetBatches
from tests.e2e import own_data
from tests.support.runs import events, harness, metrics, start, train, train_ranks, wait_for_step

MODULE = "tests.e2e.own_data"
STEPS = 4
FEW = (
    "data.path=null", "data.val_samples=6", "checkpoint.every=5",
    "train.lr=1e-2", "train.warmup_steps=0", "train.min_lr_ratio=1", "train.weight_decay=0",
)  # fmt: skip
TEXTS = (
    *FEW,
    f"data.target={MODULE}:texts",
    f"model.target={MODULE}:tokens",
    "train.global_batch=8",
    "--recipe",
    "fp32",
)
IMAGES = (
    *FEW,
    f"data.target={MODULE}:images",
    f"model.target={MODULE}:classifier",
    "train.global_batch=8",
)


def losses(folder: Path, *arguments: str, ranks: int = 1) -> list[tuple[int, float]]:
    folder.mkdir(exist_ok=True)
    wanted = ("--name", "r", *arguments)
    done = train_ranks(folder, ranks, *wanted) if ranks > 1 else train(folder, *wanted)
    assert done.returncode == 0, done.stdout
    return metrics(folder / "runs" / "r")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "micro_batch"), [(1, 8), (1, 2), (2, 4), (2, 1)], ids=["1x1", "1x4", "2x1", "2x4"]
)
def test_losses_are_means_over_targets_that_count(
    ranks: int, micro_batch: int, tmp_path: Path
) -> None:
    """Ranks and micro-batches hold from one target to some 80: a mean of means would be another figure."""
    found = losses(
        tmp_path, *TEXTS, f"train.micro_batch={micro_batch}", f"train.steps={STEPS}", ranks=ranks
    )
    norms = metrics(tmp_path / "runs" / "r", "train/grad_norm")
    steps, val = _oracle()
    np.testing.assert_allclose([loss for _, loss in found], [loss for loss, _ in steps], rtol=2e-5)
    np.testing.assert_allclose([norm for _, norm in norms], [norm for _, norm in steps], rtol=1e-4)
    np.testing.assert_allclose(metrics(tmp_path / "runs" / "r", "val/loss")[-1][1], val, rtol=1e-4)


def _padded(samples: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(sample["inputs"]) for sample in samples)
    inputs = torch.stack(
        [F.pad(sample["inputs"], (0, width - len(sample["inputs"]))) for sample in samples]
    )
    targets = [
        F.pad(sample["targets"], (0, width - len(sample["targets"])), value=IGNORED)
        for sample in samples
    ]
    return inputs, torch.stack(targets)


def _oracle() -> tuple[list[tuple[float, float]], float]:
    """(loss, gradient norm) of each step, and the loss of what was held out after them, by a plain loop in which every
    target that counts weighs the same."""
    config = load_config("tiny", [*TEXTS[:-2], "train.micro_batch=8"])
    source = DatasetBatches(config.data, config.train.seed, 8, 8)
    data, found = own_data.texts(), list[tuple[float, float]]()
    seed_everything(config.train.seed)
    model = own_data.tokens()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=config.train.betas, weight_decay=0.0
    )

    def loss_of(samples: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        inputs, targets = _padded(samples)
        each = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")
        return each.sum() / (targets != IGNORED).sum()

    for step in range(STEPS):
        loss = loss_of(
            [data[source._train.places(int(place))] for place in source.window(step).samples]
        )
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found, loss_of([data[source._val.places(place)] for place in range(6)]).item()


@pytest.mark.slow
def test_two_ranks_see_the_same_images(tmp_path: Path) -> None:
    """Noise and all: it is a function of the sample. Without dropout, which is one of the rank."""
    plain = (
        *IMAGES,
        "train.steps=5",
        "train.micro_batch=2",
        "--recipe",
        "fp32",
        "model.args={drop: 0.0}",
    )
    alone = losses(tmp_path / "one", *plain)
    both = losses(tmp_path / "two", *plain, ranks=2)
    np.testing.assert_allclose([loss for _, loss in both], [loss for _, loss in alone], rtol=1e-5)


@pytest.mark.slow
def test_a_run_of_images_stopped_and_resumed_keeps_every_bit(tmp_path: Path) -> None:
    arguments = (*IMAGES, "train.micro_batch=4", "train.steps=30")
    whole = losses(tmp_path / "whole", *arguments)
    (tmp_path / "stopped").mkdir()
    process = start(tmp_path / "stopped", "--name", "r", *arguments)
    run = tmp_path / "stopped" / "runs" / "r"
    wait_for_step(run, 6, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75
    assert len(metrics(run)) < 30
    assert losses(tmp_path / "stopped", *arguments) == whole
    for name in ("val/loss", "val/accuracy"):
        assert metrics(run, name) == metrics(tmp_path / "whole" / "runs" / "r", name)
    assert metrics(run, "val/accuracy")[-1][1] > 0.5, "it learns"


@pytest.mark.slow
def test_a_sample_that_cannot_be_read_is_skipped_named_and_replayed(tmp_path: Path) -> None:
    bad = "data.args={raises: [5, 11, 30]}"
    arguments = ("--name", "r", *IMAGES, "train.micro_batch=4", "train.steps=10", bad)
    done = train(tmp_path, *arguments)
    assert done.returncode == 0, done.stdout
    run = tmp_path / "runs" / "r"
    told = events(run, "data.unreadable")
    assert told
    assert all("OSError: the disk is gone" in text for event in told for text in event["found"])
    skipped = [step for step, applied in metrics(run, "train/step_applied") if applied == 0]
    assert [event["step"] for event in told] == skipped
    step = skipped[0]
    answer = harness(tmp_path, "replay", "runs/r", "--step", str(step))
    assert answer.returncode == 0, answer.stderr
    assert "samples of this window have samples that cannot be read" in answer.stdout
    assert "inputs [1, 8, 8], targets" in answer.stdout
    assert f"{told[0]['count']} of 8 are bad alone" in answer.stdout


@pytest.mark.parametrize(
    ("bad", "policy", "told"),
    [
        ("raises: [5, 30]", "fail", "OSError: the disk is gone"),
        ("label: [5, 11, 30]", "auto", "label 9, not in [0, 4)"),
        ("nan: [5, 11, 30]", "fail", "input nan at position [0, 3, 3]"),
    ],
)
def test_a_bad_sample_halts_the_run_where_that_is_asked(
    bad: str, policy: str, told: str, tmp_path: Path
) -> None:
    """Labels by themselves: the number of classes is that of the model's logits."""
    done = train(
        tmp_path, "--name", "r", *IMAGES, "train.micro_batch=4", "train.steps=20", f"data.args={{{bad}}}",
        f"data.bad={policy}",
    )  # fmt: skip
    assert done.returncode == 3, done.stdout
    assert told in json.loads((tmp_path / "runs" / "r" / "outcome.json").read_text())["reason"]


@pytest.mark.slow
def test_bad_samples_of_the_validation_are_left_out_and_told(tmp_path: Path) -> None:
    data = (
        f"data.target={MODULE}:split_images",
        "data.val_samples=16",
        "train.micro_batch=4",
        "train.steps=5",
    )
    good = losses(tmp_path / "good", *IMAGES, *data)
    bad = losses(tmp_path / "bad", *IMAGES, *data, "data.args={raises: [3], nan: [8], label: [9]}")
    assert bad == good
    run = tmp_path / "bad" / "runs" / "r"
    (told,) = events(run, "data.validation")
    assert "the disk is gone" in told["text"]
    loss, accuracy = (metrics(run, f"val/{name}")[-1][1] for name in ("loss", "accuracy"))
    assert np.isfinite(loss)
    assert accuracy * 13 == pytest.approx(round(accuracy * 13)), (
        "a share of the thirteen that are left"
    )


@pytest.mark.slow
def test_a_validation_of_which_no_target_counts_is_told_and_ends_nothing(tmp_path: Path) -> None:
    target = f"data.target={MODULE}:validated_on_nothing"
    losses(tmp_path, *TEXTS, target, "train.steps=6", "train.eval_every=3")
    run = tmp_path / "runs" / "r"
    (told,) = events(run, "data.validation")
    assert "no target of the validation counts" in told["text"]
    assert [step for step, _ in metrics(run)] == [1, 2, 3, 4, 5, 6]
    assert list((run / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_what_does_not_fit_is_told_before_the_run_begins(tmp_path: Path) -> None:
    arguments = ("--name", "r", *IMAGES, "train.micro_batch=4", "train.steps=5")
    done = train(tmp_path, *arguments, f"model.target={MODULE}:tokens")
    assert done.returncode == 2
    assert "forward fails on a sample of the data" in done.stdout
    assert not (tmp_path / "runs" / "r" / "config.yaml").exists()
    assert train(tmp_path, *arguments).returncode == 0, "and its name is still free"


@pytest.mark.slow
def test_a_model_that_trains_on_masked_targets_is_refused(tmp_path: Path) -> None:
    """Of texts that hold masked targets, and of packed documents, where the first samples need not."""
    done = train(
        tmp_path, "--name", "texts", *TEXTS, f"model.target={MODULE}:forgetful", "model.args={}"
    )
    assert done.returncode == 2, done.stdout
    assert f"model.target '{MODULE}:forgetful': masked targets are trained on" in done.stdout
    assert "ignore_index=-100" in done.stdout
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"document number {number} " * 200)
    packed = (f"data.path={texts}", "data.packing=documents", f"model.target={MODULE}:forgetful")
    done = train(
        tmp_path,
        "--name",
        "packed",
        *packed,
        "model.args={vocab: 272}",
        "train.steps=2",
        "--recipe",
        "fp32",
    )
    assert done.returncode == 2, done.stdout
    assert "masked targets are trained on" in done.stdout
    assert not (tmp_path / "runs" / "packed" / "journal.jsonl").exists()


@pytest.mark.slow
def test_micro_batches_of_a_summed_loss_weigh_alike(tmp_path: Path) -> None:
    """The sum over a window's micro-batches, whatever number of targets each has."""
    summed = (*TEXTS, f"model.target={MODULE}:summed", "model.args={}", "train.steps=1")
    halves = losses(tmp_path / "halves", *summed, "train.micro_batch=4")
    whole = losses(tmp_path / "whole", *summed, "train.micro_batch=8")
    assert halves[0][1] == pytest.approx(whole[0][1] / 2, rel=1e-5)


@pytest.mark.slow
def test_a_resume_with_other_data_is_refused(tmp_path: Path) -> None:
    size = tmp_path / "size.txt"
    size.write_text("64")
    arguments = (
        "--name",
        "r",
        *IMAGES,
        f"data.target={MODULE}:from_file",
        f"data.args={{path: {size}}}",
    )
    assert train(tmp_path, *arguments, "train.steps=5", "train.micro_batch=4").returncode == 0
    size.write_text("80")
    refused = train(tmp_path, *arguments, "train.steps=8", "train.micro_batch=4")
    assert refused.returncode == 2
    assert "these are not the data that the run began with" in refused.stdout
    assert "train_samples were 58, and are 72" in refused.stdout


@pytest.mark.slow
def test_a_model_without_fp8_layers_goes_down_the_ladder_but_under_strict(tmp_path: Path) -> None:
    arguments = (
        *IMAGES,
        "train.micro_batch=4",
        "train.steps=3",
        "model.target=harness.models.vision:convnet",
    )
    done = train(tmp_path, "--name", "r", *arguments)
    assert done.returncode == 0, done.stdout
    why = "native:fp8: not taken: no layer of this model can run in FP8: head: sizes 10x64 are not multiples of 16"
    assert why in done.stdout
    plan = json.loads((tmp_path / "runs" / "r" / "plan.json").read_text())
    assert plan["resolved"] == "autocast:bf16"
    assert [rung["rung"] for rung in plan["rungs"] if rung["taken"]] == ["autocast:bf16"]
    strict = train(tmp_path, "--name", "s", *arguments, "--strict")
    assert strict.returncode == 2
    assert "no layer of this model can run in FP8" in strict.stdout
    assert not (tmp_path / "runs" / "s" / "config.yaml").exists()


@pytest.mark.slow
def test_a_summed_loss_is_shown_as_no_bits_per_byte(tmp_path: Path) -> None:
    done = train(
        tmp_path,
        "--name",
        "r",
        f"model.target={MODULE}:summed",
        "train.steps=4",
        "tracking.report=true",
    )
    assert done.returncode == 0, done.stdout
    assert "loss.unit: the model's loss is not in nats per byte" in done.stdout
    assert "bits per byte" not in done.stdout
    assert "unigram" not in done.stdout
    assert len(events(tmp_path / "runs" / "r", "loss.unit")) == 1
    page = (tmp_path / "runs" / "r" / "report.html").read_text()
    # The page's script knows the unit, and the runbook's texts do. Nothing that is said of this run names it.
    start = page.index(">", page.index('type="application/json"')) + 1
    content = json.loads(page[start : page.index("</script>", start)])
    assert content.pop("explanations")
    assert "bits per byte" not in json.dumps(content)
