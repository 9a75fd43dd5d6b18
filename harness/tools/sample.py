"""`harness sample`: generate text from a prompt with a run's model."""

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


# An FP8 GEMM takes a multiple of this many rows. Padding at the end changes nothing in a causal model.
_MULTIPLE = 16


class Choice(StrEnum):
    """run: as the run computes. fp32: in float32 throughout."""

    run = "run"
    fp32 = "fp32"


def command(
    run: RunFolder,
    text: Annotated[str, typer.Argument(help="the prompt")],
    tokens: Annotated[int, typer.Option(min=1, help="tokens to generate, at most")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0: always the likeliest token")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option(min=0, help="likeliest tokens to choose among; 0: all")
    ] = 50,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="the same seed gives the same text")
    ] = 0,
    step: Annotated[
        int | None, typer.Option(help="checkpoint's step [default: the newest that verifies]")
    ] = None,
    precision: Annotated[
        Choice, typer.Option(help="run: the run's precision; fp32: float32 throughout")
    ] = Choice.run,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="tokenizer.json, or a folder with one [default: the run's, or bytes]"),
    ] = None,
) -> int:
    """Print the prompt and the generated text; nothing is written into the run.

    Raises ConfigError if `run` is no run, or its model gives no logits. Raises CheckpointError if no checkpoint
    verifies.
    """
    from harness.tools.restored import restore

    restored = restore(run, step)
    codec, end = codec_of(restored, tokenizer)
    ids = codec.encode([text])[0].tolist()
    if not ids:
        fix = "give a word to begin with"
        raise ConfigError(Problem("the prompt has no token", "TEXT", fix=fix))

    fp32 = precision is Choice.fp32
    written = generate(restored, ids, tokens, temperature, top_k, seed, fp32, end)

    # How it was drawn goes to stderr: stdout has the text alone.
    name = "fp32" if fp32 else restored.name
    drawn = "the likeliest tokens"
    if temperature:
        drawn = f"temperature {temperature:g}, top-k {top_k}, seed {seed}"
    say(f"{short(restored.folder)} at step {restored.step}, {name}, {drawn}", sys.stderr)
    say(codec.decode([*ids, *written]))
    return int(ExitCode.DONE)


def codec_of(restored: Restored, tokenizer: Path | None) -> tuple[Encoder, int | None]:
    """The encoder that made the run's data, and the id that ends a document, if there is one.

    Raises ConfigError if `tokenizer` is another one than the data's, or if it is needed and not given.
    """
    from harness.core.files import MAX_LARGE, read_mapping
    from harness.data.tokenizer import Bytes, Tokenizer

    data = restored.folder / "data"
    own, info = data / "tokenizer.json", read_mapping(data / "corpus.json", MAX_LARGE)

    # Without a tokenizer the token ids must be bytes.
    if tokenizer is None and not own.is_file():
        if of_bytes(restored):
            return Bytes(), None
        target = restored.config.data.target
        if target is not None:
            what = "the run's data are no text"
            why = f"data.target {target} gives samples of its own"
            fix = "if these are token ids: --tokenizer PATH, the one that made them"
            raise ConfigError(Problem(what, str(restored.folder), why, fix))
        what = "the prompt cannot be turned into tokens"
        why = "the run trained on token ids, and nobody said what they mean"
        raise ConfigError(Problem(what, str(data), why, "give --tokenizer PATH"))

    # Another tokenizer would give other ids.
    made = Tokenizer(own if tokenizer is None else tokenizer)
    expected = info.get("tokenizer")
    if expected and made.vocabulary.tokenizer != expected:
        what = "is not the tokenizer that the run's data were made with"
        fix = "leave it out, or give that one"
        raise ConfigError(Problem(what, f"--tokenizer {tokenizer}", fix=fix))
    return made, made.vocabulary.separator


def of_bytes(restored: Restored) -> bool:
    """Whether the run's token ids are known to be bytes: those of text that no tokenizer read.

    A file of ids may come from any tokenizer.
    """
    from harness.core.files import MAX_LARGE, read_mapping

    data, config = restored.folder / "data", restored.config.data
    if config.target is not None:
        return False
    folders = [data / str(number) for number in range(len(config.mixture))] or [data]
    for folder in folders:
        source = read_mapping(folder / "corpus.json", MAX_LARGE)
        if source.get("tokenizer") or source.get("kind") == "tokens":
            return False
    return True


def generate(
    restored: Restored,
    ids: list[int],
    count: int,
    temperature: float,
    top_k: int,
    seed: int,
    fp32: bool = False,
    end: int | None = None,
) -> list[int]:
    """`count` tokens after `ids`; fewer if the token `end` comes, which is left out.

    The model sees the last data.context tokens. Raises ConfigError for ids outside of the vocabulary, and MisuseError
    if a logit is not finite.
    """
    import torch

    vocab_size = restored.vocab_size
    if vocab_size is not None and max(ids) >= vocab_size:
        what = f"token {max(ids)} of the prompt is outside of the model's {vocab_size}"
        fix = "give the tokenizer that the model was trained with"
        raise ConfigError(Problem(what, "TEXT", fix=fix))

    # Drawn on the CPU, so that the random numbers do not depend on the device.
    context = restored.config.data.context
    generator = torch.Generator().manual_seed(seed)
    sequence = list(ids)
    with restored.computing(fp32):
        for _ in range(count):
            logits = _after(restored, sequence[-context:], context).float().cpu()
            # Among logits that are not finite there is no token to choose.
            if not bool(torch.isfinite(logits).all()):
                what = "the model's logits are not finite"
                where = f"{restored.folder} at step {restored.step}"
                fix = "see harness explain, or take an earlier --step"
                raise MisuseError(Problem(what, where, fix=fix))
            chosen = choose(logits, temperature, top_k, generator)
            if chosen == end:
                break
            sequence.append(chosen)
    return sequence[len(ids) :]


def choose(
    logits: Tensor,
    temperature: float,
    top_k: int,
    generator: torch.Generator,
) -> int:
    """Draw a token by its logits, float32 [vocab], from softmax(logits / temperature).

    temperature: 0 takes the largest logit, the first of equals.
    top_k: draw among this many largest; 0: among all.
    """
    import torch

    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        lowest = logits.topk(top_k).values[-1]
        logits = torch.where(logits < lowest, -torch.inf, logits)
    shares = torch.softmax(logits.double() / temperature, dim=0)
    return int(torch.multinomial(shares, 1, generator=generator))


def _after(restored: Restored, ids: list[int], context: int) -> Tensor:
    """Logits [vocab] of the token after `ids`, of which there are at most `context`."""
    import torch

    padding = min(-len(ids) % _MULTIPLE, context - len(ids))
    padded = ids + padding * [ids[-1]]
    inputs = torch.tensor([padded], device=restored.device)
    return restored.logits(inputs)[0, len(ids) - 1]
