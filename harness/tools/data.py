"""`harness data prepare`: tokenize text into files of token ids, once for many runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from harness.core.config import Documents, HubConfig, text_doubts
from harness.core.errors import ConfigError, DataError, ExitCode, Problem, number_of
from harness.data.detect import look, no_such
from harness.data.hub import PREFIX, fetch
from harness.data.prepare import Preparation, Progress, prepare_dataset
from harness.data.rows import FORMATS


def command(
    action: Annotated[Literal["prepare"], typer.Argument(help="prepare")],
    source: Annotated[
        str,
        typer.Argument(
            help="file or folder of text, JSONL, csv, Parquet, Arrow or webdataset, or hf:NAME"
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(help="new folder; the same command again continues an unfinished one"),
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="tokenizer.json, or a folder with one [default: bytes]"),
    ] = None,
    text_key: Annotated[str, typer.Option(help="key or column with the text")] = "text",
    format: Annotated[
        Literal["auto", Documents], typer.Option(help="format of the source; auto: detected")
    ] = "auto",
    bad: Annotated[
        Literal["auto", "skip", "fail"],
        typer.Option(
            help="rows and files without text: skip, fail, or auto (skip empty and binary ones)"
        ),
    ] = "auto",
    val_fraction: Annotated[
        float,
        typer.Option(min=0.0, max=0.5, help="share held out if the source has no validation files"),
    ] = 0.01,
    processes: Annotated[
        int, typer.Option(min=0, help="tokenizing processes; 0: one for each core")
    ] = 0,
    configuration: Annotated[
        str | None, typer.Option(help="configuration of hf:NAME [default: its own]")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="split of hf:NAME [default: train, or the only one]"),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="branch, tag or commit of hf:NAME [default: main]")
    ] = None,
    cache: Annotated[
        str | None, typer.Option(help="folder that keeps hf:NAME [default: HF_HUB_CACHE]")
    ] = None,
) -> int:
    # What the source is. Every problem with it is found before anything is written.
    hub = None
    place = source
    if source.startswith(PREFIX):
        part = HubConfig.model_construct(
            configuration=configuration, split=split, revision=revision
        )
        hub = fetch(source, part, cache)
        place = hub.folder
    path = Path(place).expanduser()
    if not path.exists():
        raise DataError(no_such(source, path))

    # In which format, and whether there is anything to prepare.
    kind = format
    if hub:
        kind = hub.kind
    elif format == "auto":
        kind = look(path)
    if kind not in FORMATS:
        fix = f"use it as it is: data.path={source}"
        raise ConfigError(Problem(f"has token ids already ({kind})", source, fix=fix))

    # An unfinished preparation of the same source in `out` is continued.
    wanted = Preparation(str(path), kind, text_key, bad, tokenizer, val_fraction, hub)
    made = _prepare(wanted, source, out, processes)
    _summarize(made, out)
    return int(ExitCode.DONE)


def _prepare(
    wanted: Preparation,
    source: str,
    out: Path,
    processes: int,
) -> dict[str, Any]:
    """Prepare, with a progress bar; returns dataset.json's content."""
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[now]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns) as bar:
        task = bar.add_task(f"{wanted.kind} {source}", total=None, now="")
        begun = False

        def show(progress: Progress) -> None:
            nonlocal begun
            if progress.kept and not begun:
                bar.print(f"going on: {progress.kept} of {progress.tasks} shards are done already")
            begun = True
            now = f"{progress.done / 1e6:,.0f} of {progress.total / 1e6:,.0f} MB"
            # Sizes of some formats are estimates: what is done may come to more than there was.
            done = min(progress.done, progress.total)
            bar.update(task, total=progress.total, completed=done, now=now)

        return prepare_dataset(wanted, out, processes, show)


def _summarize(made: dict[str, Any], out: Path) -> None:
    """Print what was written, what was left out, and the command that trains on it."""
    shards = made["shards"]
    tokens = dict.fromkeys(_SPLITS, 0)
    for shard in shards:
        tokens[shard["split"]] += shard["tokens"]
    split = f"{tokens['train']:,} tokens to train on, {tokens['val']:,} to validate on"
    print(f"{out}: {split}, in {number_of(len(shards), 'file')}")
    ids = made["vocabulary"]["ids"]
    text = f"{number_of(made['documents'], 'document')}, {made['text_bytes']:,} bytes of text"
    print(f"{text}, {ids:,} token ids, {made['dtype']}")

    # A large source may have many bad files: the first of them on the screen, all in dataset.json.
    skipped = made["skipped"]
    for skip in skipped[:_NAMED]:
        print(f"left out: {skip['name']} ({skip['reason']})")
    more = len(skipped) - _NAMED
    if more > 0:
        print(f"left out: {more} more, in {out / 'dataset.json'}")
    for text in text_doubts(made):
        print(f"note: {text}")
    print(f"train on it: harness train data.path={out}")


_SPLITS = ("train", "val")
_NAMED = 10
