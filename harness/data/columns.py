"""Documents out of a column of text: Parquet files, and what the datasets library writes (Arrow)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.core.errors import DataError, Problem, some
from harness.core.files import MAX_LARGE, read_mapping
from harness.core.schema import import_extra
from harness.data.rows import FIX_COPY, NAMED, TOKENS_FIX, Listed, Part, Piece, files_below, listed, piece_of
from harness.data.shards import Split, is_validation
from harness.data.text import BadFiles

BATCH = 1024


class Parquet:
    """A column of Parquet files."""

    kind = "Parquet"
    suffixes = (".parquet",)

    def parts(self, path: Path, key: str, bad: BadFiles) -> Listed:
        """Row groups. Every file must have the column, with text in it."""
        library = import_extra("pyarrow.parquet", "hf", "data.path")
        parts: list[Part] = []
        problems: list[Problem] = []
        files, left_out = files_below(path, self.suffixes)
        for file, split in files:
            try:
                with _reading(f"data.path: {file}", "cannot be read as Parquet"), library.ParquetFile(file) as opened:
                    if problem := _column(opened.schema_arrow, key, file):
                        problems.append(problem)
                        continue
                    groups = [opened.metadata.row_group(number) for number in range(opened.metadata.num_row_groups)]
                    parts += [
                        Part(str(file), number, number + 1, group.total_byte_size, split)
                        for number, group in enumerate(groups)
                    ]
            except DataError as error:
                problems += error.problems
        return listed(parts, left_out, problems, path)

    def read(self, part: Part, key: str) -> Iterator[Piece]:
        """The rows of a row group."""
        library = import_extra("pyarrow.parquet", "hf", "data.path")
        where = f"{part.path}, row group {part.begin}"
        with _reading(where), library.ParquetFile(part.path) as opened:
            groups = list(range(part.begin, part.end))
            row = 0
            for batch in opened.iter_batches(batch_size=BATCH, row_groups=groups, columns=[key]):
                for value in batch.column(0).to_pylist():
                    yield piece_of(value, key, f"{where}, row {row}")
                    row += 1


class ArrowFolder:
    """What `save_to_disk` of the datasets library writes: a folder with state.json, or one of them for each split; or
    one file, as a stream or not."""

    kind = "Arrow"
    suffixes = (".arrow", ".feather")

    def parts(self, path: Path, key: str, bad: BadFiles) -> Listed:
        """Whole files. Every file must have the column, with text in it."""
        library = import_extra("pyarrow", "hf", "data.path")
        ipc = import_extra("pyarrow.ipc", "hf", "data.path")
        parts: list[Part] = []
        problems: list[Problem] = []
        for file, split in self._listed(path):
            try:
                with _reading(f"data.path: {file}", "cannot be read as Arrow"), library.OSFile(str(file)) as source:
                    problem = _column(_opened(ipc, source).schema, key, file)
                    size = file.stat().st_size
                if problem:
                    problems.append(problem)
                    continue
                parts.append(Part(str(file), 0, 0, size, split))
            except DataError as error:
                problems += error.problems
        return listed(parts, self._other_splits(path), problems, path)

    def read(self, part: Part, key: str) -> Iterator[Piece]:
        """The rows of a file."""
        library = import_extra("pyarrow", "hf", "data.path")
        ipc = import_extra("pyarrow.ipc", "hf", "data.path")
        row = 0
        with _reading(part.path), library.OSFile(part.path) as source:
            for batch in _batches(_opened(ipc, source)):
                for value in batch.column(key).to_pylist():
                    yield piece_of(value, key, f"{part.path}, row {row}")
                    row += 1

    def _listed(self, path: Path) -> list[tuple[Path, Split]]:
        if path.is_file():
            return [(path, "")]
        splits = _split_names(path)
        if splits is None:
            return [(file, "") for file in _arrow_files(path)]
        val = next((name for name in splits if is_validation(name)), None)
        others = [name for name in splits if name != val]
        if "train" not in splits and len(others) > 1:
            what, fix = f"has no split train, but {some(others, NAMED)}", f"data.path={path / others[0]}, or another"
            raise DataError(Problem(what, f"data.path: {path}", fix=fix))
        train = "train" if "train" in splits else next(iter(others), None)
        known: Split = "train" if val else ""
        named: list[tuple[str | None, Split]] = [(train, known), (val, "val")]
        return [(file, split) for name, split in named if name for file in _arrow_files(path / name)]

    def _other_splits(self, path: Path) -> list[tuple[str, str]]:
        used = {Path(file).parent.name for file, _ in self._listed(path)}
        names = [name for name in _split_names(path) or [] if name not in used]
        return [(name, "a split that is neither train nor validation") for name in names]


@contextmanager
def _reading(where: str, what: str = "cannot be read") -> Iterator[None]:
    """Around what pyarrow reads. A small file may say that it unpacks to more than there is memory for.

    Raises DataError in place of pyarrow's errors, which have no common class that is theirs alone.
    """
    arrow = import_extra("pyarrow", "hf", "data.path")
    try:
        yield
    except MemoryError as error:
        fix = "write it again with fewer rows in a group and shorter texts, without dictionaries: "
        fix += "pyarrow.parquet.write_table(..., row_group_size=1000, use_dictionary=False)"
        raise DataError(Problem(what, where, f"it does not fit into memory: {error}".rstrip(": "), fix)) from error
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise DataError(Problem(what, where, str(error)[:300], FIX_COPY)) from error


# What pyarrow calls types of text, and lists of whole numbers.
_TEXT = re.compile(r"(large_)?string(_view)?$|dictionary<values=(large_)?string(_view)?\b")
_IDS = re.compile(r"(large_|fixed_size_)?list<\w+: u?int\d+")


def _column(schema: Any, key: str, file: Path) -> Problem | None:
    names: list[str] = list(schema.names)
    if key not in names:
        why = f"its columns: {', '.join(names[:NAMED]) or 'none'}"
        return Problem(f'has no column "{key}"', f"data.path: {file}", why, "set data.text_key to the one with text")
    if names.count(key) > 1:
        fix = "write the file again with other names"
        return Problem(f'has {names.count(key)} columns of the name "{key}"', f"data.path: {file}", fix=fix)
    kind = str(schema.field(key).type)
    if not _TEXT.match(kind):
        fix = TOKENS_FIX if _IDS.match(kind) else "set data.text_key to a column of text"
        return Problem(f'column "{key}" has {kind}, not text', f"data.path: {file}", fix=fix)
    return None


def _opened(ipc: Any, source: Any) -> Any:
    """A reader of Arrow's stream format, which datasets writes, or of its file format. Raises ValueError."""
    try:
        return ipc.open_stream(source)
    except ValueError:
        source.seek(0)
        return ipc.open_file(source)


def _batches(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "get_batch"):
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        yield from reader


def _split_names(path: Path) -> list[str] | None:
    """Of a folder with several splits; None for a single one."""
    names = read_mapping(path / "dataset_dict.json").get("splits")
    return [str(name) for name in names] if isinstance(names, list) else None


def _arrow_files(path: Path) -> list[Path]:
    """The files that state.json names. Raises DataError if it names none that are there."""
    state = read_mapping(path / "state.json", MAX_LARGE)
    named = state.get("_data_files")
    names = [entry.get("filename") for entry in named if isinstance(entry, dict)] if isinstance(named, list) else []
    files = [path / name for name in names if isinstance(name, str) and "/" not in name]
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files or state.get("_indices_files"):
        fix = "write it again with save_to_disk"
        if not state:
            why = "it has no state.json of save_to_disk; a cache of datasets may have several versions of one text"
            fix = "name one file: data.path=FILE.arrow; or datasets.Dataset.from_file(FILE).save_to_disk(DIR)"
        elif missing:
            why = f"missing: {', '.join(missing[:NAMED])}"
        elif files:
            why, fix = "it has a table of indices, whose order would be lost", f"flatten_indices(), then {fix}"
        else:
            why = "its state.json names no files that can be read"
        raise DataError(Problem("is no whole data set", f"data.path: {path}", why, fix))
    return files
