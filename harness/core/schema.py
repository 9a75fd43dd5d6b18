"""Strict validation of plain data against a pydantic model, every problem reported at once with its near match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from harness.core.errors import ConfigError, Problem, near_match

T = TypeVar("T", bound=BaseModel)

# Of problems, and of a key's characters: whoever wrote the file may have written thousands.
_MOST = 20
_KEY = 80


class Strict(BaseModel):
    """Base of every section: unknown keys refused, no coercion of types, values frozen once validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False)


def validate(model: type[T], data: Mapping[str, Any], source: str) -> T:
    """`data` as `model`. Raises ConfigError with one Problem for every key that is wrong, prefixed by `source`; of
    very many, the first ones.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        items = error.errors(include_url=False)
        problems = [_problem(model, item, source) for item in items[:_MOST]]
        if len(items) > _MOST:
            problems.append(Problem(f"{len(items) - _MOST} more keys are wrong", source, fix="correct these first"))
        raise ConfigError(problems) from error


def _problem(model: type[BaseModel], item: Mapping[str, Any], source: str) -> Problem:
    path = tuple(item["loc"])
    where = f"{source}: {_dotted(path)}" if path else source
    if item["type"] == "extra_forbidden":
        known = _known_keys(model, path[:-1])
        return Problem(f'unknown key "{_short(path[-1])}"', where, fix=near_match(_short(path[-1]), known))
    if item["type"] == "missing":
        return Problem("missing", where, fix="add this key")
    given = item.get("input")
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "literal_error" and isinstance(given, str):
        expected = [part.strip("' ") for part in str(item["ctx"]["expected"]).replace(" or ", ",").split(",")]
        return Problem(
            f"{_short(given)!r} is not one of {', '.join(expected)}", where, fix=near_match(_short(given), expected)
        )
    return Problem(f"{message} (given: {given!r})"[:400], where, fix="correct the value")


def _dotted(path: Sequence[str | int]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{_short(part)}" for part in path]
    return "".join(parts).lstrip(".")


def _short(part: str | int) -> str:
    text = str(part)
    return text if len(text) <= _KEY else f"{text[:_KEY]}..."


def _known_keys(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """Keys that the section at `path` accepts: walks nested models, through lists, dicts and unions."""
    candidates: list[Any] = [model]
    for part in path:
        found: list[Any] = []
        for candidate in candidates:
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                field = candidate.model_fields.get(str(part))
                if field is not None:
                    found += _models_in(field.annotation)
                elif candidate.__name__ == part:
                    found.append(candidate)
        candidates = found or candidates
    return sorted({name for candidate in candidates for name in candidate.model_fields})


def _models_in(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is None:
        return []
    return [found for argument in get_args(annotation) for found in _models_in(argument)]
