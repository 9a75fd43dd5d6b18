"""Read configs and recipes: plain YAML, validated strictly against a pydantic model. Torch-free.

YAML is bounded in size and depth. Tags, aliases and duplicate keys are refused. Validation reports every problem at
once, each with its near match. Code that a config names ("pkg.mod:fn") is imported, and called with the config's
arguments.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeGuard, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from harness.core.errors import CONTROL, ConfigError, HarnessError, Problem, near_match
from harness.core.files import MAX_DEPTH, check_plain, read_bounded

MAX_BYTES = 256 * 1024

_MERGE = "tag:yaml.org,2002:merge"
# An integer of 64 bits has at most 20 digits, or 64 in base 2.
_MAX_DIGITS = 80


class _PlainLoader(yaml.SafeLoader):
    """SafeLoader that refuses YAML features which a config never needs and an attacker may use.

    Refused: tags (`!!python/...`, `!!set`), aliases (alias bombs), merge keys, keys that are not words, duplicate keys
    (the last one would win silently), control characters, and numbers or nesting without end.
    """

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        at = _at(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"aliases (*{event.anchor}) are not allowed{at}")
        if getattr(event, "tag", None) is not None:
            raise yaml.YAMLError(f"tags ({event.tag}) are not allowed{at}")
        if self._depth > MAX_DEPTH:
            raise yaml.YAMLError(f"nested more than {MAX_DEPTH} deep{at}")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            at = _at(key.start_mark)
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"a key must be a word{at}")
            if key.tag == _MERGE:
                raise yaml.YAMLError(f"merge keys (<<) are not allowed{at}")
            if key.value in seen:
                raise yaml.YAMLError(f"duplicate key {key.value!r}{at}")
            # YAML reads `on`, `null` and `1` as other things than words.
            if key.tag != "tag:yaml.org,2002:str":
                raise yaml.YAMLError(f"key {key.value!r} is not a word{at}: put it into quotes")
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        at = _at(node.start_mark)
        found = None
        if isinstance(node, yaml.ScalarNode):
            found = CONTROL.search(node.value)
        if found:
            raise yaml.YAMLError(f"control character {found[0]!r} in a value{at}")
        # Python takes long to convert an integer of very many digits, or refuses it.
        is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if is_number and len(node.value) > _MAX_DIGITS:
            raise yaml.YAMLError(f"a number of {len(node.value)} characters{at}")
        return super().construct_scalar(node)


def _at(mark: yaml.Mark | None) -> str:
    return f" at line {mark.line + 1}" if mark else ""


# PyYAML reads 1e-3 as a string (YAML 1.1 wants 1.0e-3); people mean the number.
_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def parse_yaml(text: str, source: str) -> Any:
    """Plain data from YAML text. Raises ConfigError naming `source` on anything but plain data."""
    try:
        data = yaml.load(text, Loader=_PlainLoader)
        check_plain(data)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        why = " ".join(str(error).split())
        what = f"not plain YAML: {why[:300]}"
        fix = "use plain keys, numbers, strings and lists: no tags, aliases or duplicate keys"
        raise ConfigError(Problem(what, source[:300], fix=fix)) from error
    return data


def read_yaml(path: Path) -> dict[str, Any]:
    """A mapping from a YAML file. Raises ConfigError if it is unreadable, too large, or not a mapping."""
    try:
        text = read_bounded(path, MAX_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        fix = "check the path, permissions and encoding (UTF-8)"
        raise ConfigError(Problem(f"cannot be read: {error}", str(path), fix=fix)) from error
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict):
        what = f"is a {type(data).__name__}, not a mapping of keys"
        raise ConfigError(Problem(what, str(path), fix="write `key: value` lines"))
    return data


T = TypeVar("T", bound=BaseModel)

# Most problems reported, and most characters of a key shown: a broken file may have thousands.
_MOST = 20
_KEY = 80


class Strict(BaseModel):
    """Base of every section: unknown keys are refused, types are not converted, values are frozen once validated."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False
    )


def _in_known_case(model: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with each choice spelled as in the model, so that `data.format=jsonl` becomes `JSONL`."""
    values = dict(given)
    for name, field in model.model_fields.items():
        value = values.get(name)
        kind = field.annotation
        if isinstance(value, str):
            # What is no choice stays as it is, and is judged by the model.
            values[name] = _choices(kind).get(value.casefold(), value)
        elif isinstance(value, Mapping) and _is_section(kind):
            values[name] = _in_known_case(kind, value)
    return values


def _is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _choices(annotation: Any) -> dict[str, str]:
    """Lower case -> name, for each name that a Literal (or a union with one) allows."""
    found: dict[str, str] = {}
    for part in get_args(annotation):
        if get_origin(annotation) is not Literal:
            found |= _choices(part)
        elif isinstance(part, str):
            found[part.casefold()] = part
    return found


def validate(model: type[T], data: Mapping[str, Any], source: str) -> T:
    """`data` as a `model`; names of choices may be in any case.

    Raises ConfigError with one Problem for each wrong key, prefixed by `source`; at most the first 20.
    """
    try:
        return model.model_validate(_in_known_case(model, data))
    except ValidationError as error:
        items = error.errors(include_url=False)
        problems = [_problem(model, item, source) for item in items[:_MOST]]
        if len(items) > _MOST:
            what = f"{len(items) - _MOST} more keys are wrong"
            problems.append(Problem(what, source, fix="correct these first"))
        raise ConfigError(problems) from error


def _problem(model: type[BaseModel], item: Mapping[str, Any], source: str) -> Problem:
    """One of pydantic's errors, with a near match if it is about a name."""
    path = tuple(item["loc"])
    where = f"{source}: {_dotted(path)}" if path else source
    kind = item["type"]
    given = item.get("input")
    if kind == "extra_forbidden":
        key = _short(path[-1])
        fix = near_match(key, _known_keys(model, path[:-1]))
        elsewhere = _places_of(model, key)
        if elsewhere and not fix.startswith("did you mean"):
            fix = f"did you mean {' or '.join(elsewhere)}?"
        return Problem(f'unknown key "{key}"', where, fix=fix)
    if kind == "missing":
        return Problem("missing", where, fix="add this key")
    if kind == "literal_error" and isinstance(given, str):
        # pydantic lists the names as "'a', 'b' or 'c'".
        listed = str(item["ctx"]["expected"]).replace(" or ", ",")
        expected = [part.strip("' ") for part in listed.split(",")]
        short = _short(given)
        what = f"{short!r} is not one of {', '.join(expected)}"
        return Problem(what, where, fix=near_match(short, expected))
    # What the project's own validators raise comes with this prefix.
    message = item["msg"].removeprefix("Value error, ")
    if isinstance(given, Mapping):
        # A rule about several keys, which the message names: the section that holds them says no more.
        return Problem(message[:400], where, fix="correct one of them")
    return Problem(f"{message} (given: {given!r})"[:400], where, fix="correct the value")


def _places_of(model: type[BaseModel], key: str) -> list[str]:
    """Dotted keys of the model's sections that end in `key`."""
    places: list[str] = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if _is_section(kind) and key in kind.model_fields:
            places.append(f"{name}.{key}")
    return places


def _dotted(path: Sequence[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{_short(part)}"
    return text.lstrip(".")


def _short(part: str | int) -> str:
    text = str(part)
    if len(text) <= _KEY:
        return text
    return f"{text[:_KEY]}..."


def _known_keys(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """Keys that the section at `path` accepts. Follows nested models through lists, dicts and unions."""
    candidates: list[Any] = [model]
    for part in path:
        found: list[Any] = []
        for candidate in candidates:
            if _is_section(candidate):
                field = candidate.model_fields.get(str(part))
                if field is not None:
                    found += _models_in(field.annotation)
                # In a union pydantic's path also names the class of the member.
                elif candidate.__name__ == part:
                    found.append(candidate)
        candidates = found or candidates

    keys: set[str] = set()
    for candidate in candidates:
        keys.update(candidate.model_fields)
    return sorted(keys)


def _models_in(annotation: Any) -> list[Any]:
    if _is_section(annotation):
        return [annotation]
    found: list[Any] = []
    if get_origin(annotation) is not None:
        for argument in get_args(annotation):
            found += _models_in(argument)
    return found


def find_target(where: str, target: str, what: str) -> Any:
    """The function or class that `target` names: "pkg.mod:name".

    where: the key and its value, for messages.
    what: the kind of thing that is expected, for messages.

    Raises ConfigError if it is missing.
    """
    module_name, _, name = target.partition(":")
    package = module_name.partition(".")[0]
    if package in sys.stdlib_module_names:
        # A config may name code to run, but functions of Python's own library (os:system) are never meant.
        problem = f"is of Python's own library, which has no {what}"
        raise ConfigError(Problem(problem, where, fix="name your own function"))
    _search_working_folder()
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        fix = "check the module path; the working folder is searched too"
        raise ConfigError(Problem(f"cannot import: {error}", where, fix=fix)) from error

    found = getattr(module, name, None)
    if not callable(found):
        names: list[str] = []
        for other, value in vars(module).items():
            if callable(value) and not other.startswith("_"):
                names.append(other)
        raise ConfigError(Problem(f'no function "{name}"', where, fix=near_match(name, names)))
    return found


def file_of_target(target: str) -> Path | None:
    """The file of the module that `target` ("pkg.mod:name") names, found without running it; None if there is none."""
    _search_working_folder()
    module_name = target.partition(":")[0]
    # A package above the module is imported, and may fail in any way. `find_target` reports that.
    try:
        spec = importlib.util.find_spec(module_name)
    except Exception:
        return None
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin)
    return file if file.is_file() else None


def _search_working_folder() -> None:
    """Put the working folder on the module path: console scripts do not have it there."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def call_target(section: str, target: str, args: Mapping[str, Any], what: str) -> Any:
    """Call the function that `<section>.target` names with `<section>.args`; returns its result.

    what: the kind of thing that is expected, for messages.

    Raises ConfigError if the function is missing, does not take the arguments, or fails. A HarnessError that the
    function raises passes through.
    """
    where = f"{section}.target {target!r}"
    arguments = f"{section}.args"
    function = find_target(where, target, what)
    try:
        return function(**args)
    except HarnessError:
        raise
    except TypeError as error:
        # Wrong arguments, or a TypeError inside of the function: both look alike.
        what = f"does not accept {arguments}: {error}"
        accepted = ", ".join(inspect.signature(function).parameters)
        fix = f"it takes: {accepted or 'nothing'}"
        raise ConfigError(Problem(what, where, fix=fix)) from error
    except Exception as error:
        what = f"failed: {type(error).__name__}: {error}"
        fix = f"call {target} with {arguments} alone"
        raise ConfigError(Problem(what, where, fix=fix)) from error


def import_extra(module: str, extra: str, where: str) -> Any:
    """A module of a library that comes with the extra `extra`. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what = f"needs {module}, which cannot be imported: {error}"
        fix = f"in the project's folder: pip install -e '.[{extra}]'"
        raise ConfigError(Problem(what, where, fix=fix)) from error
