"""`harness report`: report.html, one file that holds everything about a run, and the pictures in `plots/`.

The page needs nothing besides itself. It holds the run's figures as data (`page_content`), our script and style
(`page.js`, `page.css`) and the charting library of `vendor/`. Its content policy lets a browser run these two scripts
alone, each known by its SHA-256, and fetch nothing. Names and texts of a run are data: the script shows them as text,
and they never become markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from harness.core.errors import ConfigError, ExitCode, Problem, shown
from harness.core.files import atomic_file, home
from harness.core.screen import say
from harness.report import RunFolder
from harness.report.page_content import ROOM, compared, explanations, kinds, of_run
from harness.report.plots import draw
from harness.tracking.history import RunHistory
from harness.tracking.slot_file import PARQUET, write_parquet

REPORT = "report.html"
# Pictures that no chart of the page replaces.
_SHOWN = {
    "fp8_fan.png": "amax, saturation and SQNR over the layers, by step: minimum, 10%, median, 90%, maximum",
    "fp8_exponents.png": "binary exponents of amax, before and after scaling, beside the ranges of the formats",
    "grad_norms.png": "gradient norms by step of the layers that grew most; dotted: discarded by a rollback",
}
_HERE = Path(__file__).parent
_UPLOT = _HERE / "vendor" / "uplot"
_ENDINGS = (".html", ".htm")
_PLACE = re.compile("@([A-Z]+)@")
# What may end a script element, or begin markup in it.
_ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def command(
    run: RunFolder,
    other: Annotated[
        Path | None,
        typer.Option("--with", metavar="RUN", help="second run on the same page, a run folder"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="write the page alone, to this .html file [default: RUN/report.html with plots and table; "
            "with --with report-RUN-OTHER.html in the working folder]",
        ),
    ] = None,
) -> int:
    """Write the page, also of a run that still trains; returns the exit code.

    Raises ConfigError for a folder that is no run, and for a file that cannot be written.
    """
    if other is not None or out is not None:
        say(write_page(run, other, out))
        return int(ExitCode.DONE)

    # The page with its plots. The table needs pyarrow, and the rest is written without it.
    try:
        made = write(run)
        try:
            table = write_parquet(run)
            if table is not None:
                made.append(table)
        except ImportError as error:
            print(f"no {PARQUET}: {error}; pip install pyarrow", file=sys.stderr)
    except OSError as error:
        what = f"the report cannot be written here: {error.strerror or error}"
        fix = "write the page alone, to another place: --out FILE.html"
        raise ConfigError(Problem(what, str(run), fix=fix)) from error
    for path in made:
        say(path)
    return int(ExitCode.DONE)


def write(run_dir: Path) -> list[Path]:
    """Draw `plots/*.png` and write `report.html` into a run's folder; returns their paths.

    A picture without data is left out. Raises ConfigError if `run_dir` is no run folder, OSError if the disk refuses.
    """
    history = RunHistory.read(run_dir)
    made = draw(history, run_dir / "plots")
    report = run_dir / REPORT
    _write(report, page([history], made))
    return [*made, report]


def write_page(run_dir: Path, other: Path | None, out: Path | None) -> Path:
    """Write the page alone, of one run or two, and nothing into their folders unless `out` is there.

    out: None: report-<run>-<other>.html in the working folder.

    Raises ConfigError for a folder that is no run, the same run twice, and a file that cannot be written.
    """
    histories = [RunHistory.read(run_dir)]
    if other is not None:
        histories.append(RunHistory.read(other))
        if other.resolve() == run_dir.resolve():
            what, fix = "is given twice: a run equals itself", "name another run after --with"
            raise ConfigError(Problem(what, str(other), fix=fix))
    if out is None:
        names = "-".join(each.run_dir.resolve().name for each in histories)
        out = Path(f"report-{names}.html")
    path = home(str(out))
    if path.suffix not in _ENDINGS:
        what, why = "is no name of a page", "a page replaces the file of that name"
        raise ConfigError(Problem(what, str(out), why, "end it in .html"))
    try:
        # Drawn anew: not those in the run's folder: they may be older than the journal, or of somebody else.
        with TemporaryDirectory() as folder:
            _write(path, page(histories, draw(histories[0], Path(folder))))
    except OSError as error:
        what = f"the page cannot be written: {error.strerror}"
        fix = "name a file in a folder that is there and can be written: --out FILE"
        raise ConfigError(Problem(what, str(out), fix=fix)) from error
    return path


def _write(path: Path, text: str) -> None:
    with atomic_file(path) as stream:
        stream.write(text.encode())


def page(histories: Sequence[RunHistory], drawn: Sequence[Path] = ()) -> str:
    """The page of one run or two as HTML.

    drawn: pictures of the first run; the page holds those that it has no chart for.
    """
    runs = [of_run(history, ROOM // len(histories)) for history in histories]
    content = {
        "runs": runs,
        "explanations": explanations(runs),
        "kinds": kinds(),
        "pictures": [_picture(path) for path in drawn if path.name in _SHOWN],
        "compared": compared(*histories) if len(histories) == 2 else None,
    }
    names = " and ".join(run["name"] for run in runs)
    return _html(f"{'Run' if len(runs) == 1 else 'Runs'} {names}", content)


def _picture(path: Path) -> dict[str, str]:
    """about, and source: an address that holds the picture."""
    encoded = base64.b64encode(path.read_bytes()).decode()
    return {"about": _SHOWN[path.name], "source": f"data:image/png;base64,{encoded}"}


def _html(title: str, content: Any) -> str:
    """The page around `content`."""
    style = (_UPLOT / "uPlot.min.css").read_text("utf-8") + (_HERE / "page.css").read_text("utf-8")
    library = (_UPLOT / "uPlot.iife.min.js").read_text("utf-8")
    script = (_HERE / "page.js").read_text("utf-8")
    # The licence asks to stand wherever the library does.
    licence = (_UPLOT / "LICENSE").read_text("utf-8")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_source(library)} {_source(script)}",
            f"style-src {_source(style)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    parts = {
        "POLICY": policy,
        "TITLE": escape(shown(title)),
        "LICENCE": licence,
        "STYLE": style,
        "LIBRARY": library,
        "SCRIPT": script,
        "CONTENT": escaped_json(content),
    }
    body = (_HERE / "page.html").read_text("utf-8")
    # In one pass: a run's texts may have any of these names in them.
    return _PLACE.sub(lambda found: parts[found[1]], body)


def _source(text: str) -> str:
    """The source expression of an inline script or style in a content policy."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def escaped_json(content: Any) -> str:
    """`content` as JSON in ASCII that stays data within a script element, whatever texts it has."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for character, code in _ESCAPED.items():
        text = text.replace(character, code)
    return text
