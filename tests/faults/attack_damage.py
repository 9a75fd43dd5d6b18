"""What the attack does to a run folder between two starts, and how that is undone where the run refused to go on."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hostile import JSON

from harness.core.files import dump_json
from harness.tracking.journal import decode

KEPT = (
    "good.json",
    "incidents.json",
    "config.yaml",
    "plan.json",
    "outcome.json",
    "journal.jsonl",
    "corpus.json",
)
"""Files of which the attacker keeps older copies."""


@dataclass
class Damage:
    """What was done to the run folder since it last went on. names: of what was touched, for a refusal to say."""

    run: Path
    aside: Path
    names: set[str] = field(default_factory=set)
    touched: set[str] = field(default_factory=set)
    _saved: list[tuple[Path, Path | None]] = field(default_factory=list)

    def apply(self, what: Mapping[str, Any]) -> bool:
        """Do it; whether there was anything to do it to."""
        chance = random.Random(what["seed"])
        if (
            what["how"] == "delete"
            and " " in what["what"]
            and what["what"] not in ("older checkpoint",)
        ):
            return self._lose(what["what"])
        path = self._find(what["what"], chance)
        if path is None:
            return False
        before = _look(path)
        self.keep(path)
        self._spoil(path, what["how"], chance)
        return _look(path) != before

    def keep(self, path: Path) -> None:
        """Remember what is at `path`, and what it is called."""
        self.aside.mkdir(parents=True, exist_ok=True)
        copy = self.aside / str(len(list(self.aside.iterdir())))
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, copy, symlinks=True)
        elif os.path.lexists(path):
            shutil.copy2(path, copy, follow_symlinks=False)
        else:
            copy = None
        self._saved.append((path, copy))
        inside = path.relative_to(self.run).parts
        self.names |= said_of(inside)
        self.touched |= {inside[0], path.name}

    def undo(self) -> None:
        """Put everything back, newest first."""
        while self._saved:
            path, copy = self._saved.pop()
            _remove(path)
            if copy is not None and copy.is_dir() and not copy.is_symlink():
                shutil.copytree(copy, path, symlinks=True)
            elif copy is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(copy, path, follow_symlinks=False)
        self.forget()

    def forget(self) -> None:
        """The run went on with it."""
        self._saved.clear()
        self.names.clear()

    def pending(self) -> bool:
        return bool(self._saved)

    def inside(self) -> list[tuple[str, ...]]:
        """Where in the run folder it was done."""
        return [path.relative_to(self.run).parts for path, _ in self._saved]

    def _find(self, what: str, chance: random.Random) -> Path | None:
        steps = sorted((self.run / "checkpoints").glob("step-*"))
        match what:
            case "checkpoint" | "manifest" | "state" if steps:
                folder = steps[-1]
            case "older checkpoint" if len(steps) > 1:
                folder = chance.choice(steps[:-1])
            case "data":
                folder = self.run / "data"
            case "slots":
                return self.run / "fp8_telemetry.bin"
            case "corpus.json":
                return self.run / "data" / what
            case "good.json":
                return self.run / "checkpoints" / what
            case "checkpoint" | "manifest" | "state" | "older checkpoint":
                return None
            case _:
                return self.run / what
        if what in ("manifest", "state"):
            return folder / f"{what}.json"
        found = sorted(each for each in folder.glob("*") if each.is_file())
        return chance.choice(found) if found else None

    def _lose(self, what: str) -> bool:
        checkpoints = self.run / "checkpoints"
        steps = sorted(checkpoints.glob("step-*"))
        rest = [each for each in self.run.glob("*") if each != checkpoints]
        gone = {"all checkpoints": [checkpoints], "newest checkpoint": steps[-1:], "data folder": [self.run / "data"],
                "all but checkpoints": rest}[what]  # fmt: skip
        there = [each for each in gone if each.exists()]
        for path in there:
            self.keep(path)
            _remove(path)
        return bool(there)

    def _spoil(self, path: Path, how: str, chance: random.Random) -> None:
        data = path.read_bytes() if path.is_file() else b""
        place = chance.randrange(len(data)) if data else 0
        match how:
            case "flip" if data:
                data = (
                    data[:place]
                    + bytes([data[place] ^ 1 << chance.randrange(8)])
                    + data[place + 1 :]
                )
            case "cut":
                data = data[:place]
            case "empty":
                data = b""
            case "zero":
                data = bytes(len(data))
            case "twice":
                lines = data.splitlines(keepends=True)
                first = chance.randrange(len(lines)) if lines else 0
                data = b"".join([*lines[: first + 3], *lines[first:]])
            case "delete":
                _remove(path)
                return
            case "older":
                older = self.run.parent.parent / "older" / path.name
                if not older.exists():
                    return
                data = older.read_bytes()
            case "folder":
                _remove(path)
                path.mkdir(parents=True)
                return
            case "link":
                target = self.aside / "link-target"
                target.write_bytes(data)
                _remove(path)
                path.symlink_to(target)
                return
            case _ if how.startswith("forged "):
                data = forged(data, path.name, how.removeprefix("forged "), chance)
        if path.parent.is_dir():
            _remove(path)
            path.write_bytes(data)


def said_of(inside: Sequence[str]) -> set[str]:
    """What a refusal may call a file or folder of a run; of a file in a checkpoint that checkpoint, of a file in data/
    the file, the folder or what it holds. The keys of a config are called by their own names."""
    path = "/".join(inside)
    found = {f"runs/r/{path}", *({inside[-1]} if "." in inside[-1] else ())}
    if inside[0] == "checkpoints" and len(inside) > 1 and inside[1].startswith("step-"):
        found |= {inside[1], f"step {int(inside[1].removeprefix('step-'))}"}
    if inside[0] == "data":
        found |= {"runs/r/data", "the data differ"}
    more = {
        "config.yaml": "changed from",
        "plan.json": "the recipe's contents",
        "journal.jsonl": "the journal",
    }
    return found | ({more[inside[-1]]} if inside[-1] in more else set())


def forged(data: bytes, name: str, how: str, chance: random.Random) -> bytes:
    """`data` of a file as somebody else would write it: hostile, or with one value changed to a likely one."""
    if how != "value":
        row = JSON[how]
        return data + row + b"\n" if name == "journal.jsonl" else row
    if name == "config.yaml":
        return data.replace(b"lr: 0.003", b"lr: 0.004").replace(b"seed: 0", b"seed: 1")
    if name == "journal.jsonl":
        lines = data.splitlines(keepends=True)
        if not lines:
            return data
        number = chance.randrange(len(lines))
        row = decode(lines[number]) or {}
        key = chance.choice(sorted(row)) if row else ""
        lines[number] = (
            json.dumps({**row, key: chance.choice((-1, 1e300, "text", None, 2**70))}) + "\n"
        ).encode()
        return b"".join(lines)
    try:
        content = json.loads(data)
    except ValueError:
        content = {}
    if name == "good.json":
        return dump_json(chance.choice(([5], [5, 10], [10, 15, 20], [8], [99999])))
    if name == "outcome.json" or not content:
        content = {
            "status": "done",
            "exit_code": 0,
            "reason": "as planned",
            "step": 30,
            "val_loss": 1.0,
        }
    elif isinstance(content, dict):
        key = chance.choice(sorted(content))
        old = content[key]
        content[key] = (
            old + 1 if isinstance(old, int) else [] if isinstance(old, list | dict) else f"{old}x"
        )
    return dump_json(content)


def power_cut(damage: Damage, seconds: float, seed: int) -> int:
    """Take back, wholly or in part, what was written in the last `seconds` before the last change; how many files."""
    chance = random.Random(seed)
    found = [
        each for each in sorted(damage.run.rglob("*")) if each.is_file() and not each.is_symlink()
    ]
    since = max(each.stat().st_mtime for each in found) - seconds if found else 0.0
    hit = 0
    for path in found:
        if path.stat().st_mtime < since or path.name == "lock":
            continue
        fate = chance.choices(("kept", "cut", "zero", "empty", "gone"), (4, 3, 1, 1, 1))[0]
        if fate == "kept":
            continue
        hit += 1
        damage.keep(path)
        data = path.read_bytes()
        if path.name == "journal.jsonl":  # what is older was written back long ago
            data, late = _older_rows(data, since)
            path.write_bytes(data + late[: chance.randrange(len(late) + 1)])
        elif fate == "gone":
            path.unlink()
        else:
            path.write_bytes(
                {"cut": data[: chance.randrange(len(data) + 1)], "zero": bytes(len(data))}.get(
                    fate, b""
                )
            )
    return hit


def _older_rows(data: bytes, since: float) -> tuple[bytes, bytes]:
    place = 0
    for line in data.splitlines(keepends=True):
        row = decode(line)
        if row is not None and row.get("time", 0.0) >= since:
            break
        place += len(line)
    return data[:place], data[place:]


def keep_older(run: Path, folder: Path) -> None:
    """Copies of small files as they are now, unless there are any of before."""
    folder.mkdir(exist_ok=True)
    for path in run.rglob("*.*"):
        if path.name in KEPT and path.is_file() and not (folder / path.name).exists():
            shutil.copy2(path, folder / path.name)


def _look(path: Path) -> object:
    if path.is_symlink():
        return "link"
    return path.read_bytes() if path.is_file() else path.is_dir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def other_command(folder: Path, change: str) -> tuple[list[str], str, Any]:
    """More arguments, what must be said of them, and how to undo what was changed beside them."""

    def nothing() -> None: ...

    recipe, text = folder / "recipe.yaml", folder / "text"
    given = {
        "lr": (["train.lr=0.002"], r"train\.lr"), "seed": (["train.seed=7"], r"train\.seed"),
        "batch": (["train.global_batch=8"], r"train\.global_batch"), "context": (["data.context=16"], r"data\.context"),
        "model": (["model.target=harness.models.gpt:build", "model.args={dim: 32}"], r"model\.args|model\.target"),
        "recipe name": (["--recipe", "bf16"], "recipe"),
        "unknown key": (["train.leaning_rate=1"], "learning_rate|unknown key"),
        "optimizer": (["train.optimizer=sgd"], r"train\.optimizer|optimizer"),
    }  # fmt: skip
    if change in given:
        arguments, said = given[change]
        return list(arguments), said, nothing
    if change == "huge recipe":
        (folder / "huge.yaml").write_bytes(recipe.read_bytes() + b"# " + b"x" * (100 << 20))
        return (
            ["--recipe", "huge.yaml"],
            r"huge\.yaml: cannot be read: is larger than",
            lambda: (folder / "huge.yaml").unlink(),
        )
    if change == "huge config":
        (folder / "huge.yaml").write_bytes(b"a: [" + b"1, " * (30 << 20))
        return (
            ["--config", "huge.yaml"],
            r"huge\.yaml: cannot be read: is larger than",
            lambda: (folder / "huge.yaml").unlink(),
        )
    if change == "recipe contents":
        before = recipe.read_bytes()
        recipe.write_bytes(before.replace(b"margin: 0", b"margin: 1"))
        return [], "recipe", lambda: recipe.write_bytes(before)
    kept = folder / "text-aside"
    shutil.copytree(text, kept)
    for path in text.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[::-1])
    return (
        ["train.max_minutes=0.0001"],
        "data|text",
        lambda: (shutil.rmtree(text), kept.rename(text)),
    )


def contents(run: Path) -> dict[str, bytes]:
    """Every file but the lock, which names the process that asked for it last, and files that did not exist."""
    found = {}
    for path in sorted(run.rglob("*")):
        if path.is_file() and path.name != "lock":
            with suppress(OSError):
                found[str(path.relative_to(run))] = path.read_bytes()
    return found


def differ(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> set[str]:
    return {name for name in {*before, *after} if before.get(name) != after.get(name)}


def preload(work: Path, here: Path) -> str:
    """LD_PRELOAD with both injectors, built from C; the disk before the calls, so that its own calls count."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), "")
    if not compiler:
        raise SystemExit(
            "no cc, gcc or clang to build the fault injectors with: install one (apt-get install gcc)"
        )
    built = []
    for name in ("small_disk", "inject"):
        built.append(work / f"{name}.so")
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", built[-1], here / f"{name}.c", "-ldl"],
            check=True,
        )
    return os.pathsep.join(map(str, built))
