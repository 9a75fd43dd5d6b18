"""The keys of a section of a config or recipe as a table: name, type and limits, default, meaning. Torch-free.

The reference pages of docs/ are made from these rows, so that a page cannot say other than the schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

HEADER = ("| key | type | default | meaning |", "|---|---|---|---|")

_NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", NoneType: "null"}
_LIMITS = {"ge": "at least", "gt": "over", "le": "at most", "lt": "under"}


def rows(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """One row for each key of `model` and of the sections within it."""
    for name, field in model.model_fields.items():
        inner = _section(field.annotation)
        if inner is None:
            yield f"| `{prefix}{name}` | {_kind(field)} | {_default(field)} | {field.description} |"
        else:
            suffix = "[]." if get_origin(field.annotation) is list else "."
            yield from rows(inner, f"{prefix}{name}{suffix}")


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model behind a field that is a section, or a list of them."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _kind(field: FieldInfo) -> str:
    """A field's type and limits in words."""
    inner: Any = field.annotation
    is_list = get_origin(inner) is list
    if is_list:
        inner = get_args(inner)[0]

    # `Annotated[float, Field(gt=1)] | None`: the limits belong to the inner type.
    optional = NoneType in get_args(inner)
    if optional:
        inner = next(part for part in get_args(inner) if part is not NoneType)
    bounds: list[Any] = [*field.metadata]
    for info in get_args(inner)[1:]:
        bounds += getattr(info, "metadata", ())
    if get_origin(inner) is Annotated:
        inner = get_args(inner)[0]

    choices = ", ".join(f"`{value}`" for value in get_args(inner))
    text = choices if get_origin(inner) is Literal else _NAMES[inner]
    parts = [f"list of {text}" if is_list else text]
    for bound in bounds:
        for key, words in _LIMITS.items():
            limit = getattr(bound, key, None)
            if limit is not None:
                parts.append(f"{words} {limit:g}")
    if optional:
        parts.append("or null")
    return ", ".join(parts)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value == "":
        return "empty"
    text = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
    return f"`{text}`"
