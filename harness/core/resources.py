"""Find recipes and configs: in the source tree during development, inside the package once installed."""

from __future__ import annotations

from pathlib import Path

from harness.core.errors import ConfigError, Problem, near_match

# Characters of a path in a message.
_SHOWN = 300
_PACKAGE = Path(__file__).resolve().parent.parent


def resource_dir(kind: str) -> Path:
    """Where recipes or configs are: <repo>/<kind> in a checkout, harness/_shipped/<kind> in a wheel."""
    checkout = _PACKAGE.parent / kind
    return (
        checkout
        if (_PACKAGE.parent / "pyproject.toml").is_file() and checkout.is_dir()
        else _PACKAGE / "_shipped" / kind
    )


def shipped(kind: str) -> list[str]:
    """Names of the shipped recipes or configs."""
    return sorted(path.stem for path in resource_dir(kind).glob("*.yaml"))


def find(kind: str, name_or_path: str) -> Path:
    """The YAML file meant by a name or path.

    A value with a slash or a .yaml ending is a path; anything else a shipped name. Raises ConfigError with the near
    match if there is no such file.
    """
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        path = _home(name_or_path)
        if _is_file(path):
            return path
        fix = f"check the path, or use a shipped name: {', '.join(shipped(kind))}"
        raise ConfigError(Problem("no such file", str(path)[:_SHOWN], fix=fix))
    path = resource_dir(kind) / f"{name_or_path}.yaml"
    if _is_file(path):
        return path
    singular = kind.removesuffix("s")
    known = shipped(kind)
    hint = near_match(name_or_path, known)
    if hint.startswith("did"):
        hint += f" (known: {', '.join(known)})"
    raise ConfigError(
        Problem(
            f'no {singular} "{name_or_path[:_SHOWN]}"', f"--{singular}", fix=f"{hint}; or give a path to a .yaml file"
        )
    )


def _home(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # ~ of a user who does not exist
        return Path(path)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, a loop of links, a folder that may not be entered
        return False
