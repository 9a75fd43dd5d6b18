"""docs/reference/config.md: every key of a run's config. Torch-free.

Types, limits, defaults and descriptions come from the fields in `harness.core.config`:
`python -m harness.core.config_page > docs/reference/config.md`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from harness.core.config import DATA_MAY_CHANGE, RESUME_MAY_CHANGE, RESUME_NEVER, RunConfig

_NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", dict: "mapping"}
_LIMITS = {"ge": "at least", "gt": "over", "le": "at most", "lt": "under"}


def page() -> str:
    """The page, in Markdown."""
    parts = [_INTRODUCTION, _table("", RunConfig, sections=False)]
    for name, field in RunConfig.model_fields.items():
        section = _section(field.annotation)
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


def keys(prefix: str, model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Dotted name and field of every key below `model`; the keys of a list's items have `[].` before their name."""
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section is None or field.description is not None:
            yield prefix + name, field
        if section is not None:
            listed = get_origin(field.annotation) is list
            yield from keys(f"{prefix}{name}[]." if listed else f"{prefix}{name}.", section)


def _table(prefix: str, model: type[BaseModel], sections: bool = True) -> str:
    """The keys of `model` as a table. sections: with the keys of the sections in it."""
    headings = ["key", "type", "default", "meaning", "a resume may change it"]
    rows = [headings, ["---"] * len(headings)]
    for key, field in keys(prefix, model):
        if not sections and "." in key:
            continue
        kind = _kind(field.annotation, field.metadata)
        rows.append([f"`{key}`", kind, _default(field), field.description or "", on_resume(key)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model of a key that is a section, or a list of sections."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _kind(annotation: Any, metadata: list[Any]) -> str:
    """A type with its limits, in words: `integer, at least 1`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(parts[0], [*metadata, *parts[1:]])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in parts)
    if NoneType in parts:
        (other,) = (part for part in parts if part is not NoneType)
        return f"{_kind(other, metadata)}, or null"
    if _section(annotation) is not None:
        return "list of sections"
    if origin is list:
        return f"list of {_kind(parts[0], metadata)}"
    if origin is tuple:
        return f"{len(parts)} of: {_kind(parts[0], metadata)}"
    limits = [f"{words} {limit:,}" for words, limit in _limits(metadata)]
    return ", ".join([_NAMES[origin or annotation], *limits])


def _limits(metadata: list[Any]) -> Iterator[tuple[str, float]]:
    """(words, number) of every limit in a field's metadata; pydantic nests those of an Annotated type."""
    for item in metadata:
        for name, words in _LIMITS.items():
            if getattr(item, name, None) is not None:
                yield words, getattr(item, name)
        if isinstance(item, FieldInfo):
            yield from _limits(item.metadata)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


_INTRODUCTION = """\
# Config keys

For whoever writes a config or an override: every key with its type, limits, default and unit, and whether a resume may
change it. Keys of a recipe, such as `fallback.hits`, are a page of their own. Made from `harness/core/config.py`:
`python -m harness.core.config_page > docs/reference/config.md`.

```python
from harness.core.config import load_config

config = load_config("tiny", ["train.lr=1e-3", "guard.spike_sigma=20"])  # as on the command line of `harness train`
assert (config.train.lr, config.guard.spike_sigma) == (1e-3, 20)
```

A config is a YAML file with these sections; `key=value` on the command line overrides it. A key that does not exist is
refused, with the nearest that does. A step is one optimizer step; its samples are a window. Shares are between 0 and 1.

The last column says what happens if you resume a run with another value:

- yes: the run goes on with the new value.
- if accepted: only with `--accept-changed KEY`, which the run records as `run.changed`. `recipe` covers the recipe's
  contents too.
- never: the run's data and optimizer stay. Start a new run, which may begin at a checkpoint of the old one:
  `--name NEW --resume runs/<run>/checkpoints/step-<N>`."""


if __name__ == "__main__":
    print(page(), end="")
