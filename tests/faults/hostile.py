"""What an attacker would write into the files that the harness reads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from harness.checkpoint.policy import save_ledger
from harness.checkpoint.store import Store
from harness.core.config import DataConfig
from harness.core.state import RandomState, RunLedger, TrainState
from harness.data.tokens import prepare
from tests.support.runs import TEXT

SECONDS = 10
SCREEN = 70


class Trap:
    """Unpickled, it runs a command."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.canary}",)


def laughs() -> str:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    return "\n".join(lines)


# What the file holds, with CANARY for a file that must not come to be, and what the message must say.
YAML: dict[str, tuple[bytes, str]] = {
    "apply": (b"train: !!python/object/apply:os.system ['touch CANARY']", "tags"),
    "new": (b"train: !!python/object/new:os.system ['touch CANARY']", "tags"),
    "key": (b"? !!python/object/apply:os.system ['touch CANARY']\n: 1", "tags"),
    "name": (b"train: !!python/name:os.system", "tags"),
    "module": (b"train: !!python/module:os", "tags"),
    "shorthand": (
        b"%TAG ! tag:yaml.org,2002:python/\n---\ntrain: !object/apply:os.system ['touch CANARY']",
        "tags",
    ),
    "set": (b"train: !!set {a, b}", "tags"),
    "bomb": (laughs().encode(), "aliases"),
    "endless": (b"train: &a [*a]", "aliases"),
    "merge": (b"train: {<<: {steps: 3}}", "merge"),
    "merged alias": (b"a: &a {steps: 3}\ntrain: {<<: *a}", "aliases"),
    "deep flow": (b"train: " + b"[" * 100_000, "nested"),
    "deep block": (b"- " * 100_000, "nested"),
    "deep mapping": (b"{a: " * 60_000, "nested"),
    "hexadecimal": (b"train: {steps: 0x" + b"F" * 200_000 + b"}", "a number of 200002 characters"),
    "decimal": (b"train: {steps: " + b"9" * 200_000 + b"}", "a number of 200000 characters"),
    "base 60": (b"train: {steps: 1" + b":1" * 100_000 + b"}", "a number of 200001 characters"),
    "base 60 float": (b"train: {lr: 1" + b":1" * 100_000 + b".5}", "a number of 200003 characters"),
    "wide": (b"train: {steps: 99999999999999999999}", "67 bits"),
    "no number": (b"train: {lr: 0b_}", ""),
    "huge scalar": (b"train: " + b"a" * 250_000, ""),
    "huge key": (b"a" * 900 + b": 1", "unknown key"),
    "many keys": (b"".join(b"key%d: 1\n" % n for n in range(5_000)), "more keys are wrong"),
    "nul": (b"train: {steps: 3}\0", "unacceptable character"),
    "escape": (rb'train: {steps: "\e[2Jgone"}', "control character"),
    "surrogate": (rb'train: {steps: "\ud800"}', "control character"),
    "not utf-8": (b"train: \xff\xfe", "utf-8"),
    "utf-16": ("train: {steps: 3}".encode("utf-16"), "utf-8"),
    "twice": (b"train: {steps: 3}\ntrain: {steps: 4}", "duplicate key"),
    "list as key": (b"{[1, 2]: 3}", "a key must be a word"),
    "number as key": (b"1: 2", "not a word"),
    "yes as key": (b"yes: 2", "not a word"),
    "date": (b"train: {steps: 2026-13-45}", ""),
    "two documents": (b"train: {}\n---\ntrain: {}", "single document"),
    "empty": (b"", "not a mapping"),
    "scalar": (b"5", "not a mapping"),
    "binary": (bytes(range(256)), "utf-8"),
}
JSON: dict[str, bytes] = {
    "deep": b'{"a": ' + b"[" * 100_000,
    "nested": b'{"a": ' * 100 + b"1" + b"}" * 100,
    "digits": b'{"a": ' + b"9" * 100_000 + b"}",
    "nan": b'{"a": NaN}',
    "infinite": b'{"a": 1e999}',
    "twice": b'{"a": 1, "a": 2}',
    "nul": b'{"a": 1}\0',
    "not utf-8": b'{"a": "\xff"}',
    "list": b"[1]",
    "empty": b"",
    "large": b" " * (1 << 20) + b"{}",
}


def state() -> TrainState:
    return TrainState({"rng": RandomState()})


def make_run(folder: Path) -> Path:
    """What a run leaves behind, as far as others read it."""
    folder.mkdir()
    Store(folder / "checkpoints").save(1, *state().state_dict())
    save_ledger(folder, RunLedger())
    prepare(data_config(), folder)
    row = {"kind": "metrics", "step": 1, "attempt": 1, "time": 0.0, "metrics": {"train/loss": 1.0}}
    (folder / "journal.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def data_config() -> DataConfig:
    return DataConfig(path=str(TEXT), context=32)
