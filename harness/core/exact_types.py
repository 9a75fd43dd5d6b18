"""Finds code that compares the exact type of a tensor: `type(weight) is nn.Parameter`.

A tensor without memory (`core/deferred.py`) is an instance of Tensor and of Parameter, as `isinstance` finds, but its
type is another one. Python cannot be told to answer otherwise, nor does it say who asks. So the functions that a
constructor has called are noted, and their sources are searched for such a comparison.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import torch

_ASKS = re.compile(r"\btype\(|\.__class__\b")
_TENSORS = re.compile(r"\b(Tensor|Parameter)\b")


@contextmanager
def functions_called() -> Iterator[dict[int, CodeType]]:
    """Context that notes the functions that this thread calls, by the address of their code.

    Under a profiler it notes none: Python has room for one only.
    """
    called: dict[int, CodeType] = {}
    if sys.getprofile() is not None:
        yield called
        return

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called[id(frame.f_code)] = frame.f_code

    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(None)


def comparing(functions: Iterable[CodeType]) -> str:
    """The first of the functions that compares an exact type with Tensor or Parameter, for a message; or empty.

    torch's own functions know of tensors without memory.
    """
    for code in functions:
        # A class may also be compared by its name, which is a constant.
        names = {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))}
        may_ask = {"type", "__class__"} & names and {"Tensor", "Parameter"} & names
        if may_ask and not is_torchs(code.co_filename) and _compares(code):
            return f"{code.co_name} ({Path(code.co_filename).name}:{code.co_firstlineno})"
    return ""


def is_torchs(file: str) -> bool:
    """Whether this is a file of torch, not of another library whose name begins with it."""
    return Path(torch.__file__).parent in Path(file).parents


def _compares(code: CodeType) -> bool:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            text = ast.unparse(node)
            if _ASKS.search(text) and _TENSORS.search(text):
                return True
    return False
