"""`harness data prepare`: text into files of token ids, once and for many runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from harness.core.config import Documents, HubConfig
from harness.core.errors import ConfigError, DataError, ExitCode, Problem
from harness.data.detect import look, no_such
from harness.data.hub import PREFIX, fetch
from harness.data.prepare import Preparation, Progress, prepare_dataset
from harness.data.rows import FORMATS


def command(
    action: Annotated[Literal["prepare"], typer.Argument(help="what to do")],
    source: Annotated[
        str,
        typer.Argument(
            help="text, JSONL, csv, Parquet, Arrow, webdataset, a folder of one, or hf:NAME"
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="folder to make; the same command goes on with one that was not finished"
        ),
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="tokenizer.json, or a Hugging Face folder with one [default: bytes]"),
    ] = None,
    text_key: Annotated[str, typer.Option(help="key or column that has the text")] = "text",
    format: Annotated[
        Literal["auto", Documents], typer.Option(help="what the source is; auto: looked at")
    ] = "auto",
    bad: Annotated[
        Literal["auto", "skip", "fail"],
        typer.Option(
            help="rows without text, files that are none: skip, fail; auto: skip only empty and binary ones"
        ),
    ] = "auto",
    val_fraction: Annotated[
        float,
        typer.Option(
            min=0.0, max=0.5, help="share held out where the source has no validation files"
        ),
    ] = 0.01,
    processes: Annotated[
        int, typer.Option(min=0, help="processes that tokenize; 0: one for each core")
    ] = 0,
    configuration: Annotated[
        str | None, typer.Option(help="of hf:NAME [default: its own default]")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="of hf:NAME, to train on [default: train, or the only one]")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="of hf:NAME: branch, tag or commit [default: main]")
    ] = None,
    cache: Annotated[
        str | None, typer.Option(help="folder where hf:NAME is kept [default: HF_HUB_CACHE]")
    ] = None,
) -> int:
    hub = None
    if source.startswith(PREFIX):
        hub = fetch(
            source,
            HubConfig.model_construct(configuration=configuration, split=split, revision=revision),
            cache,
        )
    path = Path(hub.folder if hub else source).expanduser()
    if not path.exists():
        raise DataError(no_such(source, path))
    kind = hub.kind if hub else look(path) if format == "auto" else format
    if kind not in FORMATS:
        fix = f"use it as it is: data.path={source}"
        raise ConfigError(Problem(f"has token ids already ({kind})", source, fix=fix))
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[now]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns) as bar:
        shown = bar.add_task(f"{kind} {source}", total=None, now="")
        begun = False

        def tell(progress: Progress) -> None:
            nonlocal begun
            if progress.kept and not begun:
                bar.print(f"going on: {progress.kept} of {progress.tasks} shards are done already")
            begun = True
            now = f"{progress.done / 1e6:,.0f} of {progress.total / 1e6:,.0f} MB"
            bar.update(
                shown, total=progress.total, completed=min(progress.done, progress.total), now=now
            )

        wanted = Preparation(str(path), kind, text_key, bad, tokenizer, val_fraction, hub)
        made = prepare_dataset(wanted, out, processes, tell)
    tokens = {
        split: sum(each["tokens"] for each in made["shards"] if each["split"] == split)
        for split in _SPLITS
    }
    ids = made["vocabulary"]["ids"]
    files = len(made["shards"])
    print(
        f"{out}: {tokens['train']:,} tokens to train on, {tokens['val']:,} to validate on, in {files} files"
    )
    print(
        f"{made['documents']:,} documents, {made['text_bytes']:,} bytes of text, {ids:,} token ids, {made['dtype']}"
    )
    for skip in made["skipped"][:_NAMED]:
        print(f"left out: {skip['name']} ({skip['reason']})")
    if len(made["skipped"]) > _NAMED:
        print(f"left out: {len(made['skipped']) - _NAMED} more, in {out / 'dataset.json'}")
    print(f"train on it: harness train data.path={out}")
    return int(ExitCode.DONE)


_SPLITS = ("train", "val")
_NAMED = 10
