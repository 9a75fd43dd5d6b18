"""The keys of a section of a config or recipe: name, type and limits, default. Torch-free.

The reference pages of docs/ are made from these, so that a page cannot say other than the schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_NAMES = {str: "text", int: "integer", float: "number", bool: "true/false", dict: "mapping"}
_LIMITS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    rule = ["---"] * len(headings)
    lines: list[str] = []
    for cells in (headings, rule, *rows):
        line = " | ".join(cells)
        lines.append(f"| {line} |")
    return "\n".join(lines)


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted name and field of every key below `model`; the keys of a list's items have `[].` before their name."""
    for name, field in model.model_fields.items():
        # A section is listed itself only if it is described; its keys always are.
        inner = section(field.annotation)
        if inner is None or field.description is not None:
            yield prefix + name, field
        if inner is not None:
            items = "[]" if get_origin(field.annotation) is list else ""
            yield from keys(inner, f"{prefix}{name}{items}.")


def section(annotation: Any) -> type[BaseModel] | None:
    """The model of a key that is a section, or a list of sections."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def kind(field: FieldInfo) -> str:
    """A field's type with its limits, in words: `integer >= 1`."""
    return _kind(field.annotation, field.metadata)


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value == "":
        return "empty"
    if not isinstance(value, str):
        value = json.dumps(value)
    return f"`{value}`"


def _kind(annotation: Any, metadata: list[Any]) -> str:
    """A type with its limits, in words: `integer >= 1`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(parts[0], [*metadata, *parts[1:]])
    if origin is Literal:
        # As in YAML: true, not Python's True.
        words = [part if isinstance(part, str) else json.dumps(part) for part in parts]
        return ", ".join(f"`{word}`" for word in words)
    if NoneType in parts:
        (other,) = (part for part in parts if part is not NoneType)
        return f"{_kind(other, metadata)}, or null"
    if section(annotation) is not None:
        return "list of sections"
    if origin is list:
        return f"list of {_kind(parts[0], metadata)}"
    if origin is tuple:
        return f"{len(parts)} of: {_kind(parts[0], metadata)}"

    # A plain type, with its limits.
    name, limits = _NAMES[origin or annotation], dict(_limits(metadata))
    if limits.keys() == {">=", "<="}:
        return f"{name} {limits['>=']:,} to {limits['<=']:,}"
    words = [f"{limit} {number:,}" for limit, number in limits.items()]
    return f"{name} {', '.join(words)}".rstrip()


def _limits(metadata: list[Any]) -> Iterator[tuple[str, float]]:
    """(sign, number) of every limit in a field's metadata; pydantic nests those of an Annotated type."""
    for item in metadata:
        for name, sign in _LIMITS.items():
            limit = getattr(item, name, None)
            if limit is not None:
                yield sign, limit
        if isinstance(item, FieldInfo):
            yield from _limits(item.metadata)
