"""Every kind of data there is: what `data.path` leads to is looked at, and read as what it is.

For what is pointed at and not read, how to get it in is told: by one command or a few lines of Python.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, cast

from harness.core.config import Documents
from harness.core.errors import DataError, Problem, some
from harness.core.files import MAX_LARGE, read_mapping
from harness.data.documents import PlainText
from harness.data.rows import JSON, Arrow, Csv, JsonLines, Parquet, Rows, WebDataset
from harness.data.text import walk

Kind = Literal["tokens", "prepared", Documents]

PREPARED = "dataset.json"
"""What `harness data prepare` leaves in its folder, and nothing else does."""
TOKENS = (".bin",)
ROWS: dict[Documents, type[Rows]] = {
    "JSONL": JsonLines,
    "csv": Csv,
    "Parquet": Parquet,
    "Arrow": Arrow,
    "webdataset": WebDataset,
}
"""What the datasets library reads. To add a format is a class in `rows`, its name here and in `core.config`."""
DOCUMENTS: dict[Documents, type[Rows] | type[PlainText]] = {**ROWS, "text": PlainText}
"""What is made into token ids before it is trained on."""

# What lies beside data without being any.
_COMPANIONS = (".idx", ".md", ".json", ".yaml", ".yml", ".pkl", ".py", ".rst", ".sha256", ".txt.license")
_COMPANION_NAMES = ("LICENSE", "README", "COPYING")
_FEW = 10
_NAMED = 5
_LOOKED_AT = 10_000
# Of the bytes of a folder of text, what rows may be of them: a source tree has some for its tests.
_ROWS = 0.05
_PROSE = (".py", ".md", ".rst")


def look(path: Path) -> Kind:
    """What is at `path`. A folder is one kind if all its files are, but for what usually lies beside data; else text.

    Raises DataError for what is not read, with what to do instead, and if a folder has files of several kinds, since
    each may be meant.
    """
    if not path.is_dir():
        suffix = suffix_of(path.name)
        if suffix in TOKENS or (suffix == ".idx" and path.with_suffix(".bin").is_file()):
            return "tokens"
        kind = _kind_of(suffix) if suffix != JSON else "JSONL"
        if kind == "text" and (told := advice(path, [path])):
            raise DataError(told)
        return kind
    if "vocabulary" in read_mapping(path / PREPARED, MAX_LARGE):
        return "prepared"
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return "Arrow"
    files, beside = _data_files(path)
    suffixes = {suffix_of(file.name) for file in files}
    if suffixes == set(TOKENS) and all(file.parent == path for file in files):
        return "tokens"
    if not files and beside and all(file.suffix.lower() == JSON for file in beside):
        return "JSONL"
    kinds: set[Kind] = {_kind_of(suffix) for suffix in suffixes}
    if len(kinds) == 1 and "text" not in kinds:
        return kinds.pop()
    if told := advice(path, files):
        raise DataError(told)
    _one_kind(path, files)
    return "text"


def _kind_of(suffix: str) -> Kind:
    return cast("Kind", next((kind for kind, source in DOCUMENTS.items() if suffix in source.suffixes), "text"))


def _data_files(path: Path) -> tuple[list[Path], list[Path]]:
    """Files of a folder: those that may be data, and what usually lies beside such; where there is more of that than
    of the others, it is the data."""
    files: list[Path] = []
    beside: list[Path] = []
    for file in walk(path):
        name = file.name
        is_beside = name.lower().endswith(_COMPANIONS) or name.upper().startswith(_COMPANION_NAMES)
        if not is_beside:
            files.append(file)
        elif not name.upper().startswith(_COMPANION_NAMES):
            beside.append(file)
        if len(files) + len(beside) >= _LOOKED_AT:
            break
    prose = [file for file in beside if file.suffix.lower() in _PROSE]
    return (files + prose, []) if len(prose) > max(_FEW, len(files)) else (files, beside)


def _one_kind(path: Path, files: Sequence[Path]) -> None:
    """Raises DataError if a folder of text has token ids or rows in it that count."""
    train = path / "train.bin"
    rows: dict[str, list[Path]] = {}
    for file in files:
        suffix = suffix_of(file.name)
        kind = _kind_of(suffix)
        if kind != "text":
            rows.setdefault(kind, []).append(file)
    named = {kind: [file.relative_to(path).as_posix() for file in found] for kind, found in rows.items()}
    texts = [file.name for file in files if file.suffix.lower() not in TOKENS]
    if train.is_file():
        why = f"train.bin beside {some(texts, _NAMED)}: either may be meant"
        fix = f"data.path={train}, or the text's own path"
        raise DataError(Problem("has both token ids and text", f"data.path: {path}", why, fix))
    sizes = [
        sum(_size(file) for file in group) for group in ([each for found in rows.values() for each in found], files)
    ]
    if rows and sizes[0] >= _ROWS * sizes[1]:
        why = "; ".join(f"{kind}: {some(names, _NAMED)}" for kind, names in named.items())
        reads = [f"data.format={kind}" for kind in rows]
        fix = f"{' or '.join([*reads, 'data.format=text'])} (all of it, as it stands), or a folder for each kind"
        raise DataError(Problem("has files of several kinds", f"data.path: {path}", why, fix))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # who reads it says so
        return 0


TARGET = "data.target=my_data:load"
_PACKED = "compressed"
_WEIGHTS = ("weights of a model, not data", "model.target=hf:FOLDER trains the model that lies there")
_PICTURES = (
    "pictures",
    f"{TARGET}, with a class in my_data.py whose sample number i is (picture, label): docs/guide/datasets.md has one "
    "for folders of pictures",
)
_OTHER = f"{TARGET}, with a class in my_data.py that reads it: docs/guide/datasets.md"
_KNOWN: dict[tuple[str, ...], tuple[str, str]] = {
    (".npy",): (
        "a NumPy array",
        "token ids: python -c \"import numpy; numpy.load('{path}').ravel().astype('<u4').tofile('{stem}.bin')\"; "
        "then data.path={stem}.bin data.dtype=uint32. Anything else: "
        f"{TARGET}, with load() returning torch.utils.data.TensorDataset(torch.from_numpy(numpy.load('{{path}}')))",
    ),
    (".npz",): (
        "NumPy arrays",
        f"{TARGET}, with, in my_data.py: def load(): a = numpy.load('{{path}}'); return "
        "torch.utils.data.TensorDataset(torch.from_numpy(a['x']), torch.from_numpy(a['y']))",
    ),
    (".pt", ".pth"): (
        "what torch.save wrote",
        f"{TARGET}, with, in my_data.py: def load(): return torch.utils.data.TensorDataset(*torch.load('{{path}}', "
        "weights_only=True)), if it holds tensors of inputs and labels; weights of a model go by model.target",
    ),
    (".h5", ".hdf5"): (
        "HDF5",
        f"{TARGET}, with, in my_data.py: def load(): f = h5py.File('{{path}}'); return "
        "list(zip(f['x'][:], f['y'][:])), where it fits into memory; else a class that reads sample i",
    ),
    (".pkl", ".pickle"): ("a pickle, which runs code as it is opened", _OTHER),
    (".zst",): (_PACKED, "zstd -d '{path}'; then data.path={stem}"),
    (".gz",): (_PACKED, "gunzip -k '{path}'; then data.path={stem}"),
    (".bz2",): (_PACKED, "bunzip2 -k '{path}'; then data.path={stem}"),
    (".xz",): (_PACKED, "unxz -k '{path}'; then data.path={stem}"),
    (".zip",): ("an archive", "unzip '{path}' -d '{stem}'; then data.path={stem}"),
    (".tgz", ".tar.gz", ".tar.zst", ".tar.xz", ".tar.bz2"): (
        "an archive",
        "mkdir '{stem}' && tar -xf '{path}' -C '{stem}'; then data.path={stem}; samples of webdataset: as a .tar",
    ),
    (".tfrecord", ".tfrecords", ".mds", ".beton", ".lmdb", ".mdb"): ("records of another library", _OTHER),
    (".safetensors", ".gguf", ".ckpt", ".onnx"): _WEIGHTS,
    (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"): _PICTURES,
    (".pdf",): ("PDF", "pdftotext '{path}'; then data.path on the text"),
}
_ADVICE = {suffix: told for suffixes, told in _KNOWN.items() for suffix in suffixes}
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MOST = 3


def suffix_of(name: str) -> str:
    """The ending that says what a file is, lower case: `.jsonl.gz` of a compressed one."""
    suffixes = [each.lower() for each in Path(name).suffixes[-2:]]
    packed = len(suffixes) == 2 and suffixes[1] in (".gz", ".zst", ".xz", ".bz2")
    joined = "".join(suffixes)
    if packed and (joined in _ADVICE or _kind_of(joined) != "text"):
        return joined
    return suffixes[-1] if suffixes else ""


def advice(path: Path, files: Sequence[Path]) -> Problem | None:
    """What to do with `files` at `path`, none of which is read, if that is known."""
    known = {file: told for file in files if (told := _known(file))}
    if not files or len(known) < len(files):
        return None
    (what, _), _ = Counter(known.values()).most_common(1)[0]
    first, fix = next((file, fix) for file, (kind, fix) in known.items() if kind == what)
    stem = str(first)[: -len(suffix_of(first.name))] if suffix_of(first.name) in _ADVICE else str(first.with_suffix(""))
    told = fix.format(path=first, stem=stem)
    more = f" ({len(files)} such as {first.relative_to(path)})" if path.is_dir() else ""
    return Problem(f"is not read: {what}{more}", f"data.path: {path}", fix=told)


def _known(file: Path) -> tuple[str, str] | None:
    suffix = suffix_of(file.name)
    return _ADVICE.get(suffix) or _ADVICE.get(file.suffix.lower())


def no_such(given: str, path: Path) -> Problem:
    """What to do about a path that leads nowhere: an address, or a name of the hub."""
    where = f"data.path: {given}"
    scheme = given.partition("://")[0] if "://" in given else ""
    if scheme in ("http", "https", "ftp"):
        file = given.rstrip("/").rpartition("/")[2].partition("?")[0] or "FILE"
        return Problem(
            "is an address, and nothing is fetched", where, fix=f"curl -L -o {file} '{given}'; then data.path={file}"
        )
    if scheme:
        return Problem("is an address, and nothing is fetched", where, fix="copy it to a disk of this machine first")
    if _HUB.fullmatch(given) and not path.parent.is_dir():
        fix = f"if it is the name of a data set on the Hugging Face hub: data.path=hf:{given}. Else check the path"
        return Problem("no such file or folder", where, fix=fix)
    names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, names, _MOST)
    return Problem(
        "no such file or folder", where, fix=f"did you mean {' or '.join(near)}?" if near else "check the path"
    )
