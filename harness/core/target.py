"""Code that a config names: "pkg.mod:fn", imported and called with the arguments beside it; libraries of extras."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

from harness.core.errors import ConfigError, HarnessError, Problem, near_match


def find_target(where: str, target: str, what: str) -> Any:
    """The function or class that `target` names: "pkg.mod:name".

    where: the key and its value, what: that Python's own library does not have, for messages. Raises ConfigError if it
    is missing.
    """
    module_name, _, name = target.partition(":")
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        # Such as os:system. A config names code to run; this much of it can never be meant.
        raise ConfigError(
            Problem(f"is of Python's own library, which has no {what}", where, fix="name your own function")
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # console scripts do not have the working folder on their path
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            Problem(f"cannot import: {error}", where, fix="check the module path; the working folder is searched too")
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        names = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise ConfigError(Problem(f'no function "{name}"', where, fix=near_match(name, names)))
    return found


def call_target(section: str, target: str, args: Mapping[str, Any], what: str) -> Any:
    """What the function that `<section>.target` names returns for `<section>.args`.

    what: that Python's own library does not have, for the message. Raises ConfigError if it is missing, does not take
    the arguments, or fails; a HarnessError of its own goes through.
    """
    where, arguments = f"{section}.target {target!r}", f"{section}.args"
    function = find_target(where, target, what)
    try:
        return function(**args)
    except HarnessError:
        raise
    except TypeError as error:
        accepted = list(inspect.signature(function).parameters)
        raise ConfigError(
            Problem(f"does not accept {arguments}: {error}", where, fix=f"it takes: {', '.join(accepted) or 'nothing'}")
        ) from error
    except Exception as error:
        raise ConfigError(
            Problem(f"failed: {type(error).__name__}: {error}", where, fix=f"call {target} with {arguments} alone")
        ) from error


def import_extra(module: str, extra: str, where: str) -> Any:
    """A module of a library that the extra `extra` installs. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        fix = f"pip install 'hopper-harness[{extra}]'"
        raise ConfigError(Problem(f"needs {module}, which cannot be imported: {error}", where, fix=fix)) from error
