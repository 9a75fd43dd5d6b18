"""Drops log lines of libraries that nobody can act upon. Torch-free."""

from __future__ import annotations

import logging
import sys

_NOISE = {"torchao": "Failed to load ", "torch.utils._pytree": " is an Enum subclass "}


def _useful(record: logging.LogRecord) -> bool:
    """Whether a record should be logged.

    transformers imports torchao wherever it is installed. torchao then logs each GPU kernel that it cannot load, and
    torch complains of its enums. With a CUDA build of torch the lines on kernels stay: there they may matter.
    """
    torch = sys.modules.get("torch")
    kernels = record.name == "torchao" and torch is not None and torch.version.cuda is not None
    return kernels or _NOISE[record.name] not in str(record.msg)


def leave_out_noise() -> None:
    """Drop such lines from now on, in this process."""
    for name in _NOISE:
        logging.getLogger(name).addFilter(_useful)
