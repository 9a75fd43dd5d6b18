"""A data set of the Hugging Face hub, `hf:NAME`: which of its files are wanted, fetched into the hub's own cache.

What the repository lists is laid out as empty files, and the datasets library says which of them a configuration and
a split mean. These alone are fetched, once there is room for them, and then read as any folder is. Offline the same is
asked of the cache. Nothing of a repository is run.
"""

from __future__ import annotations

import dataclasses
import glob
import importlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.core.config import Documents, HubConfig
from harness.core.errors import DataError, Problem, some
from harness.data.documents import NAMED
from harness.data.registry import ROWS
from harness.data.rows import choose_splits
from harness.data.shards import Split

PREFIX = "hf:"
_DESCRIBED = ("README.md", ".huggingface.yaml", ".gitattributes")  # the last is there where no other is
# Of a reader's options, those that are no way to read: names, and files that are chosen here.
_NO_OPTIONS = ("name", "version", "data_dir", "data_files", "description", "features", "columns")
_LONG = 400
_UNLISTED = (
    "files that are not in the cache",
    "offline, without a list of what the repository has: all there is was taken",
)


@dataclass(frozen=True, slots=True)
class Fetched:
    """name: hf:NAME@COMMIT. folder: where its files lie. files: paths with their splits. left_out: names and why.
    options: of the library's reader, as the data set says."""

    name: str
    folder: str
    kind: Documents
    files: tuple[tuple[str, Split], ...]
    left_out: tuple[tuple[str, str], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def fetch(
    given: str, wanted: HubConfig, cache: str | None, most: Callable[[int, str], None] = lambda size, kind: None
) -> Fetched:
    """The files of `given`, hf:NAME. cache: where to; None: the hub's own folder. most: is told bytes and format before
    anything is fetched, and raises if that is too much.

    Raises DataError for what is not there, cannot be fetched, has no room or is no text; ConfigError.
    """
    repository = given.removeprefix(PREFIX).removeprefix("//datasets/")
    hub = importlib.import_module("huggingface_hub")
    if not sys.stderr.isatty():
        hub.utils.disable_progress_bars()  # a log has a line for each of their steps
    at = {"repo_id": repository, "repo_type": "dataset", "cache_dir": cache and str(Path(cache).expanduser())}
    folder = Path(_asked(given, hub.snapshot_download, revision=wanted.revision, allow_patterns=[*_DESCRIBED], **at))
    at |= {"revision": folder.name}
    name = f"{given}@{folder.name}"
    try:
        sizes = {file.path: file.size for file in hub.get_cached_repo_tree(**at)}
        unlisted = False
    except hub.errors.CachedRepoTreeNotFoundError:  # a cache of an older version, or of another library
        sizes = {path.relative_to(folder).as_posix(): 0 for path in folder.rglob("*") if path.is_file()}
        unlisted = True
    kind, options, splits = _described(name, folder, [*sizes], wanted.configuration)
    files, left_out = choose_splits(splits, wanted.split, f"data.path: {name}", "data.split=")
    missing = [path.as_posix() for path, _ in files if not (folder / path).is_file()]
    if missing:
        most(sum(sizes[path.as_posix()] for path, _ in files), kind)
        _check_room(name, sum(sizes[path] for path in missing), folder)
        _asked(given, hub.snapshot_download, allow_patterns=[glob.escape(path) for path in missing], **at)
    paths: list[tuple[str, Split]] = [(str(folder / path), split) for path, split in files]
    return Fetched(name, str(folder), kind, tuple(paths), (*left_out, *([_UNLISTED] if unlisted else [])), options)


def _asked(given: str, ask: Callable[..., Any], **what: Any) -> Any:
    try:
        return ask(**what)
    except Exception as error:  # of the network, the hub, the disk
        fix = (
            "check the name, data.revision and the network; hf auth login for what is private or gated. To train "
            f"offline, fetch it before: hf download {given.removeprefix(PREFIX)} --repo-type dataset"
        )
        why = f"{type(error).__name__}: {error}"[:_LONG]
        raise DataError(Problem("cannot be fetched", f"data.path: {given}", why, fix)) from error


def _described(
    name: str, folder: Path, listed: list[str], configuration: str | None
) -> tuple[Documents, dict[str, Any], dict[str, list[Path]]]:
    """(format, options of its reader, paths of each split) of a configuration. Raises DataError."""
    where = f"data.path: {name}"
    library = importlib.import_module("datasets")
    with tempfile.TemporaryDirectory() as made:
        outline = Path(made).resolve() / "outline"
        outline.mkdir()
        for path in listed:
            file = outline / path
            if not file.resolve().is_relative_to(outline):
                raise DataError(Problem("names a file outside of it", where, path, "take another data set"))
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / path, file) if path in _DESCRIBED else file.touch()
        try:
            builder = library.load_dataset_builder(str(outline), configuration, cache_dir=f"{made}/cache")
        except Exception as error:
            fix = "data.configuration=NAME picks one; what has files of no format that is read: docs/guide/datasets.md"
            raise DataError(Problem("has no such data", where, str(error).replace(made, "")[:_LONG], fix)) from error
        splits: dict[str, list[Path]] = {}
        for split, paths in (builder.config.data_files or {}).items():
            inside = [Path(path) for path in paths]
            if outside := [str(path) for path in inside if not path.is_relative_to(outline)]:
                fix = "take another data set, or fetch these yourself"
                raise DataError(Problem("names files outside of it", where, some(outside, NAMED), fix))
            if inside:
                splits[str(split)] = [path.relative_to(outline) for path in inside]
    kinds: dict[str, Documents] = {rows.reader.partition(".")[0]: kind for kind, rows in ROWS.items()}
    kind = kinds.get(builder.name)
    if kind is None or not splits:
        fix = "data.target, with a function that loads it: docs/guide/datasets.md"
        raise DataError(Problem(f"is no text: the library reads it as {builder.name}", where, fix=fix))
    defaults = {each.name: each.default for each in dataclasses.fields(builder.config)}
    options = {
        key: value
        for key, value in vars(builder.config).items()
        if key not in _NO_OPTIONS and value != defaults.get(key) and isinstance(value, str | int | bool | list)
    }
    return kind, options, splits


def _check_room(name: str, needed: int, folder: Path) -> None:
    """Raises DataError if `needed` bytes do not fit on the disk of `folder`, which may not be there yet."""
    disk = next(each for each in (folder, *folder.parents) if each.is_dir())
    free = shutil.disk_usage(disk).free
    if needed > free:
        why = f"{needed / 1e9:,.1f} GB are still to be fetched, and the disk of {disk} has {free / 1e9:,.1f} GB left"
        raise DataError(Problem("has no room", f"data.path: {name}", why, "data.cache=FOLDER on a larger disk"))
