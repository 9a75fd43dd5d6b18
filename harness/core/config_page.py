"""docs/reference/config.md: every key of a run's config. Torch-free.

Types, limits, defaults and descriptions come from the fields in `harness.core.config`:
`python -m harness.core.config_page > docs/reference/config.md`.
"""

from __future__ import annotations

import re

from pydantic import BaseModel

from harness.core import key_table
from harness.core.config import (
    DATA_MAY_CHANGE,
    RESUME_DECIDED_BY,
    RESUME_MAY_CHANGE,
    RESUME_NEVER,
    RunConfig,
)


def page() -> str:
    """The page, in Markdown."""
    parts = [_INTRODUCTION, _decided(), _RECIPE, _table("", RunConfig, sections=False)]
    for name, field in RunConfig.model_fields.items():
        section = key_table.section(field.annotation)
        if section is not None:
            table = _table(f"{name}.", section)
            parts += [f"## {name}", section.__doc__ or "", _resume(f"{name}.", section), table]
    return "\n\n".join(parts) + "\n"


def on_resume(key: str) -> str:
    """Whether a resume may change `key`, as `run_folder.check_resumable` has it."""
    if key.startswith(RESUME_MAY_CHANGE):
        return "yes"
    if key in RESUME_NEVER or (key.startswith("data.") and key not in DATA_MAY_CHANGE):
        return "never"
    return "if accepted"


def _resume(prefix: str, section: type[BaseModel]) -> str:
    """What a resume may change of a section: the answer for most of its keys, then the exceptions."""
    by_answer: dict[str, list[str]] = {}
    for key, _ in key_table.keys(section, prefix):
        by_answer.setdefault(on_resume(key), []).append(f"`{key}`")
    most, *others = sorted(by_answer, key=lambda answer: -len(by_answer[answer]))
    exceptions = "".join(f"; {answer} for {', '.join(by_answer[answer])}" for answer in others)
    return f"On a resume: {most}{exceptions}."


def _decided() -> str:
    """The keys that a resume may change freely, and which rank decides by each."""
    keys_of: dict[str, list[str]] = {}
    for key, ranks in RESUME_DECIDED_BY.items():
        name = f"{key}*" if key.endswith(".") else key
        keys_of.setdefault(ranks, []).append(f"`{name}`")
    lines = [
        "Ranks whose configs differ are refused at the start. Which rank decides by a key with yes:",
        "",
    ]
    lines += [f"- {', '.join(keys)}: {ranks}." for ranks, keys in keys_of.items()]
    return "\n".join(lines)


def _table(prefix: str, model: type[BaseModel], sections: bool = True) -> str:
    """The keys of `model` as a table. sections: with the keys of the sections in it."""
    rows: list[list[str]] = []
    meanings: dict[str, str] = {}
    for key, field in key_table.keys(model, prefix):
        if not sections and "." in key:
            continue
        # An item of a list that means the same as a key outside of it: data.mixture[].split, data.split.
        meanings[key] = meaning = field.description or ""
        outer = _ITEM.sub("", key)
        if outer != key and meanings.get(outer) == meaning:
            meaning = f"as {outer}"
        rows.append([f"`{key}`", key_table.kind(field), key_table.default(field), meaning])
    return key_table.table(["key", "type", "default", "meaning"], rows)


_INTRODUCTION = """\
# Config keys

<!-- Made from the schema: python -m harness.core.config_page > docs/reference/config.md -->
Every key of a run's config; [a recipe has others](recipe-keys.md).

```python
from harness.core.config import load_config

config = load_config("tiny", ["train.lr=1e-3", "guard.spike_sigma=20"])  # as on the command line of `harness train`
assert (config.train.lr, config.guard.spike_sigma) == (1e-3, 20)
```

A config is a YAML file with these sections; `key=value` on the command line overrides it. A step is one optimizer step;
its samples are a window.

Whether a resume may bring another value:

- yes: the run goes on with it.
- if accepted: only with `--accept-changed KEY`.
- never: start a new run, if you like from a checkpoint: `--name NEW --resume runs/<run>/checkpoints/step-<N>`."""

_RECIPE = "`recipe` is in no section. On a resume: if accepted, which covers the recipe's contents."

_ITEM = re.compile(r"\w+\[\]\.")


if __name__ == "__main__":
    print(page(), end="")
