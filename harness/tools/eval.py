"""`harness eval`: loss, perplexity and accuracy of a run's model, as the run computes and in fp32 beside it.

Both see the same samples, so that their difference, sample by sample, is what the run's precision costs: its mean, and
a 95% confidence interval of it (1.96 standard errors of paired differences).
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.core.errors import ConfigError, ExitCode, Problem
from harness.core.screen import say
from harness.report import RunFolder, short

if TYPE_CHECKING:
    from harness.core.config import RunConfig
    from harness.core.protocols import Batch
    from harness.tools.restored import Restored

# Bytes of logits, in float32, that one forward may give.
_LOGITS = 1 << 30
_NORMAL = 1.96


@dataclass(frozen=True, slots=True)
class Score:
    """sums: of the losses of each sample's targets, nats; counts: of these targets; hits: those that are the likeliest
    token. A list each, by sample."""

    sums: list[float]
    counts: list[int]
    hits: list[int]

    @property
    def loss(self) -> float:
        """Nats per target."""
        return sum(self.sums) / sum(self.counts)

    def as_json(self) -> dict[str, float | None]:
        """loss (nats per token), perplexity, accuracy; None for what is not finite."""
        perplexity = math.exp(self.loss) if self.loss < 700 else math.inf
        found = {
            "loss": self.loss,
            "perplexity": perplexity,
            "accuracy": sum(self.hits) / sum(self.counts),
        }
        return {name: value if math.isfinite(value) else None for name, value in found.items()}


def command(
    run: RunFolder,
    data: Annotated[
        Path | None, typer.Option(help="text that the run has not seen [default: its validation]")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="at most [default: data.val_samples of the run]")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="checkpoint of this step [default: the newest that verifies]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> int:
    """Print what the model scores; nothing is written into the run.

    Raises ConfigError if `run` is no run, or its model gives no logits, CheckpointError if no checkpoint verifies,
    DataError for data that cannot be used.
    """
    from harness.tools.restored import restore

    restored = restore(run, step)
    told = evaluate(restored, data, samples)
    say(json.dumps(told) if as_json else "\n".join(_lines(told)))
    return int(ExitCode.DONE)


def evaluate(
    restored: Restored, data: Path | None = None, samples: int | None = None
) -> dict[str, Any]:
    """What `harness eval --json` prints."""
    name, batches = _batches(restored, data, samples)
    ours = score(restored, batches, fp32=False)
    told: dict[str, Any] = {
        "run": short(restored.folder),
        "step": restored.step,
        "data": name,
        "samples": len(ours.counts),
        "tokens": sum(ours.counts),
        "precision": restored.name,
        "trained_in": restored.planned,
        "in_precision": ours.as_json(),
        "in_fp32": None,
        "difference": None,
    }
    if restored.plan.rung.precision != "fp32":
        plain = score(restored, batches, fp32=True)
        told |= {"in_fp32": plain.as_json(), "difference": difference(ours, plain)}
    return told


def score(restored: Restored, batches: Sequence[Batch], fp32: bool) -> Score:
    """The model on `batches` of tokens. Samples without a target that counts are left out.

    Raises ConfigError where the data are no tokens, or the model gives no logits.
    """
    import torch
    import torch.nn.functional as F

    from harness.core.facts import IGNORED

    if any(not _of_tokens(batch) for batch in batches):
        why = "there is no perplexity, and no next token"
        raise ConfigError(
            Problem(
                "the run's data are no tokens", "harness eval", why, "see val/loss in its journal"
            )
        )
    made = Score([], [], [])
    with restored.computing(fp32):
        for batch in _portions(batches, restored.vocab_size):
            on = {name: each.to(restored.device) for name, each in batch.items()}
            logits, targets = (
                restored.logits(on["inputs"], on.get("segments")).float(),
                on["targets"],
            )
            if logits.shape[:2] != targets.shape:
                what = (
                    f"the model gives logits {list(logits.shape)} for targets {list(targets.shape)}"
                )
                fix = "have forward(inputs) return logits [batch, time, vocab]"
                raise ConfigError(
                    Problem(what, f"model.target {restored.config.model.target!r}", fix=fix)
                )
            each = F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED
            )
            counted = targets != IGNORED
            hits = (logits.argmax(-1) == targets) & counted
            rows = torch.stack(
                [each.view_as(targets).double().sum(1), counted.sum(1), hits.sum(1)]
            ).tolist()
            for loss, count, hit in zip(*rows, strict=True):
                if count:
                    made.sums.append(loss)
                    made.counts.append(int(count))
                    made.hits.append(int(hit))
    if not made.counts:
        raise ConfigError(Problem("no target counts", "the data", fix="give other data"))
    return made


def _of_tokens(batch: Batch) -> bool:
    inputs, targets = batch.get("inputs"), batch.get("targets")
    if (
        inputs is None
        or targets is None
        or inputs.is_floating_point()
        or targets.is_floating_point()
    ):
        return False
    return inputs.ndim == 2 and inputs.shape == targets.shape


def difference(ours: Score, plain: Score) -> dict[str, float | bool | None]:
    """What `ours` loses to `plain` on the same samples: nats per token, as a share of plain's loss, and half the width
    of its 95% confidence interval; clear: 0 lies outside of it. None where it cannot be told.

    A ratio estimate (losses over tokens): its variance is that of the residuals d[i] - mean * n[i] (Cochran, Sampling
    Techniques, chapter 6), so that samples may have different numbers of targets.
    """
    n, total = len(ours.counts), sum(ours.counts)
    apart = [a - b for a, b in zip(ours.sums, plain.sums, strict=True)]
    nats = sum(apart) / total
    half = None
    if n > 1:
        residuals = (d - nats * count for d, count in zip(apart, ours.counts, strict=True))
        half = _NORMAL * math.sqrt(n / (n - 1) * sum(each * each for each in residuals)) / total
    if not math.isfinite(nats):
        return {"nats": None, "share": None, "half_width": None, "clear": None}
    share = nats / plain.loss if plain.loss else None
    return {
        "nats": nats,
        "share": share,
        "half_width": half,
        "clear": None if half is None else abs(nats) > half,
    }


def _batches(restored: Restored, data: Path | None, samples: int | None) -> tuple[str, list[Batch]]:
    """What the data are, and their batches: the run's validation, or samples of `data` spread evenly."""
    import numpy as np

    from harness.build import build_data
    from harness.data.dataset import DatasetBatches
    from harness.tools.sample import of_bytes

    config, worker = restored.config, restored.worker
    wanted = config.data.val_samples if samples is None else samples
    if data is None:
        config = _with_data(config, {"val_samples": wanted})
        source = build_data(config, restored.folder, worker, read_only=True)
        return f"validation of {source.name}", list(source.validation(0, 1))
    own = restored.folder / "data" / "tokenizer.json"
    changed: dict[str, Any] = {"path": str(data), "mixture": [], "format": "auto", "target": None}
    changed["tokenizer"] = str(own) if own.is_file() else config.data.tokenizer
    rows = config.train.micro_batch
    # Every sample of it counts, whatever split a run would cut it into, and may be the only one.
    one = {"train": config.train.model_copy(update={"global_batch": 1, "micro_batch": 1})}
    with tempfile.TemporaryDirectory(prefix="harness-eval-") as scratch:
        source = build_data(
            _with_data(config, changed).model_copy(update=one), Path(scratch), worker
        )
        assert not isinstance(source, DatasetBatches)
        if (
            changed["tokenizer"] is None
            and source.facts()["kind"] != "tokens"
            and not of_bytes(restored)
        ):
            why = "nobody said what its token ids mean, and bytes would be taken for them"
            fix = "give data of the same ids, or train with data.tokenizer"
            raise ConfigError(
                Problem("the run was not trained on bytes", f"--data {data}", why, fix)
            )
        total = source.n_samples + source.available
        chosen = np.arange(min(wanted, total), dtype=np.int64) * total // min(wanted, total)
        cut = int(np.searchsorted(chosen, source.n_samples))
        batches: list[Batch] = []
        for split, numbers in (("train", chosen[:cut]), ("val", chosen[cut:] - source.n_samples)):
            batches += [
                source.batch(split, numbers[at : at + rows]) for at in range(0, len(numbers), rows)
            ]
        return source.name, batches


def _with_data(config: RunConfig, changed: dict[str, Any]) -> RunConfig:
    return config.model_copy(update={"data": config.data.model_copy(update=changed)})


def _portions(batches: Sequence[Batch], vocab_size: int | None) -> Iterator[Batch]:
    """`batches` in parts of so few samples that their logits are `_LOGITS` bytes at most, or one sample."""
    for batch in batches:
        rows, time = batch["inputs"].shape
        size = max(1, _LOGITS // (4 * time * (vocab_size or 1)))
        for first in range(0, rows, size):
            yield {name: each[first : first + size] for name, each in batch.items()}


def _lines(told: dict[str, Any]) -> Iterator[str]:
    yield f"{told['run']} at step {told['step']}: {told['data']}, {told['samples']} samples, {told['tokens']:,} tokens"
    if told["trained_in"].partition(",")[0] != told["precision"].partition(",")[0]:
        yield f"the run trained in {told['trained_in']}; this machine computes it in {told['precision']}"
    rows = [(told["precision"], told["in_precision"])]
    rows += [("fp32", told["in_fp32"])] if told["in_fp32"] else []
    width = max(len(name) for name, _ in rows)
    yield f"{'':{width}}  {'loss (nats)':>11}  {'perplexity':>10}  {'accuracy':>8}"
    for name, found in rows:
        loss, perplexity = _figure(found["loss"], ".4f"), _figure(found["perplexity"], ".3f")
        yield f"{name:{width}}  {loss:>11}  {perplexity:>10}  {_figure(found['accuracy'], '.2%'):>8}"
    if told["difference"]:
        yield _signal(told["difference"])


def _signal(found: dict[str, Any]) -> str:
    if found["nats"] is None:
        return "difference: not finite"
    told = f"difference: {found['nats']:+.5f} nats"
    told += "" if found["share"] is None else f" ({found['share']:+.3%})"
    if found["half_width"] is None:
        return f"{told}; of one sample, no interval can be told"
    told += f", 95% interval +-{found['half_width']:.5f}"
    if not found["clear"]:
        return f"{told}: no loss of precision to be seen in these samples"
    return f"{told}: {'the precision costs' if found['nats'] > 0 else 'fp32 is worse by'} that much"


def _figure(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)
