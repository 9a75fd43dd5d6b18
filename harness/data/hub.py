"""A data set of the Hugging Face hub, `hf:NAME`: which files are wanted; these alone go into the hub's cache.

1. The names of all files of the repository are laid out as empty files beside its description (README.md), and the
   datasets library says which of them a configuration and a split mean.
2. Their size is compared with the room on the disk, and then they are fetched and read as any folder is.

Offline, the same is asked of the cache. Nothing of a repository is run.
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
from harness.data.rows import ROWS, choose_splits
from harness.data.splits import Split
from harness.data.text import NAMED

PREFIX = "hf:"

# What describes a data set. .gitattributes is in every repository: the snapshot has a folder even without a README.
_DESCRIPTION = ("README.md", ".huggingface.yaml", ".gitattributes")
# Options of a reader that do not say how to read: names, and the files, which are chosen here.
_OTHER_OPTIONS = ("name", "version", "data_dir", "data_files", "description", "features", "columns")
_LETTERS = 400
_UNLISTED = (
    "files that are not in the cache",
    "offline, without a list of what the repository has: all there is was taken",
)


@dataclass(frozen=True, slots=True)
class Fetched:
    """A data set that lies in the cache.

    name: hf:NAME@COMMIT.
    folder: where its files lie.
    kind: their format.
    files: paths with their splits.
    left_out: names and why.
    options: of the library's reader, as the data set's description gives them.
    """

    name: str
    folder: str
    kind: Documents
    files: tuple[tuple[str, Split], ...]
    left_out: tuple[tuple[str, str], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def fetch(
    given: str,
    wanted: HubConfig,
    cache: str | None,
    check: Callable[[int, str], None] = lambda size, kind: None,
) -> Fetched:
    """The files of `given`, hf:NAME.

    cache: the folder to fetch into; None: the hub's own.
    check: is called with bytes and format before anything is fetched, and raises if that is too much.

    Raises DataError for what is not there, cannot be fetched, has no room or has no rows of text; ConfigError.
    """
    # As the hub's own addresses have it: hf://datasets/NAME.
    repository = given.removeprefix(PREFIX).removeprefix("//datasets/")
    hub = importlib.import_module("huggingface_hub")
    if not sys.stderr.isatty():
        hub.utils.disable_progress_bars()  # a log would get a line for each of their steps
    at: dict[str, Any] = {"repo_id": repository, "repo_type": "dataset", "cache_dir": None}
    if cache:
        at["cache_dir"] = str(Path(cache).expanduser())

    # The description gives the commit; that one is asked from here on.
    described = _ask(
        given,
        hub.snapshot_download,
        revision=wanted.revision,
        allow_patterns=list(_DESCRIPTION),
        **at,
    )
    folder = Path(described)
    at["revision"] = folder.name
    name = f"{given}@{folder.name}"
    sizes, all_listed = _sizes(hub, folder, at)

    # Which files are wanted; of these, those that are not in the cache.
    kind, options, splits = _describe(name, folder, list(sizes), wanted.configuration)
    files, left_out = choose_splits(splits, wanted.split, f"data.path: {name}", "data.split=")
    chosen = [path.as_posix() for path, _ in files]
    missing = [path for path in chosen if not (folder / path).is_file()]
    if missing:
        all_bytes = sum(sizes[path] for path in chosen)
        check(all_bytes, kind)
        bytes_to_come = sum(sizes[path] for path in missing)
        _check_room(name, bytes_to_come, folder)
        # Patterns: a name with brackets would match other files.
        patterns = [glob.escape(path) for path in missing]
        _ask(given, hub.snapshot_download, allow_patterns=patterns, **at)

    if not all_listed:
        left_out.append(_UNLISTED)
    paths: list[tuple[str, Split]] = []
    for path, split in files:
        in_cache = str(folder / path)
        paths.append((in_cache, split))
    return Fetched(name, str(folder), kind, tuple(paths), tuple(left_out), options)


def _sizes(hub: Any, folder: Path, at: Mapping[str, Any]) -> tuple[dict[str, int], bool]:
    """(bytes of each file of the repository, whether these are all of its files).

    hub: the library. folder: of the cache. at: its arguments for the repository and the commit.
    """
    sizes: dict[str, int] = {}
    try:
        for file in hub.get_cached_repo_tree(**at):
            sizes[file.path] = file.size
    except hub.errors.CachedRepoTreeNotFoundError:
        # Offline, in a cache of an older version of the library: only the files that lie there are known.
        for path in folder.rglob("*"):
            if path.is_file():
                sizes[path.relative_to(folder).as_posix()] = 0
        return sizes, False
    return sizes, True


def _ask(given: str, question: Callable[..., Any], **arguments: Any) -> Any:
    """What the hub's library answers. Raises DataError."""
    try:
        return question(**arguments)
    except Exception as error:  # of the network, the hub, the disk
        fix = (
            "check the name, data.revision and the network; hf auth login for what is private or gated. To train "
            f"offline, fetch it before: hf download {given.removeprefix(PREFIX)} --repo-type dataset"
        )
        why = f"{type(error).__name__}: {error}"[:_LETTERS]
        raise DataError(Problem("cannot be fetched", f"data.path: {given}", why, fix)) from error


def _describe(
    name: str, folder: Path, listed: list[str], configuration: str | None
) -> tuple[Documents, dict[str, Any], dict[str, list[Path]]]:
    """(format, options of its reader, relative paths of each split) of a configuration.

    folder: has the description.
    listed: all files of the repository.

    Raises DataError.
    """
    where = f"data.path: {name}"
    library = importlib.import_module("datasets")
    with tempfile.TemporaryDirectory() as scratch:
        outline = Path(scratch).resolve() / "outline"
        outline.mkdir()
        _lay_out(outline, folder, listed, where)
        try:
            builder = library.load_dataset_builder(
                str(outline), configuration, cache_dir=f"{scratch}/cache"
            )
        except Exception as error:
            why = str(error).replace(scratch, "")[:_LETTERS]
            fix = "data.configuration=NAME picks one; what has files of no format that is read: docs/guide/datasets.md"
            raise DataError(Problem("has no such data", where, why, fix)) from error

        # The description may name files by pattern or path: again none outside of the folder.
        splits: dict[str, list[Path]] = {}
        for split, paths in (builder.config.data_files or {}).items():
            inside = [Path(path) for path in paths]
            if outside := [str(path) for path in inside if not path.is_relative_to(outline)]:
                what = "names files outside of it"
                fix = "take another data set, or fetch these yourself"
                raise DataError(Problem(what, where, some(outside, NAMED), fix))
            if inside:
                splits[str(split)] = [path.relative_to(outline) for path in inside]

    # The library names the module of its reader; `ROWS` has the formats that are rows of text.
    kinds: dict[str, Documents] = {}
    for each, source in ROWS.items():
        kinds[source.reader.partition(".")[0]] = each
    kind = kinds.get(builder.name)
    if kind is None or not splits:
        what = f"has no rows of text: the library reads it as {builder.name}"
        fix = "data.target, with a function that loads it: docs/guide/datasets.md"
        raise DataError(Problem(what, where, fix=fix))
    return kind, _options(builder.config), splits


def _lay_out(outline: Path, folder: Path, listed: list[str], where: str) -> None:
    """Make the files `listed` in `outline`: the description as it is in `folder`, all others empty.

    Raises DataError for a name that leads out of the folder: anybody may have made the repository.
    """
    for path in listed:
        file = outline / path
        if not file.resolve().is_relative_to(outline):
            fix = "take another data set"
            raise DataError(Problem("names a file outside of it", where, path, fix))
        file.parent.mkdir(parents=True, exist_ok=True)
        if path in _DESCRIPTION:
            shutil.copyfile(folder / path, file)
        else:
            file.touch()


def _options(config: Any) -> dict[str, Any]:
    """What a data set's description says of how to read it."""
    defaults = {each.name: each.default for each in dataclasses.fields(config)}
    options: dict[str, Any] = {}
    for key, value in vars(config).items():
        is_plain = isinstance(value, str | int | bool | list)
        if is_plain and key not in _OTHER_OPTIONS and value != defaults.get(key):
            options[key] = value
    return options


def _check_room(name: str, needed: int, folder: Path) -> None:
    """Raises DataError if `needed` bytes do not fit on the disk of `folder`, which may not be there yet."""
    disk = next(each for each in (folder, *folder.parents) if each.is_dir())
    free = shutil.disk_usage(disk).free
    if needed > free:
        wanted = f"{needed / 1e9:,.1f} GB are still to be fetched"
        why = f"{wanted}, and the disk of {disk} has {free / 1e9:,.1f} GB left"
        fix = "data.cache=FOLDER on a larger disk"
        raise DataError(Problem("has no room", f"data.path: {name}", why, fix))
