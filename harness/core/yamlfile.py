"""Read untrusted YAML: plain data only, bounded in size and depth, no tags, no aliases, no duplicate keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from harness.core.errors import CONTROL, ConfigError, Problem
from harness.core.untrusted import MAX_DEPTH, check_plain, read_bounded

MAX_BYTES = 256 * 1024

_MERGE = "tag:yaml.org,2002:merge"
# A whole number of 64 bits has at most 20 digits, 64 in base 2.
_MAX_DIGITS = 80


class _PlainLoader(yaml.SafeLoader):
    """SafeLoader without what a config never needs and an attacker does.

    Refused: tags (`!!python/...`, `!!set`), aliases (alias bombs), merge keys, keys that are not words, duplicate keys
    (the last one would win silently), control characters, endless numbers and nesting.
    """

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"aliases (*{event.anchor}) are not allowed{_at(event.start_mark)}")
        if getattr(event, "tag", None) is not None:
            raise yaml.YAMLError(f"tags ({event.tag}) are not allowed{_at(event.start_mark)}")
        if self._depth > MAX_DEPTH:
            raise yaml.YAMLError(f"nested more than {MAX_DEPTH} deep{_at(event.start_mark)}")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"a key must be a word{_at(key.start_mark)}")
            if key.tag == _MERGE:
                raise yaml.YAMLError(f"merge keys (<<) are not allowed{_at(key.start_mark)}")
            if key.value in seen:
                raise yaml.YAMLError(f"duplicate key {key.value!r}{_at(key.start_mark)}")
            if key.tag != "tag:yaml.org,2002:str":
                raise yaml.YAMLError(f"key {key.value!r} is not a word{_at(key.start_mark)}: put it into quotes")
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        found = CONTROL.search(node.value) if isinstance(node, yaml.ScalarNode) else None
        if found:
            raise yaml.YAMLError(f"control character {found[0]!r} in a value{_at(node.start_mark)}")
        if node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float") and len(node.value) > _MAX_DIGITS:
            raise yaml.YAMLError(f"a number of {len(node.value)} characters{_at(node.start_mark)}")
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
        raise ConfigError(
            Problem(
                what=f"not plain YAML: {' '.join(str(error).split())[:300]}",
                where=source[:300],
                fix="use plain keys, numbers, strings and lists: no tags, aliases or duplicate keys",
            )
        ) from error
    return data


def read_yaml(path: Path) -> dict[str, Any]:
    """A mapping from a YAML file. Raises ConfigError if it is unreadable, too large, or not a mapping."""
    try:
        text = read_bounded(path, MAX_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            Problem(f"cannot be read: {error}", str(path), fix="check the path, permissions and encoding (UTF-8)")
        ) from error
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise ConfigError(
            Problem(f"is a {type(data).__name__}, not a mapping of keys", str(path), fix="write `key: value` lines")
        )
    return data
