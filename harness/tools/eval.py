"""`harness eval`: loss, perplexity and accuracy of a run's model, in the run's precision and, for comparison, in fp32.

Both see the same samples. So their difference, sample by sample, is what the run's precision costs: its mean, and a 95%
confidence interval of the mean (Student's t of paired differences).
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

from harness.core.errors import (
    ConfigError,
    DataError,
    ExitCode,
    Problem,
    TooShortError,
    number_of,
    some,
)
from harness.core.screen import say
from harness.report import RunFolder, short
from harness.report.intervals import t_quantile

if TYPE_CHECKING:
    from harness.core.config import RunConfig
    from harness.core.protocols import Batch
    from harness.tools.restored import Restored

# Most bytes of float32 logits of one forward.
_LOGITS = 1 << 30
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a model; each list has one entry a sample.

    sums: sum of the losses of its targets, in nats.
    counts: number of its targets.
    hits: number of its targets that are the likeliest token.
    """

    sums: list[float]
    counts: list[int]
    hits: list[int]

    @property
    def loss(self) -> float:
        """Nats per target."""
        return sum(self.sums) / sum(self.counts)

    def as_json(self) -> dict[str, float | None]:
        """loss (nats per token), perplexity, accuracy; None in place of a value that is not finite."""
        # exp of more than 709 is over the largest float, and raises OverflowError.
        perplexity = math.exp(self.loss) if self.loss < 700 else math.inf
        found: dict[str, float | None] = {}
        for name, value in (
            ("loss", self.loss),
            ("perplexity", perplexity),
            ("accuracy", sum(self.hits) / sum(self.counts)),
        ):
            found[name] = value if math.isfinite(value) else None
        return found


def command(
    run: RunFolder,
    data: Annotated[
        Path | None,
        typer.Option(help="text that the run has not seen [default: its validation data]"),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="samples, at most [default: the run's data.val_samples]"),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="checkpoint's step [default: the newest that verifies]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> int:
    """Print the model's score; nothing is written into the run.

    Raises ConfigError if `run` is no run, or its model gives no logits. Raises CheckpointError if no checkpoint
    verifies, and DataError for data that cannot be used.
    """
    from harness.tools.restored import restore

    restored = restore(run, step)
    found = evaluate(restored, data, samples)
    say(json.dumps(found) if as_json else "\n".join(_lines(found)))
    return int(ExitCode.DONE)


def evaluate(
    restored: Restored, data: Path | None = None, samples: int | None = None
) -> dict[str, Any]:
    """What `harness eval --json` prints."""
    name, left_out, batches = _batches(restored, data, samples)
    ours = score(restored, batches, fp32=False)
    found: dict[str, Any] = {
        "run": short(restored.folder),
        "step": restored.step,
        "data": name,
        "left_out": left_out,
        "samples": len(ours.counts),
        "tokens": sum(ours.counts),
        "precision": restored.name,
        "trained_in": restored.planned,
        "in_precision": ours.as_json(),
        "in_fp32": None,
        "difference": None,
    }
    # A run in fp32 has nothing to be compared with.
    if restored.plan.rung.precision != "fp32":
        plain = score(restored, batches, fp32=True)
        found |= {"in_fp32": plain.as_json(), "difference": difference(ours, plain)}
    return found


def score(restored: Restored, batches: Sequence[Batch], fp32: bool) -> Score:
    """The model's score on `batches` of tokens. Samples without a target that counts are left out.

    Raises ConfigError if the data are no tokens, or the model gives no logits.
    """
    import torch
    import torch.nn.functional as F

    from harness.core.facts import IGNORED

    if not all(map(_of_tokens, batches)):
        why = "there is no perplexity, and no next token"
        fix = "see val/loss in its journal"
        raise ConfigError(Problem("the run's data are no tokens", "harness eval", why, fix))

    made = Score([], [], [])
    with restored.computing(fp32):
        for batch in _portions(batches, restored.vocab_size):
            on_device: dict[str, torch.Tensor] = {}
            for name, each in batch.items():
                on_device[name] = each.to(restored.device)
            targets = on_device["targets"]
            segments = on_device.get("segments")
            # Losses in float32: bfloat16 would hide the small differences that are looked for.
            logits = restored.logits(on_device["inputs"], segments).float()
            if logits.shape[:2] != targets.shape:
                raise _other_shape(restored, list(logits.shape), list(targets.shape))

            # Loss, number of targets and hits of each sample, in one copy to the host.
            flat = logits.flatten(0, 1)
            labels = targets.flatten()
            losses = F.cross_entropy(flat, labels, reduction="none", ignore_index=IGNORED)
            counted = targets != IGNORED
            hits = (logits.argmax(-1) == targets) & counted
            sums = losses.view_as(targets).double().sum(1)
            rows = torch.stack([sums, counted.sum(1), hits.sum(1)]).tolist()
            for loss, count, hit in zip(*rows, strict=True):
                if count:
                    made.sums.append(loss)
                    made.counts.append(int(count))
                    made.hits.append(int(hit))
    if not made.counts:
        raise ConfigError(Problem("no target counts", "the data", fix="give other data"))
    return made


def _other_shape(
    restored: Restored,
    logits: list[int],
    targets: list[int],
) -> ConfigError:
    what = f"the model gives logits {logits} for targets {targets}"
    where = f"model.target {restored.config.model.target!r}"
    fix = "have forward(inputs) return logits [batch, time, vocab]"
    return ConfigError(Problem(what, where, fix=fix))


def _of_tokens(batch: Batch) -> bool:
    """Whether a batch has token ids and their targets, [batch, time] each."""
    inputs, targets = batch.get("inputs"), batch.get("targets")
    if inputs is None or targets is None:
        return False
    if inputs.is_floating_point() or targets.is_floating_point():
        return False
    return inputs.ndim == 2 and inputs.shape == targets.shape


def difference(ours: Score, plain: Score) -> dict[str, float | bool | None]:
    """What `ours` loses to `plain` on the same samples.

    nats: mean difference per token.
    share: that, as a share of plain's loss.
    half_width: half the width of the 95% confidence interval of nats.
    clear: whether 0 is outside of the interval.

    None in place of a value that cannot be computed.

    nats is a ratio estimate, losses over tokens, because samples may have different numbers of targets. Its variance is
    that of the residuals d[i] - nats * n[i] (Cochran, Sampling Techniques, chapter 6).
    """
    n = len(ours.counts)
    total = sum(ours.counts)
    apart = [a - b for a, b in zip(ours.sums, plain.sums, strict=True)]
    nats = sum(apart) / total

    # One sample has no spread, and so no interval.
    half = None
    if n > 1:
        residuals: list[float] = []
        for d, count in zip(apart, ours.counts, strict=True):
            residuals.append(d - nats * count)
        squares = sum(each * each for each in residuals)
        # n / (n - 1): the mean was estimated from the same samples.
        half = t_quantile(n - 1) * math.sqrt(n / (n - 1) * squares) / total

    # JSON has no NaN and no infinity.
    if not math.isfinite(nats):
        return {"nats": None, "share": None, "half_width": None, "clear": None}
    share = nats / plain.loss if plain.loss else None
    clear = None if half is None else abs(nats) > half
    return {"nats": nats, "share": share, "half_width": half, "clear": clear}


def _batches(
    restored: Restored,
    data: Path | None,
    samples: int | None,
) -> tuple[str, list[str], list[Batch]]:
    """What the data are, which files of `data` are left out, and the batches.

    These are the run's validation, or samples of `data` spread evenly.
    """
    from harness.build import build_data

    config = restored.config
    worker = restored.worker
    wanted = config.data.val_samples if samples is None else samples
    if data is None:
        config = _with_data(config, {"val_samples": wanted})
        source = build_data(config, restored.folder, worker, read_only=True)
        return f"validation of {source.name}", [], list(source.validation(0, 1))
    return _batches_of(restored, data, wanted)


def _batches_of(restored: Restored, data: Path, wanted: int) -> tuple[str, list[str], list[Batch]]:
    """`_batches` of text that the user gives, `wanted` samples of it; read with the run's tokenizer."""
    import numpy as np

    from harness.build import build_data
    from harness.core.files import home
    from harness.data.dataset import DatasetBatches
    from harness.data.splits import with_validation
    from harness.tools.sample import of_bytes

    config = restored.config
    worker = restored.worker
    # The run's own copy of the tokenizer comes first: the file that the config names may have changed since.
    own = restored.folder / "data" / "tokenizer.json"
    tokenizer = str(own) if own.is_file() else config.data.tokenizer
    changed: dict[str, Any] = {
        "path": str(data),
        "mixture": [],
        "format": "auto",
        "target": None,
        "tokenizer": tokenizer,
        # Both parts count, and the smaller one needs a sample, too.
        "val_fraction": 0.5,
    }
    # Every sample counts, whatever split a run would put it into, and there may be only one in each.
    train = config.train.model_copy(update={"global_batch": 1, "micro_batch": 1})
    one = {"train": train}
    with tempfile.TemporaryDirectory(prefix="harness-eval-") as scratch:
        config = _with_data(config, changed).model_copy(update=one)
        try:
            source = build_data(config, Path(scratch), worker)
        except TooShortError as error:
            why = f"its halves have {error.train} and {error.val} tokens, and each needs {error.sample} "
            why += f"(the run's data.context {config.data.context} + 1)"
            fix = "give more text"
            raise DataError(
                Problem("too short to evaluate on", f"--data {data}", why, fix)
            ) from error
        assert not isinstance(source, DatasetBatches)
        facts = source.facts()
        is_text = facts["kind"] != "tokens"
        if tokenizer is None and is_text and not of_bytes(restored):
            why = "nobody said what its token ids mean, and bytes would be taken for them"
            fix = "give data of the same ids, or train with data.tokenizer"
            what = "the run was not trained on bytes"
            raise ConfigError(Problem(what, f"--data {data}", why, fix))

        # Samples are numbered through both splits, the training part first.
        total = source.n_samples + source.available
        # A file that was named is all of the training part if a validation file lies beside it, which is another text.
        named = home(str(data))
        if named.is_file() and len(with_validation(named, facts["kind"] == "text")) > 1:
            total = source.n_samples
        count = min(wanted, total)
        chosen = np.arange(count, dtype=np.int64) * total // count
        cut = int(np.searchsorted(chosen, source.n_samples))
        rows = restored.config.train.micro_batch
        of_split = {"train": chosen[:cut], "val": chosen[cut:] - source.n_samples}
        batches: list[Batch] = []
        for split, numbers in of_split.items():
            for first in range(0, len(numbers), rows):
                part = numbers[first : first + rows]
                batches.append(source.batch(split, part))
        return source.name, facts["skipped"], batches


def _with_data(config: RunConfig, changed: dict[str, Any]) -> RunConfig:
    data = config.data.model_copy(update=changed)
    return config.model_copy(update={"data": data})


def _portions(batches: Sequence[Batch], vocab_size: int | None) -> Iterator[Batch]:
    """`batches` in parts whose logits have at most `_LOGITS` bytes; a part has one sample at least."""
    for batch in batches:
        rows, time = batch["inputs"].shape
        row_bytes = 4 * time * (vocab_size or 1)
        size = max(1, _LOGITS // row_bytes)
        for first in range(0, rows, size):
            yield {name: each[first : first + size] for name, each in batch.items()}


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """The answer as text: what was evaluated, a table, and the difference."""
    yield (
        f"{found['run']} at step {found['step']}: {found['data']}, {number_of(found['samples'], 'sample')}, "
        f"{number_of(found['tokens'], 'token')}"
    )
    if left_out := found["left_out"]:
        yield f"left out {len(left_out):,}: {some(left_out, _MOST_NAMED)}"
    trained_in = found["trained_in"]
    precision = found["precision"]
    if trained_in.partition(",")[0] != precision.partition(",")[0]:
        yield f"the run trained in {trained_in}; this machine computes it in {precision}"

    # A table of one row, or of two: a run in fp32 has nothing beside it.
    rows = [(precision, found["in_precision"])]
    if found["in_fp32"]:
        rows.append(("fp32", found["in_fp32"]))
    width = max(len(name) for name, _ in rows)
    yield f"{'':{width}}  {'loss (nats)':>11}  {'perplexity':>10}  {'accuracy':>8}"
    for name, figures in rows:
        loss = _figure(figures["loss"], ".4f")
        perplexity = _figure(figures["perplexity"], ".3f")
        accuracy = _figure(figures["accuracy"], ".2%")
        yield f"{name:{width}}  {loss:>11}  {perplexity:>10}  {accuracy:>8}"
    if found["difference"]:
        yield _signal(found["difference"])


def _signal(found: dict[str, Any]) -> str:
    """The difference in words."""
    if found["nats"] is None:
        return "difference: not finite"
    text = f"difference: {found['nats']:+.5f} nats"
    if found["share"] is not None:
        text += f" ({found['share']:+.3%})"
    if found["half_width"] is None:
        return f"{text}; there is no interval, of one sample"
    text += f", 95% interval +-{found['half_width']:.5f}"
    if not found["clear"]:
        return f"{text}: these samples show no loss of precision"
    if found["nats"] > 0:
        return f"{text}: the precision costs that much"
    return f"{text}: fp32 is worse by that much"


def _figure(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)
