"""`engine.deterministic`: what this process sets so that a step gives the same bits each time, and what else decides.

Several libraries choose a kernel by how fast it is, or add in whatever order threads finish. Each has a switch of its
own against that. `choose_deterministic` sets those of one process, before it computes anything. `knobs` lists these and
every other setting on which the bits depend, so that two machines can be compared.

That a switch is set proves nothing: an operation of the user's own may still draw its own numbers. replay/proof.py runs
steps twice and compares.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

NOT_SET = "not set"
# Environment variable: what it is set to, unless the user has set it.
_SET = {
    # cuBLAS: one workspace of a fixed size. It is read at the first multiplication on a GPU.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Transformer Engine: no attention kernels that add in any order.
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
# torch.compile: no kernel is chosen by how fast it was.
_COMPILER = "TORCHINDUCTOR_DETERMINISTIC"
# Variables that change the order of sums, and are left as the user has them.
_READ = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "MKL_CBWR",
    "ATEN_CPU_CAPABILITY",
    "PYTHONHASHSEED",
)


def choose_deterministic(compiled: bool) -> None:
    """Use only deterministic kernels in this process. An operation without one raises RuntimeError, naming itself.

    Call it before anything is computed, as libraries read their variables once.

    compiled: blocks of the model will be compiled.
    """
    for name, value in _SET.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # The fastest of several kernels differs from start to start.
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    if compiled:
        os.environ.setdefault(_COMPILER, "1")
        from torch._inductor import config as inductor

        # Something may have read the variable already. Versions of torch before 2.9 have no such setting.
        if hasattr(inductor, "deterministic"):
            inductor.deterministic = os.environ[_COMPILER] == "1"


def release_deterministic() -> None:
    """Take back what `choose_deterministic` set in torch, for a process that builds another run next.

    Environment variables stay: the libraries have read them.
    """
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    # Only a run that compiles has loaded it.
    inductor: Any = sys.modules.get("torch._inductor.config")
    if inductor is not None and hasattr(inductor, "deterministic"):
        inductor.deterministic = False


def knobs(seed: int) -> dict[str, str]:
    """Every setting of this process on which the bits of a step depend, as text. Call it when the run is built.

    seed: `train.seed`, from which dropout, data order and augmentation follow.
    """
    cudnn: Any = torch.backends.cudnn  # its stubs lack `conv` and `rnn`
    found = {
        "train.seed": str(seed),
        "torch.use_deterministic_algorithms": _on(torch.are_deterministic_algorithms_enabled()),
        "cudnn.deterministic": _on(cudnn.deterministic),
        "cudnn.benchmark": _on(cudnn.benchmark),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        # Not allow_tf32: torch refuses to read it where a script has set one of these two.
        "cudnn.conv.fp32_precision": cudnn.conv.fp32_precision,
        "cudnn.rnn.fp32_precision": cudnn.rnn.fp32_precision,
        "fill_uninitialized_memory": _on(
            torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        ),
        "threads": str(torch.get_num_threads()),
    }
    for name in (*_SET, _COMPILER, *_READ):
        found[name] = os.environ.get(name, NOT_SET)
    return found


def _on(value: bool) -> str:
    return "on" if value else "off"
