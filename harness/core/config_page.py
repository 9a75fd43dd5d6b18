"""docs/reference/config.md: every key of a run's config. Torch-free.

Types, limits, defaults and descriptions come from the fields in `harness.core.config`:
`python -m harness.core.config_page > docs/reference/config.md`.
"""

from __future__ import annotations

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
    parts = [_INTRODUCTION, _decided(), _table("", RunConfig, sections=False)]
    for name, field in RunConfig.model_fields.items():
        section = key_table.section(field.annotation)
        if section is not None:
            parts += [f"## {name}", section.__doc__ or "", _table(f"{name}.", section)]
    return "\n\n".join(parts) + "\n"


def on_resume(key: str) -> str:
    """Whether a resume may change `key`, as `run_folder.check_resumable` has it."""
    if key.startswith(RESUME_MAY_CHANGE):
        return "yes"
    if key in RESUME_NEVER or (key.startswith("data.") and key not in DATA_MAY_CHANGE):
        return "never"
    return "if accepted"


def _decided() -> str:
    """The keys that a resume may change freely, and which rank decides by each."""
    lines = [
        "Those that it may change freely, and which rank decides by each while the run trains:",
        "",
    ]
    for key, ranks in RESUME_DECIDED_BY.items():
        name = f"{key}*" if key.endswith(".") else key
        lines.append(f"- `{name}`: {ranks}.")
    return "\n".join(lines)


def _table(prefix: str, model: type[BaseModel], sections: bool = True) -> str:
    """The keys of `model` as a table. sections: with the keys of the sections in it."""
    rows: list[list[str]] = []
    for key, field in key_table.keys(model, prefix):
        if sections or "." not in key:
            meaning = field.description or ""
            rows.append(
                [
                    f"`{key}`",
                    key_table.kind(field),
                    key_table.default(field),
                    meaning,
                    on_resume(key),
                ]
            )
    return key_table.table(["key", "type", "default", "meaning", "on a resume"], rows)


_INTRODUCTION = """\
# Config keys

Every key of a run's config; [those of a recipe](recipe-keys.md) are a page of their own. Made from the schema:
`python -m harness.core.config_page > docs/reference/config.md`.

```python
from harness.core.config import load_config

config = load_config("tiny", ["train.lr=1e-3", "guard.spike_sigma=20"])  # as on the command line of `harness train`
assert (config.train.lr, config.guard.spike_sigma) == (1e-3, 20)
```

A config is a YAML file with these sections; `key=value` on the command line overrides it. A key that does not exist is
refused, with the nearest that does. A step is one optimizer step; its samples are a window. Shares are from 0 to 1.

Whether a resume may bring another value:

- yes: the run goes on with it.
- if accepted: only with `--accept-changed KEY`, recorded as `run.changed`. `recipe` covers the recipe's contents too.
- never: start a new run, from a checkpoint of the old one if you like:
  `--name NEW --resume runs/<run>/checkpoints/step-<N>`."""


if __name__ == "__main__":
    print(page(), end="")
