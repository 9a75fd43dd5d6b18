"""Read untrusted YAML: plain data only, bounded in size, no aliases, no duplicate keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from harness.core.errors import ConfigError, Problem

MAX_BYTES = 256 * 1024


class _PlainLoader(yaml.SafeLoader):
    """SafeLoader without aliases (alias bombs) and with duplicate keys refused (the last one would win silently)."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.YAMLError(f"aliases (*{event.anchor}) are not allowed{_at(event.start_mark)}")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.YAMLError(f"duplicate key {key.value!r}{_at(key.start_mark)}")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


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
        return yaml.load(text, Loader=_PlainLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            Problem(
                what=f"not plain YAML: {' '.join(str(error).split())[:300]}",
                where=source,
                fix="use plain keys, numbers, strings and lists: no tags, aliases or duplicate keys",
            )
        ) from error


def read_yaml(path: Path) -> dict[str, Any]:
    """A mapping from a YAML file. Raises ConfigError if it is unreadable, too large, or not a mapping."""
    try:
        raw = path.read_bytes()
        if len(raw) > MAX_BYTES:
            raise ConfigError(
                Problem(f"{len(raw)} bytes is too large for a config (limit {MAX_BYTES})", str(path), fix="shorten it")
            )
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            Problem(f"cannot be read: {error}", str(path), fix="check the path, permissions and encoding (UTF-8)")
        ) from error
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise ConfigError(
            Problem(f"is a {type(data).__name__}, not a mapping of keys", str(path), fix="write `key: value` lines")
        )
    return data
