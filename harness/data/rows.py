"""Documents out of rows: JSONL, JSON, csv, Parquet, Arrow, webdataset, as Hugging Face's datasets library reads them.

The library's readers give tables of a few hundred rows, file by file, without a copy in its cache. This module adds
which column has the text, how a file is divided into parts, and what an error says. Rows are counted from 0.

To add a format: a class here with the library's reader (`Rows`), its line in `ROWS` at the end, and its name in
`core.config.Documents`. Whatever the library reads as something else without an error must be refused here.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import functools
import importlib
import io
import itertools
import logging
import lzma
import re
import shutil
import tarfile
import tempfile
import warnings
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from harness.core.config import Documents
from harness.core.errors import DataError, Problem, some
from harness.core.files import MAX_LARGE
from harness.data.documents import (
    DocumentSource,
    Files,
    Listed,
    Part,
    Piece,
    PlainText,
    files_below,
    is_skipped,
    listed,
    ranges,
)
from harness.data.splits import Split, is_validation
from harness.data.text import IS_LFS, LFS, NAMED, BadFiles

JSON = ".json"
"""Lines or one array of objects; in a folder a .json often describes other files, so it is data only if alone."""

_TABLE_ROWS = 256
_LAST = 1 << 62  # the end of a file whose rows are not counted
_UNPACKED = 4  # times as large as packed, about
_PACKED = (".gz", ".zst")
_WITHOUT_BLANK_LINES = "utf_8_without_blank_lines"
_LOOKED_AT = 5  # samples of webdataset, for the endings they have
_HEAD = 1 << 16  # bytes, in which a table's names end
_LONGEST_FIELD = 1 << 30  # characters
_QUOTING = (
    "quoting",
    "quotechar",
    "doublequote",
    "escapechar",
    "encoding",
    "dialect",
)  # options of pandas
# Options of pandas with which the first line may be no line of names.
_NAMING = ("names", "header", "skiprows")
_PANDAS_CUTS = "Length of header or names does not match"  # how its warning begins
_COLUMNS_NAMED, _LETTERS = 8, 300

_FIX_COPY = "copy the file again, or write it again"
_FIX_LFS = "git lfs pull in its repository, or download the file itself"
_FIX_ENCODING = "rows must be UTF-8: iconv -f utf-16 -t utf-8 OLD > NEW (or -f latin1); else copy the file again"
_FIX_QUOTES = (
    "repair it there, or copy the file again if it was cut short. If no quote of the file encloses a field: "
    'python -c "import csv, sys; csv.field_size_limit(1 << 30); '
    'csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, delimiter={!r}, quoting=csv.QUOTE_NONE))" '
    "< FILE > NEW.csv; then data.path=NEW.csv. If a text has a backslash before its quotes: the same with "
    "escapechar=chr(92), doublequote=False in place of quoting=csv.QUOTE_NONE"
)
_SEPARATORS = (";", "\t", ",", "|")
_FIX_SEPARATOR = (
    'python -c "import csv, sys; csv.field_size_limit(1 << 30); '
    'csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, delimiter={!r}))" < FILE > NEW.csv; then data.path=NEW.csv'
)
_FIX_TABLE = f"{_FIX_COPY}; or repair it there: close every quote, and put texts that have commas into quotes"
_FIX_KEY = "set data.text_key to the one that has the text"
_FIX_NAMES = "If the first line is no line of names, write one: sed -i 1itext FILE, for one column"
_PLAIN_NAME = re.compile(r"[\w-]+")
_SKIP_ROWS = "data.bad=skip leaves such rows out"
_FIX_NUMBERS = (
    f"{_FIX_KEY}, if there is one. Numbers, dates and labels: data.target (docs/guide/datasets.md)"
)
_FIX_LIST = "give each of the list a row: jq -c '{}' FILE > NEW.jsonl; then data.path=NEW.jsonl"
_FIX_PAIR = (
    "join what belongs together: jq -c '{{text: ({})}}' FILE > NEW.jsonl; then data.path=NEW.jsonl"
)
_FIX_CHAT = (
    "write chats as text, as the tokenizer's template has it: {}python -c \"import json, sys; from transformers import "
    "AutoTokenizer; render = AutoTokenizer.from_pretrained(sys.argv[1]).apply_chat_template; "
    "[print(json.dumps({{'text': render({}, tokenize=False)}})) for row in map(json.loads, sys.stdin)]\" TOKENIZER "
    "< {} > NEW.jsonl; then data.path=NEW.jsonl data.tokenizer=TOKENIZER (more in docs/guide/data.md#chats)"
)
_NAME_ROLES = (
    'jq -c \'.{0} |= map({{role: ({{human: "user", gpt: "assistant"}}[.from] // .from), content: .value}})\' FILE '
    "> ROLES; "
)
# Names of columns (lower case) that people join into one text: what is asked, and what is answered.
_ASKED = ("system", "instruction", "context", "input", "prompt", "question", "problem")
_ANSWERED = ("completion", "output", "response", "answer", "solution")
_FIX_JSON = (
    "copy it again if it was cut short; jq -c . FILE > NEW says which line is no JSON, jq -Rc 'fromjson?' FILE > NEW "
    "leaves such lines out"
)
_FIX_MEMORY = (
    "write it again with fewer rows in a group and shorter texts, without dictionaries: "
    "pyarrow.parquet.write_table(..., row_group_size=1000, use_dictionary=False)"
)
_FIX_BYTES = (
    "if these bytes are UTF-8: python -c \"import pyarrow.parquet as pq; t = pq.read_table('FILE'); "
    "n = t.column_names.index('{0}'); pq.write_table(t.set_column(n, '{0}', t['{0}'].cast('string')), 'NEW.parquet')\""
)
_FIX_IDS = (
    "token ids are read from a .bin: numpy.concatenate(ROWS).astype('<u4').tofile('train.bin'), each row with its "
    "end-of-text id; then data.path=train.bin data.dtype=uint32"
)


class Columns(NamedTuple):
    """What the rows of a table have.

    names: of the columns.
    fix: what to do if none of them is the text.
    """

    names: Sequence[str]
    fix: str


class Rows:
    """Files of one format of the library.

    kind: its name in `core.config.Documents`.
    suffixes: endings of its files, lower case.
    reader: a module of datasets.packaged_modules, and its class.
    fix: what helps if the library cannot read a file.
    names_in_first_line: whether a file's first line names its columns, and may be missing.
    """

    kind: str
    suffixes: tuple[str, ...]
    reader: str
    fix = _FIX_COPY
    names_in_first_line = False

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        """options: of the reader, as a data set's own description gives them."""
        self._given = dict(options or {})
        self._opened: tuple[str, str] | None = None
        self._rows: Iterator[Piece] = iter(())
        self._next = 0

    def parts(
        self,
        path: Path,
        key: str,
        bad: BadFiles,
        files: Files | None = None,
    ) -> Listed:
        """Ranges of rows. The first row of every file must have a text."""
        found, left_out = files or self._files(path)
        parts: list[Part] = []
        problems: list[Problem] = []
        for file, split in found:
            size = file.stat().st_size
            if not size:
                left_out.append((file.name, "empty"))
                continue
            if _begins(file, LFS):
                problems.append(Problem(f"is {IS_LFS}", f"data.path: {file}", fix=_FIX_LFS))
                continue
            # The size of a packed file is estimated as it will be unpacked.
            if file.name.lower().endswith(_PACKED):
                size *= _UNPACKED

            # The first row shows before hours of work that the file can be read, and that the key is the right one.
            try:
                with closing(self._documents(str(file), key)) as rows:
                    first = next(rows, None)
                divided = self._divide(file, size)
            except DataError as error:
                problems += error.problems
                continue
            if first is not None and first.fault and not is_skipped(first.fault, bad):
                where = f"data.path: {first.where}"
                problems.append(Problem(first.fault, where, first.hint, first.fix))
            for begin, end, count in divided:
                part = Part(str(file), begin, end, count, split)
                parts.append(part)
        return listed(parts, left_out, problems, path)

    def read(self, part: Part, key: str) -> Iterator[Piece]:
        """The rows of a part. Goes on in the file where the part before ended. Raises DataError."""
        # Readers have no way to a row but through all rows before it, so the generator is kept from part to part.
        wanted = (part.path, key)
        if self._opened != wanted or self._next > part.begin:
            self._opened = wanted
            self._next = 0
            self._rows = self._documents(part.path, key)

        # Rows before the part are read and dropped.
        while self._next < part.end:
            piece = next(self._rows, None)
            if piece is None:
                return
            self._next += 1
            if self._next > part.begin:
                yield piece

    def _files(self, path: Path) -> Files:
        return files_below(path, self.suffixes)

    def _divide(self, file: Path, size: int) -> list[tuple[int, int, int]]:
        """(first row, row after the last, bytes) of every part. size: bytes of the file, about, once unpacked."""
        return [(0, _LAST, size)]

    def _options(self, path: str, key: str) -> dict[str, Any]:
        """Options of the reader for one file."""
        return {"features": _features(key)}

    def _documents(self, path: str, key: str) -> Generator[Piece, None, None]:
        """Every row. Raises DataError for what the library cannot read, with what it said."""
        row = 0
        what = f"cannot be read as {self.kind}"
        try:
            for texts, columns in self._tables(path, key):
                for text in texts.to_pylist():
                    yield _piece(text, key, self._where(path, row), columns)
                    row += 1
        except DataError:
            raise
        except MemoryError as error:
            why = f"it does not fit into memory: {error}".rstrip(": ")
            raise DataError(Problem(what, f"data.path: {path}", why, _FIX_MEMORY)) from error
        except Exception as error:  # several libraries read the file, and it may hold anything
            where = f"data.path: {path}"
            if row:
                where += f", row {row} or later"
            why = f"{error or type(error).__name__}"[:_LETTERS]
            fix = _FIX_ENCODING if isinstance(error, UnicodeError) else self.fix
            raise DataError(Problem(what, where, why, fix)) from error

    def _where(self, path: str, row: int) -> str:
        """The place of the row that is read, for a message."""
        return f"{path}, row {row}"

    def _tables(self, path: str, key: str) -> Iterator[tuple[Any, Columns]]:
        """Tables of a file: the texts of some rows, an Arrow array of large_string, and what the rows have."""
        columns: list[Columns] = []
        own = self._options(path, key)

        def only_texts(table: Any, json_field_paths: Sequence[Sequence[str]] = ()) -> Any:
            found = _columns(table, key)
            if self.names_in_first_line and any(" " in name for name in found.names):
                found = found._replace(fix=f"{found.fix}. {_FIX_NAMES}")
            columns[:] = [found]
            # Under the name that the library expects: Parquet names the whole column, not a field of it.
            return _texts(table, key, path, json_field_paths).rename_columns([*own["features"]])

        # A data set's own description knows better how its files are to be read.
        options = {**own, **self._given}
        with _reader(self.reader, path, **options) as reader:
            # The library would cast every table to the columns of the first rows, which not all rows need have.
            reader._cast_table = only_texts
            reader.info.features = own["features"]
            for table in _batches(reader):
                yield table.column(0), columns[0]


class JsonLines(Rows):
    """A JSON object a line, its text under a key; or, in a file called .json, one array of such objects."""

    kind = "JSONL"
    suffixes = (
        ".jsonl",
        ".jsonl.gz",
        ".jsonl.zst",
        ".jsonlines",
        ".ndjson",
        ".ndjson.gz",
        ".ndjson.zst",
        ".json.gz",
        ".json.zst",
    )
    reader = "json.json.Json"
    fix = _FIX_JSON

    def _files(self, path: Path) -> Files:
        # A .json is data only if there is nothing else, see JSON.
        files, left_out = super()._files(path)
        others = files_below(path, (JSON,)) if path.is_dir() else ([], [])
        if not files:
            return others
        why = "a .json beside JSONL: data only where there is nothing else"
        beside = [(file.relative_to(path).as_posix(), why) for file, _ in others[0]]
        return files, [*left_out, *beside]

    def _options(self, path: str, key: str) -> dict[str, Any]:
        _drop_blank_lines()
        return {
            "features": _features(key),
            "parse_agent_traces": False,
            "encoding": _WITHOUT_BLANK_LINES,
        }

    def _divide(self, file: Path, size: int) -> list[tuple[int, int, int]]:
        """The rows whose lines begin in each range of bytes. What is packed, or called .json, is one part."""
        if size > MAX_LARGE and _is_array(file):
            why = f"the library reads an array whole, and this one has over {MAX_LARGE >> 20} MiB"
            fix = "jq -c '.[]' FILE > NEW.jsonl"
            raise DataError(Problem("is too large", f"data.path: {file}", why, fix))
        found = ranges(size)
        if file.name.lower().endswith((JSON, *_PACKED)) or len(found) == 1:
            return super()._divide(file, size)

        # Count the rows that begin in each range: a part is named by rows, as its reader counts them. The reader skips
        # blank lines.
        _, length = found[0]
        rows = [0] * len(found)
        place = 0
        with file.open("rb") as stream:
            for line in stream:
                if not line.isspace():
                    rows[min(place // length, len(found) - 1)] += 1
                place += len(line)

        parts: list[tuple[int, int, int]] = []
        first = 0
        for (begin, end), count in zip(found, rows, strict=True):
            parts.append((first, first + count, end - begin))
            first += count

        # To the end of the file, should the reader count more rows than there are lines.
        first, _, size_of_last = parts[-1]
        parts[-1] = first, _LAST, size_of_last
        return parts


def _begins(file: Path, content: bytes) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(content)) == content


def _is_array(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(4).removeprefix(codecs.BOM_UTF8).startswith(b"[")


class Csv(Rows):
    """Tables of text, separated by commas or (.tsv) tabs, with the columns' names in the first line."""

    kind = "csv"
    suffixes = (".csv", ".csv.gz", ".csv.zst", ".tsv", ".tsv.gz", ".tsv.zst")
    reader = "csv.csv.Csv"
    fix = _FIX_TABLE
    names_in_first_line = True

    def _options(self, path: str, key: str) -> dict[str, Any]:
        # The last two endings: it may be packed (.tsv.gz).
        separator = "\t" if ".tsv" in Path(path).suffixes[-2:] else ","
        # A text of digits, or one that says NA, is a text. No column is an index: in rows that are longer than the
        # header, pandas would take the first field for the index, and every other field for the column before its own.
        return {
            "features": _features(key),
            "sep": separator,
            "keep_default_na": False,
            "chunksize": _TABLE_ROWS,
            "index_col": False,
        }

    def _divide(self, file: Path, size: int) -> list[tuple[int, int, int]]:
        _check_quotes(file, {**self._options(str(file), ""), **self._given})
        return super()._divide(file, size)

    def _tables(self, path: str, key: str) -> Iterator[tuple[Any, Columns]]:
        _check_separator(path, key, {**self._options(path, key), **self._given})
        tables = super()._tables(path, key)
        try:
            while True:
                # Without an index, pandas cuts the fields off for which there is no name, and only warns. The filter
                # is set again for each table: it must not outlast this call of the generator.
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", _PANDAS_CUTS)
                    table = next(tables, None)
                if table is None:
                    return
                yield table
        except Warning as warning:
            what = "has more fields in a row than names"
            why = "which of them is the text cannot be known"
            fix = (
                "put texts with commas into quotes, name every column in the first line, and leave no separator at "
                "the end of a row"
            )
            raise DataError(Problem(what, f"data.path: {path}", why, fix)) from warning


def _check_separator(path: str, key: str, options: Mapping[str, Any]) -> None:
    """Raises DataError for a table whose first line has only other separators, or has the key twice.

    options: of the reader.
    """
    separator = options.get("delimiter") or options["sep"]
    arrow = importlib.import_module("pyarrow")
    with arrow.input_stream(path, compression="detect") as stream:
        head = stream.read(_HEAD).decode("utf-8-sig", "replace")
    names = head.splitlines()[0] if head else ""
    # pandas calls the second of two columns `text.1`, and would read only the first.
    if len(separator) == 1 and options.keys().isdisjoint(_NAMING):
        with contextlib.suppress(csv.Error):
            _require_one(key, next(csv.reader([names], delimiter=separator), []), path)
    others = [each for each in _SEPARATORS if each in names]
    if separator in names or not others or names.strip().strip('"') == key:
        return
    other = others[0]
    what = f"has {other!r} between its columns, not {separator!r}"
    raise DataError(
        Problem(
            what,
            f"data.path: {path}",
            f"it begins with {names[:80]!r}",
            _FIX_SEPARATOR.format(other),
        )
    )


def _check_quotes(file: Path, options: Mapping[str, Any]) -> None:
    """Raises DataError for a table whose quotes do not enclose whole fields.

    pandas reads on to the next quote, many rows later, and all of these rows become one text. Databases write tabs
    without quoting, and programs that join fields by hand do not double the quotes within a text.
    options: of the reader.
    """
    # A description that says how its files are quoted knows better.
    separator = options.get("delimiter") or options["sep"]
    if len(separator) > 1 or not options.keys().isdisjoint(_QUOTING):
        return
    arrow = importlib.import_module("pyarrow")
    widths: set[int] = set()  # separators in a line

    def lines(text: io.TextIOWrapper) -> Iterator[str]:
        for line in text:
            if line.strip():
                widths.add(line.count(separator))
            yield line

    why = ""
    first_line = 1  # of the row that is read
    spans_lines = 0  # the first line of the first row of several lines
    limit = csv.field_size_limit(_LONGEST_FIELD)
    try:
        with (
            arrow.input_stream(str(file), compression="detect") as stream,
            io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="") as text,
        ):
            rows = csv.reader(lines(text), delimiter=separator, strict=True)
            # What begins with a quote must end with one, before a separator or the end of a line.
            try:
                for _ in rows:
                    if rows.line_num > first_line and not spans_lines:
                        spans_lines = first_line
                    first_line = rows.line_num + 1
            except csv.Error as error:
                until = f" to {rows.line_num}" if rows.line_num > first_line else ""
                why = f"line {first_line}{until}: {error}"
    except (OSError, ValueError):
        return  # the library reads it too, and says what is wrong
    finally:
        csv.field_size_limit(limit)

    # Every line is a row by itself, and yet quotes would join some.
    if not why and spans_lines and len(widths) == 1 and widths != {0}:
        joins = f"line {spans_lines}: its quote would join lines"
        why = f"{joins}, and yet every line has as many separators as the first"
    if why:
        what = "has quotes that quote nothing: rows between two of them would become one text"
        raise DataError(Problem(what, f"data.path: {file}", why, _FIX_QUOTES.format(separator)))


class Parquet(Rows):
    """A column of Parquet files."""

    kind = "Parquet"
    suffixes = (".parquet",)
    reader = "parquet.parquet.Parquet"

    def _options(self, path: str, key: str) -> dict[str, Any]:
        schema = _parquet(path).schema.to_arrow_schema()
        column = _column(key, Columns(schema.names, _fix_of(schema)), path)
        _require_one(column, schema.names, path)
        return {"features": _features(column), "columns": [column], "batch_size": _TABLE_ROWS}

    def _divide(self, file: Path, size: int) -> list[tuple[int, int, int]]:
        """Its row groups."""
        metadata = _parquet(str(file))
        parts: list[tuple[int, int, int]] = []
        row = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            parts.append((row, row + group.num_rows, group.total_byte_size))
            row += group.num_rows
        return parts


class Arrow(Rows):
    """What `save_to_disk` of the library writes (a folder with state.json, or one for each split), or one file."""

    kind = "Arrow"
    suffixes = (".arrow", ".feather")
    reader = "arrow.arrow.Arrow"

    def _files(self, path: Path) -> Files:
        if path.is_file():
            return [(path, "")], []
        library = importlib.import_module("datasets")
        try:
            saved = library.load_from_disk(str(path), keep_in_memory=False)
        except Exception as error:
            what = "is no whole data set"
            why = str(error)[:_LETTERS]
            fix = "write it again with save_to_disk; of a cache of the library name one file: data.path=FILE.arrow"
            raise DataError(Problem(what, f"data.path: {path}", why, fix)) from error

        # Only for the names of its files, which are then read one by one as any others are.
        splits = saved if isinstance(saved, dict) else {"train": saved}
        files: dict[str, list[Path]] = {}
        for name, each in splits.items():
            files[name] = [Path(file["filename"]) for file in each.cache_files]
        return choose_splits(files, None, f"data.path: {path}", f"data.path={path}/")


class WebDataset(Rows):
    """Tar files of samples. Files of one name but for the ending are a sample; the ending is the key."""

    kind = "webdataset"
    suffixes = (".tar",)
    reader = "webdataset.webdataset.WebDataset"
    _sample = ""  # the key of the one that is read

    def _divide(self, file: Path, size: int) -> list[tuple[int, int, int]]:
        _check_tar(file)
        return super()._divide(file, size)

    def _tables(self, path: str, key: str) -> Iterator[tuple[Any, Columns]]:
        arrow = importlib.import_module("pyarrow")
        manager = importlib.import_module("datasets").StreamingDownloadManager()
        first: dict[str, None] = {}  # endings in the first samples
        looked: list[dict[str, Any]] = []
        with _reader(self.reader, path, **self._given) as reader:
            # Sample by sample: the library's tables have the types of the first samples, and not every sample need
            # have every ending.
            samples = reader._get_pipeline_from_tar(path, manager.iter_archive(path))
            for sample in samples:
                looked.append(sample)
                first.update(dict.fromkeys(name for name in sample if not name.startswith("__")))
                if len(looked) == _LOOKED_AT:
                    break
            if looked:
                _column(key, Columns(list(first), _FIX_KEY), path)
            for sample in itertools.chain(looked, samples):
                self._sample = sample["__key__"]
                names = [name for name in sample if not name.startswith("__")]
                value: Any = sample
                for step in _steps(key, names):
                    value = value.get(step) if isinstance(value, dict) else None
                texts = arrow.table({key: arrow.array([value])})
                yield _texts(texts, key, path).column(0), Columns(names, _FIX_KEY)

    def _where(self, path: str, row: int) -> str:
        return f"{path}, row {row}, sample {self._sample}"


def _check_tar(file: Path) -> None:
    """Raises DataError unless the archive ends as tar ends one: with a block of zeros, and nothing but zeros after it.

    tarfile takes everything else that is no header for the end, as if the samples behind it had never been.
    """
    what = "cannot be read as webdataset"
    where = f"data.path: {file}"
    last = ""
    try:
        with tarfile.open(file, "r:*") as opened:
            archive: Any = opened
            for member in archive:
                last = member.name
                archive.members.clear()  # or all headers of a large archive would be kept
            # Where the member after the last one would begin.
            stream: Any = archive.fileobj
            stream.seek(archive.offset)
            end = stream.read(tarfile.BLOCKSIZE)
            found = bool(end)
            at_end = end == tarfile.NUL * tarfile.BLOCKSIZE
            rest_is_zero = True
            while at_end and rest_is_zero and (block := stream.read(io.DEFAULT_BUFFER_SIZE)):
                rest_is_zero = not block.strip(tarfile.NUL)
    except (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        why = f"{error}, after {last}" if last else str(error)
        raise DataError(Problem(what, where, why[:_LETTERS], _FIX_COPY)) from error

    if at_end and rest_is_zero:
        return
    if at_end:
        why = f"there is more behind the end of the archive, after {last}: samples there would be lost"
        fix = "archives that were joined with cat: name a folder with the single ones, or unpack all with tar -xif FILE"
    elif found:
        why = f"it is cut short or damaged after {last}: no header of a file follows, and no end"
        fix = _FIX_COPY
    else:
        why = f"the block of zeros that ends an archive is missing after {last}: it was cut short, or never closed"
        fix = f"{_FIX_COPY}; if nothing is missing: truncate -s +1024 FILE appends the end"
    raise DataError(Problem(what, where, why, fix))


def choose_splits(
    files: Mapping[str, list[Path]], wanted: str | None, where: str, way: str
) -> Files:
    """The files of the split to train on, and of the one to validate on if there is one; the others are left out.

    wanted: the split to train on; None: train, or the only one.
    way: how to name one, for an error.

    Raises DataError.
    """
    # The split to validate on is the first that is named like one, unless the user trains on it.
    validation = None
    for name in files:
        if is_validation(name) and name != wanted:
            validation = name
            break

    # Which one to train on. If all splits look like validation, one of them must do.
    others = [name for name in files if name != validation] or list(files)
    train = wanted
    if train is None:
        train = others[0] if len(others) == 1 else "train"
    if train not in files:
        what = f"has no split {train}, but {some(list(files), NAMED)}"
        raise DataError(Problem(what, where, fix=f"{way}{others[0]}, or another"))

    if validation in (None, train):
        chosen: dict[str, Split] = {train: ""}
    else:
        chosen = {train: "train", validation: "val"}
    found: list[tuple[Path, Split]] = []
    for name, split in chosen.items():
        found.extend((file, split) for file in files[name])
    reason = "a split that is neither train nor validation"
    left_out = [(name, reason) for name in files if name not in chosen]
    return found, left_out


@contextmanager
def _reader(reader: str, path: str, **options: Any) -> Iterator[Any]:
    """The library's reader of one file. It runs nothing that lies in a data set."""
    module, _, name = reader.rpartition(".")
    # What it logs, it also raises.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    lists = importlib.import_module("datasets.data_files")
    package = importlib.import_module(f"datasets.packaged_modules.{module}")
    opened = getattr(package, name)
    _zstd_by_arrow()
    # Not a plain path: the library would take brackets and stars in it for a pattern.
    files = lists.DataFilesDict({"train": lists.DataFilesList([path], [()])})
    scratch = tempfile.mkdtemp()  # the reader locks a folder of its cache, and writes nothing there
    try:
        yield opened(cache_dir=scratch, data_files=files, **options)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _batches(reader: Any) -> Iterator[Any]:
    """Its tables, of _TABLE_ROWS rows each."""
    rows = reader.as_streaming_dataset(split="train")
    return rows.with_format("arrow").iter(batch_size=_TABLE_ROWS)


def _zstd_by_arrow() -> None:
    """Let Arrow unpack zstd: it notices a file that was cut short; the module zstandard ends without an error."""
    arrow = importlib.import_module("pyarrow")
    compression = importlib.import_module("fsspec.compression")

    def opened(stream: Any, mode: str = "rb", **_: Any) -> io.BufferedReader:
        unpacked = arrow.CompressedInputStream(stream, "zstd")
        return io.BufferedReader(unpacked, 1 << 20)

    compression.register_compression("zstd", opened, "zst", force=True)


@functools.cache
def _drop_blank_lines() -> None:
    """Define an encoding: UTF-8 without its blank lines.

    The library skips blank lines by itself, but not if a key has values of several types: then it loads line by line,
    and a blank one is no JSON. It decodes a block of whole lines at once, so that no line is seen in two halves.
    """
    utf8 = codecs.lookup("utf-8")

    def decode(raw: Any, errors: str = "strict") -> tuple[str, int]:
        lines = [line for line in io.BytesIO(raw) if not line.isspace()]
        return b"".join(lines).decode("utf-8", errors), len(raw)

    def find(name: str) -> codecs.CodecInfo | None:
        if name != _WITHOUT_BLANK_LINES:
            return None
        return codecs.CodecInfo(
            utf8.encode, decode, incrementaldecoder=utf8.incrementaldecoder, name=name
        )

    codecs.register(find)


def _features(name: str) -> Any:
    library = importlib.import_module("datasets")
    return library.Features({name: library.Value("large_string")})


def _parquet(path: str) -> Any:
    return importlib.import_module("pyarrow.parquet").read_metadata(path)


def _steps(key: str, names: Sequence[str]) -> list[str]:
    """`key` if that is one of the columns `names`; else its parts: a column, and the fields within it."""
    return [key] if key in names else key.split(".")


def _column(key: str, columns: Columns, path: str) -> str:
    """The column that `key` is, or lies in. Raises DataError if there is none."""
    column = _steps(key, columns.names)[0]
    if column not in columns.names:
        why = f"it has {some(columns.names, _COLUMNS_NAMED)}"
        raise DataError(Problem(f'has no "{key}"', f"data.path: {path}", why, columns.fix))
    return column


def _require_one(column: str, names: Sequence[str], path: str) -> None:
    """Raises DataError if several columns have the name."""
    if (count := names.count(column)) > 1:
        what = f'has {count} columns called "{column}"'
        why = "which of them is the text cannot be known"
        raise DataError(Problem(what, f"data.path: {path}", why, "write it again with other names"))


def _columns(table: Any, key: str) -> Columns:
    names = table.column_names
    wordless: list[str] = []
    if _steps(key, names)[0] not in names:
        # Dates are text in a csv.
        compute = importlib.import_module("pyarrow.compute")
        for name, column in zip(names, table.columns, strict=True):
            if not _is_text(column.type):
                continue
            has_letter = compute.match_substring_regex(column, r"\pL")
            if not compute.any(has_letter).as_py():
                wordless.append(name)
    return Columns(names, _fix_of(table.schema, wordless))


def _fix_of(schema: Any, wordless: Sequence[str] = ()) -> str:
    """How rows of these columns can be trained on. wordless: columns without a letter in any of some rows."""
    types = importlib.import_module("pyarrow").types
    chats: dict[str, list[str]] = {}  # the names of a message's parts
    lists: list[str] = []  # jq's way to what is within
    texts: list[str] = []
    for field in schema:
        kind = field.type
        values = kind.value_type if types.is_list(kind) or types.is_large_list(kind) else None
        if values is not None and types.is_struct(values):
            parts = [values.field(number).name for number in range(values.num_fields)]
            if "role" in parts or "from" in parts:
                chats[field.name] = parts
            else:
                lists.append(f".{field.name}[]")
        elif values is not None and _is_text(values):
            lists.append(f"{{{field.name}: .{field.name}[]}}")
        # Within a column of fields there may be texts, too.
        elif _is_text(kind) or types.is_struct(kind):
            texts.append(field.name)

    if chats:
        name = next(iter(chats))
        messages = f"row['{name}']"
        if {"prompt", "completion"} <= chats.keys():
            messages = "row['prompt'] + row['completion']"
        if "role" in chats[name]:
            return _FIX_CHAT.format("", messages, "FILE")
        return _FIX_CHAT.format(_NAME_ROLES.format(name), messages, "ROLES")
    asked = [name for name in texts if name.lower() in _ASKED]
    answered = [name for name in texts if name.lower() in _ANSWERED]
    if asked and answered:
        joined = ' + "\\n" + '.join(f".{name}" for name in texts if name in (*asked, *answered))
        return _FIX_PAIR.format(joined)
    # The fields themselves: a name may stand there twice.
    worded = [field for field in schema if field.name in texts and field.name not in wordless]
    # A text is no plain name: it may be the first line of a file without a line of names.
    names = [field.name for field in worded]
    if len(worded) == 1 and _is_text(worded[0].type) and _PLAIN_NAME.fullmatch(names[0]):
        return f"set data.text_key={names[0]}"
    if worded:
        keys: list[str] = []
        for field in worded:
            keys += _keys_of_texts(field)
        # The row's columns are named before; the fields within them are not.
        named = f": {some(keys, _COLUMNS_NAMED)}" if keys and keys != names else ""
        return f"{_FIX_KEY}{named}"
    return _FIX_LIST.format(lists[0]) if lists else _FIX_NUMBERS


def _keys_of_texts(column: Any) -> list[str]:
    """A column of text; of a column of fields those with a text, such as meta.title."""
    if not importlib.import_module("pyarrow").types.is_struct(column.type):
        return [column.name]
    keys: list[str] = []
    for number in range(column.type.num_fields):
        field = column.type.field(number)
        if _is_text(field.type):
            keys.append(f"{column.name}.{field.name}")
    return keys


def _texts(
    table: Any,
    key: str,
    path: str,
    encoded: Sequence[Sequence[str]] = (),
) -> Any:
    """A table of only the texts, as large_string.

    key: a column, or `meta.text`: the field `text` of the column `meta`.
    encoded: the fields that the library wrote as JSON, because their values have several types.

    Raises DataError if what is there is no text.
    """
    arrow = importlib.import_module("pyarrow")
    steps = _steps(key, table.column_names)
    if any(steps[: len(field)] == [*field] for field in encoded):
        what = f'"{key}" is text in some rows, and not in others'
        fix = f"write it again with text in every row: jq -c 'select(.{key} | type == \"string\")' FILE > NEW"
        raise DataError(Problem(what, f"data.path: {path}", fix=fix))

    # Rows without the column or the field have null.
    types = arrow.types
    missing = arrow.nulls(len(table))
    column = table.column(steps[0]) if steps[0] in table.column_names else missing
    for step in steps[1:]:
        if types.is_struct(column.type) and column.type.get_field_index(step) >= 0:
            column = importlib.import_module("pyarrow.compute").struct_field(column, step)
        else:
            column = missing

    # Lists of whole numbers are token ids, which have a better way than this one.
    kind = column.type
    if not _is_text(kind) and not types.is_null(kind):
        is_ids = types.is_list(kind) and types.is_integer(kind.value_type)
        what = f'"{key}" has {column.type}, not text'
        fix = _FIX_IDS if is_ids else _fix_of(table.schema)
        if types.is_binary(kind) or types.is_large_binary(kind):
            fix = _FIX_BYTES.format(key)
        raise DataError(Problem(what, f"data.path: {path}", fix=fix))
    return arrow.table({key: column.cast(arrow.large_string())})


def _is_text(kind: Any) -> bool:
    """Whether values of an Arrow type are text. Of a dictionary, its values are."""
    types = importlib.import_module("pyarrow").types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _piece(text: str | None, key: str, where: str, columns: Columns) -> Piece:
    # null, or a row without the key. Another column is the text only if no row has the key.
    if text is None and key in columns.names:
        return Piece("", where, fault=f'"{key}" is missing', fix="repair it, or set data.bad=skip")
    if text is None:
        names = some(columns.names, _COLUMNS_NAMED) or "no keys"
        hint = f"the row has {names}"[:_LETTERS]
        fix = f"{columns.fix}. {_SKIP_ROWS}"
        return Piece("", where, fault=f'"{key}" is missing', hint=hint, fix=fix)
    return Piece(text, where, fault="" if text else "empty", fix=_SKIP_ROWS)


ROWS: dict[Documents, type[Rows]] = {
    "JSONL": JsonLines,
    "csv": Csv,
    "Parquet": Parquet,
    "Arrow": Arrow,
    "webdataset": WebDataset,
}
"""Every format of rows."""
FORMATS: dict[Documents, type[Rows] | type[PlainText]] = {**ROWS, "text": PlainText}
"""Every format of documents: what is made into token ids before it is trained on."""


def open_source(kind: Documents, options: Mapping[str, Any] | None = None) -> DocumentSource:
    """The source of a format. options: as for `Rows`."""
    return ROWS[kind](options) if kind in ROWS else PlainText()
