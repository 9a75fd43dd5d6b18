# pyright: standard
# Strict typing would be wasted here: what torch hands to a function mode is untyped.
"""The line of the program behind a finding of `nonfinite`: which call of which function, in whose source."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)
# What these return is memory as it was, or a constant of the program's.
_ALLOCATE = ("empty", "full")
_WORST = 2
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)\n\s*(?P<text>[^\n]*)')


class FirstBad(TorchFunctionMode):
    """Watches calls of torch's functions while `inside` is set.

    badness: of a value, as `nonfinite_tensors.badness`. operation, where: of the first call that
    was given finite values and returned a NaN or inf, else of the first that returned -inf, which may be a mask.
    """

    def __init__(self, badness: Callable[[Any], int]) -> None:
        super().__init__()
        self.inside = False
        self.operation = self.where = ""
        self._badness = badness
        self._found = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "")
        watching = self.inside and self._found < _WORST and not any(word in name for word in _ALLOCATE)
        clean = watching and not self._badness((args, kwargs))  # before the call, which may work in place
        result = func(*args, **kwargs)
        if clean and (badness := self._badness(result)) > self._found:
            self._found = badness
            self.operation = resolve_name(func) or name
            self.where = _innermost(f'File "{f.filename}", line {f.lineno}, in {f.name}\n    {f.line}' for f in
                                    traceback.extract_stack())  # fmt: skip
        return result


def recorded(node: Any) -> str:
    """Where forward recorded an operation of autograd, if anomaly mode was on then."""
    return _innermost(node.metadata.get("traceback_", ()))


def _innermost(frames: Iterable[str]) -> str:
    """The innermost frame that is neither torch's nor this package's, as `file:line, in function: source`."""
    found = ""
    for frame in frames:
        match = _FRAME.search(frame)
        if match and not match["file"].startswith((_TORCH, _OURS, "<")):
            found = f"{match['file']}:{match['line']}, in {match['name']}: {match['text']}"
    return found
