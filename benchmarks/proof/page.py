"""The files of a proof: one JSON and one Markdown table, without anything that says whose machine it was."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.proof.children import ROOT
from harness.profiling.kinds import KINDS

SCHEMA = 1
REHEARSAL = "REHEARSAL ON A CPU: it shows that the rows run, and says nothing of any card"
# Names that many machines and accounts have, and that our own texts contain: they reveal nothing and stay.
_COMMON = {
    "root", "user", "ubuntu", "debian", "admin", "localhost", "host", "linux", "gpu", "cuda", "torch", "python", "main",
    "test", "tests", "card", "machine", "work", "train", "trainer", "native", "harness", "benchmarks", "proof",
}  # fmt: skip
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIAL", re.IGNORECASE)
_PATTERNS = (
    (re.compile(r"(?<![\w.])/(?:home|Users)/[^/\s\"':,;)]+"), "~"),
    (re.compile(r"(?<![\w.])/root(?![\w.-])"), "~"),
    (re.compile(r"\b(?:GPU|MIG)-[0-9a-fA-F-]{8,}(?:/\d+)*"), "<id>"),
    (re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]+"), "<address>"),
    (re.compile(r"\b(?:[0-9a-f]{12})\b(?=[:.]\d+\b)"), "<host>"),
    (re.compile(r"(?<![\w.])(?:10|127|172|192)\.\d{1,3}\.\d{1,3}\.\d{1,3}(?![\w.])"), "<address>"),
)


class Scrubber:
    """Removes host names, user names, private folders and secrets of this machine from texts."""

    def __init__(
        self,
        environ: Mapping[str, str] = os.environ,
        hosts: Sequence[str] = (),
        users: Sequence[str] = (),
    ):
        paths = {
            str(ROOT): "<repo>",
            sys.prefix: "<python>",
            sys.base_prefix: "<python>",
            str(Path.cwd()): "<here>",
            tempfile.gettempdir(): "<tmp>",
        }
        for name in (
            "HOME",
            "TMPDIR",
            "VIRTUAL_ENV",
            "CONDA_PREFIX",
            "PWD",
            "OLDPWD",
            "XDG_CACHE_HOME",
        ):
            if environ.get(name):
                paths[environ[name]] = "~" if name == "HOME" else f"<{name.lower()}>"
        with suppress(RuntimeError, KeyError):
            paths[str(Path.home())] = "~"
        paths |= {str(Path(path).resolve()): name for path, name in paths.items()}
        # Longest first, because the checkout is usually inside the home folder.
        self._paths = sorted(
            ((path.rstrip("/"), name) for path, name in paths.items() if len(path.rstrip("/")) > 4),
            key=lambda pair: -len(pair[0]),
        )
        found = [*hosts, socket.gethostname(), platform.node(), environ.get("HOSTNAME", "")]
        parts = [(host, *host.partition(".")[::2]) for host in found]
        names = {
            name: "<host>"
            for host, short, domain in parts
            for name in (host, short, domain * ("." in domain))
        }
        people = [
            *users,
            environ.get("USER", ""),
            environ.get("LOGNAME", ""),
            environ.get("SUDO_USER", ""),
        ]
        with suppress(OSError, KeyError, ImportError):
            people.append(getpass.getuser())
        names |= dict.fromkeys(people, "<user>")
        self._names = [
            (re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"), instead)
            for name, instead in sorted(names.items(), key=lambda pair: -len(pair[0]))
            if len(name) > 1 and name.lower() not in _COMMON
        ]
        self._secrets = [
            value for name, value in environ.items() if _SECRET.search(name) and len(value) >= 8
        ]

    def text(self, text: str) -> str:
        """The text without what is private."""
        for secret in self._secrets:
            text = text.replace(secret, "<secret>")
        for path, instead in self._paths:
            text = re.sub(re.escape(path) + r"(?![\w-])", instead, text)
        for pattern, instead in (*_PATTERNS, *self._names):
            text = pattern.sub(instead, text)
        return text

    def all(self, value: Any) -> Any:
        """JSON-able data in which every text is scrubbed."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.all(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.all(each) for each in value]
        return value


def roofline(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Rates for `harness estimate --calibration`, in FLOP/s, B/s, s and bytes; null where not measured.

    figures: those of the rows that passed, by row. If `flaw` finds a fault in them, all rates are null.
    """
    card = figures.get("machine", {}).get("card") or {}

    def measured(row: str, *keys: str) -> float | None:
        value: Any = None if flaw(card) else figures.get(row)
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    return {
        "card": card.get("name"),
        "capability": card.get("capability"),
        "gemm_bf16": measured("gemm", "flops", "bf16", "median"),
        "gemm_fp8": measured("gemm", "flops", "fp8", "median"),
        "attention": measured("attention", "flops", "both", "median"),
        "bandwidth": measured("bandwidth", "rate", "copy", "median"),
        "launch_seconds": measured("launch", "seconds", "median"),
        "context_bytes": measured("launch", "context_bytes"),
    }


def flaw(card: Mapping[str, Any]) -> str:
    """Why these are not the figures of a whole, idle card; empty if they are."""
    if not card:
        return "no card"
    return "; ".join(
        filter(None, ("it is a slice of a card (MIG)" if card["mig"] else "", card["busy"]))
    )


def passed(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Figures of the rows that passed, by name."""
    return {row["name"]: row["figures"] for row in rows if row["status"] == "passed"}


def slug(text: str) -> str:
    """The text as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def stem(machine: Mapping[str, Any], rehearsal: bool, complete: bool) -> str:
    """Name of the files, without ending. A rehearsal never has the name of a proof."""
    if rehearsal:
        return "rehearsal_cpu"
    return f"proof_{slug(machine['card']['name'])}" + ("" if complete else "_partial")


class Piece(NamedTuple):
    """One start of a proof: its day, its command and the minutes it took."""

    date: str
    command: str
    minutes: float


def pieces(proof: Mapping[str, Any]) -> list[Piece]:
    """The starts that a record adds up; none for an empty one."""
    if not proof:
        return []
    earlier = [Piece(**each) for each in proof.get("earlier", ())]
    return [*earlier, Piece(proof["date"], proof["command"], proof["minutes"])]


def earlier_record(path: Path, rehearsal: bool) -> dict[str, Any]:
    """The record at `path`, for `--resume`. Raises ValueError if it is none, or of the other kind; OSError."""
    proof = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(proof, dict) or proof.get("schema") != SCHEMA:
        raise ValueError("it is no record of this version of the proof")
    if proof["rehearsal"] is not rehearsal:
        kinds = ("a proof", "a rehearsal")
        raise ValueError(f"it is {kinds[proof['rehearsal']]}, and this is {kinds[rehearsal]}")
    return proof


def differences(earlier: Mapping[str, Any], machine: Mapping[str, Any]) -> list[str]:
    """In what a record and the figures of the row `machine` differ: rows of one say nothing on the other.

    earlier: a record; empty: nothing differs.
    """
    if not earlier:
        return []
    before, now = earlier["card"] or {}, machine.get("card") or {}
    clean = Scrubber()
    found = {
        "card": [(each.get("name"), each.get("capability")) for each in (before, now)],
        "versions": [earlier["versions"], clean.all(machine.get("versions"))],
        "code": [(each or {}).get("sha256") for each in (earlier["source"], machine.get("source"))],
    }
    return [what for what, (a, b) in found.items() if a != b]


def record(
    rows: Sequence[Mapping[str, Any]],
    *,
    rehearsal: bool,
    complete: bool,
    pieces: Sequence[Piece],
) -> dict[str, Any]:
    """The whole proof as one JSON-able value. pieces: the starts that it adds up, this one last."""
    last = pieces[-1]
    machine = next(row["figures"] for row in rows if row["name"] == "machine")
    return {
        "schema": SCHEMA,
        "rehearsal": rehearsal,
        **({"warning": REHEARSAL} if rehearsal else {}),
        "complete": complete,
        "date": last.date,
        "command": last.command,
        "minutes": round(last.minutes, 2),
        "earlier": [each._asdict() for each in pieces[:-1]],
        "card": machine.get("card"),
        "versions": machine.get("versions"),
        "source": machine.get("source"),
        "roofline": roofline(passed(rows)),
        "flaw": flaw(machine.get("card") or {}),
        "rows": list(rows),
    }


def markdown(proof: Mapping[str, Any]) -> str:
    """The table for people: the machine, what each row found, and how to run it again."""
    card, source, versions = proof["card"], proof["source"], proof["versions"]
    title = f"Rehearsal: {REHEARSAL}" if proof["rehearsal"] else f"Proof on {card['name']}"
    lines = [f"# {title}", ""]
    if card:
        smi = ", ".join(f"{name} {value}" for name, value in card["smi"].items())
        lines.append(
            f"- card: {card['name']}, compute capability {card['capability'][0]}.{card['capability'][1]}, "
            f"{card['memory'] / 2**30:.1f} GiB, {card['multiprocessors']} SMs; {smi or 'nvidia-smi does not answer'}"
        )
        if proof["flaw"]:
            lines.append(
                f"- NOTE: {proof['flaw']}; these are not the figures of a whole, idle card, and calibrate none"
            )
    changed = source["changed"]
    state = (
        "not known"
        if changed is None
        else f"changed: {', '.join(changed)}"
        if changed
        else "as committed"
    )
    lines += [
        f"- code: commit {source['commit'] or 'not known'}, {state}; sha256 of harness/ {source['sha256'][:16]}"
        + (f" ({source['why']})" if source["why"] else ""),
        "- versions: " + ", ".join(f"{name} {value or 'none'}" for name, value in versions.items()),
        f"- {proof['date']}, {proof['minutes']:.1f} minutes: `{proof['command']}`"
        + ("" if proof["complete"] else "; not all rows were asked for, or it was interrupted"),
        *(f"- before it, {each.date}: `{each.command}`" for each in reversed(pieces(proof)[:-1])),
        "",
        "| row | question | outcome | | seconds |",
        "|---|---|---|---|---|",
    ]
    for row in proof["rows"]:
        said = "; ".join(filter(None, (row["reason"], row["summary"])))
        status = f"**{row['status']}**" if row["status"] == "failed" else row["status"]
        lines.append(
            f"| {row['name']} | {cell(row['question'])} | {status} | {cell(said)} | {row['seconds']:.0f} |"
        )
    for row in proof["rows"]:
        if row["name"] == "profiles":
            lines += profile_table(row["figures"])
    again = "python -m benchmarks.proof" + (" --rehearse" if proof["rehearsal"] else "")
    lines += ["", f"One row again: `{again} --only NAME`.", ""]
    if proof["rehearsal"]:
        lines += [REHEARSAL + ".", ""]
    return "\n".join(lines)


def profile_table(figures: Mapping[str, Any]) -> list[str]:
    """The lines of the profiles' table: milliseconds a step by kind of work, a column for each contender."""
    contenders = figures.get("contenders")
    if not contenders:
        return []
    lines = ["", f"Milliseconds of a profiled step by kind of work, {figures['size']}:", ""]
    lines.append(f"| | {' | '.join(contenders)} |")
    lines.append("|---" * (len(contenders) + 1) + "|")

    rows: dict[str, list[float | None]] = {}
    found = list(contenders.values())
    for kind in KINDS:
        if any(kind in each["kinds"] for each in found):
            rows[kind] = [each["kinds"].get(kind, {}).get("ms") for each in found]
    rows["whole step"] = [each["profiled_ms"] for each in found]
    rows["without the profiler"] = [each["step_ms"] for each in found]
    for name, values in rows.items():
        cells = ["" if value is None else f"{value:.2f}" for value in values]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    kernels = [f"{each['kernels']:.0f}" for each in found]
    return [*lines, f"| kernels and copies | {' | '.join(kernels)} |"]


def cell(text: str) -> str:
    """Text that stays inside its cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
