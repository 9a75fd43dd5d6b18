"""What libraries log on import that nobody can act upon. Torch-free."""

from __future__ import annotations

import logging
import sys

_NOISE = {"torchao": "Failed to load ", "torch.utils._pytree": " is an Enum subclass "}


def _useful(record: logging.LogRecord) -> bool:
    """torchao, which transformers imports wherever it is installed, names each kernel for GPUs that it cannot load, and
    has torch complain of its enums. With a CUDA build of torch the kernels are left in: there they could matter.
    """
    torch = sys.modules.get("torch")
    kernels = record.name == "torchao" and torch is not None and torch.version.cuda is not None
    return kernels or _NOISE[record.name] not in str(record.msg)


def leave_out_noise() -> None:
    """From now on, in this process."""
    for name in _NOISE:
        logging.getLogger(name).addFilter(_useful)
