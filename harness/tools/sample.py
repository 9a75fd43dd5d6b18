"""`harness sample`: text that a run's model writes on from a prompt."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.core.errors import ConfigError, ExitCode, MisuseError, Problem
from harness.core.screen import say
from harness.report import RunFolder, short

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from harness.data.tokenizer import Encoder
    from harness.tools.restored import Restored


# Rows of an FP8 GEMM come in multiples of this; more places at the end change nothing in a causal model.
_MULTIPLE = 16


class Choice(StrEnum):
    """run: as the run computes. fp32: in float32 throughout."""

    run = "run"
    fp32 = "fp32"


def command(
    run: RunFolder,
    text: Annotated[str, typer.Argument(help="the prompt")],
    tokens: Annotated[int, typer.Option(min=1, help="tokens to write at most")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0: always the likeliest token")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option(min=0, help="choose among this many likeliest tokens; 0: all")
    ] = 50,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="the same seed writes the same text")
    ] = 0,
    step: Annotated[
        int | None, typer.Option(help="checkpoint of this step [default: the newest that verifies]")
    ] = None,
    precision: Annotated[
        Choice, typer.Option(help="run: as the run computes; fp32: without any of that")
    ] = Choice.run,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="tokenizer.json, or a folder with one [default: the run's; bytes without one]"
        ),
    ] = None,
) -> int:
    """Print the prompt and what comes after it; nothing is written into the run.

    Raises ConfigError if `run` is no run, or its model gives no logits, CheckpointError if no checkpoint verifies.
    """
    from harness.tools.restored import restore

    restored = restore(run, step)
    codec, end = codec_of(restored, tokenizer)
    ids = codec.encode([text])[0].tolist()
    if not ids:
        raise ConfigError(
            Problem("the prompt has no token", "TEXT", fix="give a word to begin with")
        )
    written = write_on(
        restored, ids, tokens, temperature, top_k, seed, precision is Choice.fp32, end
    )
    name = "fp32" if precision is Choice.fp32 else restored.name
    drawn = (
        f"temperature {temperature:g}, top-k {top_k}, seed {seed}"
        if temperature
        else "the likeliest tokens"
    )
    say(f"{short(restored.folder)} at step {restored.step}, {name}, {drawn}", sys.stderr)
    say(codec.decode([*ids, *written]))
    return int(ExitCode.DONE)


def codec_of(restored: Restored, tokenizer: Path | None) -> tuple[Encoder, int | None]:
    """What makes tokens of text and back, as the run's data were made, and the id that ends a document, if any.

    Raises ConfigError where `tokenizer` is another than the data's, or is needed and not given.
    """
    from harness.core.files import MAX_LARGE, read_mapping
    from harness.data.tokenizer import Bytes, Tokenizer

    data = restored.folder / "data"
    own, info = data / "tokenizer.json", read_mapping(data / "corpus.json", MAX_LARGE)
    if tokenizer is None and not own.is_file():
        if of_bytes(restored):
            return Bytes(), None
        if restored.config.data.target is not None:
            what, why = (
                "the run's data are no text",
                f"data.target {restored.config.data.target} gives samples of its own",
            )
            fix = "if these are token ids: --tokenizer PATH, the one that made them"
            raise ConfigError(Problem(what, str(restored.folder), why, fix))
        why = "the run trained on token ids, and nobody said what they mean"
        raise ConfigError(
            Problem(
                "the prompt cannot be turned into tokens", str(data), why, "give --tokenizer PATH"
            )
        )
    made = Tokenizer(own if tokenizer is None else tokenizer)
    known = info.get("tokenizer")
    if known and made.vocabulary.tokenizer != known:
        what, fix = (
            "is not the tokenizer that the run's data were made with",
            "leave it out, or give that one",
        )
        raise ConfigError(Problem(what, f"--tokenizer {tokenizer}", fix=fix))
    return made, made.vocabulary.separator


def of_bytes(restored: Restored) -> bool:
    """Whether the run's token ids are known to be bytes: those of text, wherever it lay, that no tokenizer read. A file
    of ids may be anybody's."""
    from harness.core.files import MAX_LARGE, read_mapping

    data, config = restored.folder / "data", restored.config.data
    folders = [data / str(number) for number in range(len(config.mixture))] or [data]
    sources = [read_mapping(folder / "corpus.json", MAX_LARGE) for folder in folders]
    return config.target is None and not any(
        each.get("tokenizer") or each.get("kind") == "tokens" for each in sources
    )


def write_on(
    restored: Restored,
    ids: list[int],
    count: int,
    temperature: float,
    top_k: int,
    seed: int,
    fp32: bool = False,
    end: int | None = None,
) -> list[int]:
    """`count` tokens after `ids`, fewer if `end` comes, which is left out. The model sees the last data.context tokens.

    Raises ConfigError for ids outside of the vocabulary, MisuseError if a logit is not finite.
    """
    import torch

    vocab_size = restored.vocab_size
    if vocab_size is not None and max(ids) >= vocab_size:
        what = f"token {max(ids)} of the prompt is outside of the model's {vocab_size}"
        raise ConfigError(
            Problem(what, "TEXT", fix="give the tokenizer that the model was trained with")
        )
    context = restored.config.data.context
    generator = torch.Generator().manual_seed(seed)
    sequence = list(ids)
    with restored.computing(fp32):
        for _ in range(count):
            logits = _after(restored, sequence[-context:], context).float().cpu()
            if not bool(torch.isfinite(logits).all()):
                what, fix = (
                    "the model's logits are not finite",
                    "see harness explain, or take an earlier --step",
                )
                raise MisuseError(
                    Problem(what, f"{restored.folder} at step {restored.step}", fix=fix)
                )
            chosen = choose(logits, temperature, top_k, generator)
            if chosen == end:
                break
            sequence.append(chosen)
    return sequence[len(ids) :]


def choose(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """A token by its logits, float32 [vocab]: softmax(logits / temperature) over the `top_k` largest, 0: over all.

    temperature 0: the largest, the first of equals.
    """
    import torch

    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        logits = torch.where(logits < logits.topk(top_k).values[-1], -torch.inf, logits)
    shares = torch.softmax(logits.double() / temperature, dim=0)
    return int(torch.multinomial(shares, 1, generator=generator))


def _after(restored: Restored, ids: list[int], context: int) -> Tensor:
    """Logits [vocab] of the token that comes after `ids`, which are `context` at most."""
    import torch

    padding = min(-len(ids) % _MULTIPLE, context - len(ids))
    inputs = torch.tensor([[*ids, *[ids[-1]] * padding]], device=restored.device)
    return restored.logits(inputs)[0, len(ids) - 1]
