"""Rows about the card itself: what it is, and how fast it multiplies, copies, attends and launches."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from benchmarks.proof.children import ROOT
from benchmarks.proof.registry import Answer, Task
from harness.capability.cards import check_usable
from harness.capability.probe import MachineFacts, probe
from harness.capability.smi import nvidia_smi
from harness.core.errors import one_line
from harness.core.timing import in_turns, launch_seconds, rates, spread, wait

GIB = 2**30
PACKAGES = ("numpy", "pydantic", "pytest", "rich", "safetensors", "triton", "yaml")
VERSIONS = (
    "triton",
    "transformer-engine",
    "transformer-engine-torch",
    "torchao",
    "deepspeed",
    "numpy",
    "pytest",
)
# If the card is in use by more than this at the start, something else is running on it.
BUSY_PERCENT, BUSY_BYTES = 10, 2 * GIB
SMI_BASE = ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.memory")
SMI_MORE = (
    "utilization.gpu",
    "mig.mode.current",
    "temperature.gpu",
    "ecc.mode.current",
    "compute_mode",
)
SMI_LOAD = ("clocks.sm", "power.draw", "temperature.gpu")


def machine(task: Task) -> Answer:
    """The card, its software and this source: every other figure depends on them.

    The figure `problem` says why no card can be used; it is empty if one can.
    """
    facts = probe(task.folder)
    problem = "; ".join(" ".join(str(each).split()) for each in check_usable(facts))
    if not problem and not facts.cuda_available:
        problem = no_card(facts)
    card = None
    if not problem:
        try:
            card = about_card()
        except (
            Exception
        ) as error:  # driver, fabric manager, exclusive mode: in any case no row can use this card
            problem = f"the card does not compute: {one_line(error)}"
    figures = {
        "card": card,
        "problem": problem,
        "libraries": {
            name: "" if library.ok else f"{name}: {library.reason}"
            for name, library in facts.libraries.items()
        },
        "no_compiling": no_compiling(facts),
        "packages": [name for name in PACKAGES if find_spec(name) is not None],
        "versions": versions(facts),
        "cpu": {"model": cpu_model(), "cores": facts.cpu_cores, "memory": facts.memory_bytes},
        "disk_free": facts.disk_free_bytes,
        "source": source(),
    }
    what = (
        f"{card['name']}, driver {card['smi'].get('driver_version', 'unknown')}"
        if card
        else figures["cpu"]["model"]
    )
    return Answer(f"{what}; torch {facts.torch_version}", figures)


def no_card(facts: MachineFacts) -> str:
    """Why torch sees no card, on a machine without any sign of one."""
    if facts.cpu_on_purpose:
        return "CUDA_VISIBLE_DEVICES hides every card"
    told = f": {facts.torch_error}" if facts.torch_error else ""
    build = f" (torch {facts.torch_version} is a CPU build)" if facts.torch_cuda is None else ""
    return f"torch sees no CUDA card{told}{build}"


def about_card() -> dict[str, Any]:
    """Facts of the first card that torch sees. busy: what else seems to use it; empty if nothing does."""
    device = torch.device("cuda", 0)
    if torch.ones(8, device=device).sum().item() != 8.0:
        raise RuntimeError("a sum of eight ones is not eight")
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    smi = nvidia_smi((*SMI_BASE, *SMI_MORE)) or nvidia_smi(SMI_BASE)
    used = total - free - torch.cuda.memory_reserved(device)
    busy = (
        [f"{used / GIB:.1f} GiB of its memory were in use at the start"]
        if used > BUSY_BYTES
        else []
    )
    percent = smi.get("utilization.gpu", "")
    if percent.isdigit() and int(percent) > BUSY_PERCENT:
        busy.append(f"it was {percent}% busy at the start")
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "memory": properties.total_memory,
        "free": free,
        "multiprocessors": properties.multi_processor_count,
        "mig": "MIG" in properties.name or smi.get("mig.mode.current", "").lower() == "enabled",
        "busy": "; ".join(busy),
        "smi": smi,
    }


def no_compiling(facts: MachineFacts) -> str:
    """Why torch.compile and Triton cannot build kernels here; empty if nothing is known to prevent it."""
    compilers = (os.environ.get("CC", "cc"), "cc", "gcc", "clang")
    if not any(shutil.which(name) for name in compilers):
        return "there is no C compiler, which Triton and torch.compile start: apt install gcc g++"
    if facts.cuda_available and find_spec("triton") is None:
        return "triton is not installed"
    if facts.cuda_available and not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "Python.h is missing, which Triton needs: apt install python3-dev"
    return ""


def versions(facts: MachineFacts) -> dict[str, str | None]:
    """Versions of everything that changes what a card does; None if it is missing or has no version."""
    found: dict[str, str | None] = {
        "python": facts.python,
        "torch": facts.torch_version,
        "cuda": facts.torch_cuda,
        "cublas": cublas(),
        "cudnn": None,
    }
    with suppress(Exception):
        found["cudnn"] = str(torch.backends.cudnn.version() or "") or None
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def cublas() -> str | None:
    """Version of the cuBLAS package that came with torch, else of the library that is loaded."""
    for each in distributions():
        name = (each.name or "").lower()
        if name == "nvidia-cublas" or name.startswith("nvidia-cublas-cu"):
            return each.version
    major = (torch.version.cuda or "").split(".")[0]
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(f"libcublasLt.so.{major}")
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        return str(library.cublasLtGetVersion())
    return None


def cpu_model() -> str:
    """The processor's name in /proc/cpuinfo."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def source() -> dict[str, Any]:
    """Which code this is: the commit and what differs from it, if git knows, and a hash of the sources."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "harness").rglob("*.py")):
        digest.update(
            path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0"
        )
    found: dict[str, Any] = {
        "commit": None,
        "changed": None,
        "sha256": digest.hexdigest(),
        "why": "",
    }
    try:
        top, commit = git("rev-parse", "--show-toplevel", "HEAD").splitlines()
        if Path(top).resolve() != ROOT:
            raise OSError("this folder is part of another checkout")
        found["commit"] = commit
        # Files that a proof writes are no change of the code.
        status = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
        found["changed"] = [line[3:] for line in status.splitlines()][:20]
    except (OSError, subprocess.SubprocessError) as error:
        found["why"] = "git does not answer: " + one_line(error)
    return found


def git(*arguments: str) -> str:
    """Output of git in the checkout, also if another user owns it (as often in containers)."""
    command = ["git", "-c", "safe.directory=*", "--no-optional-locks", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=20, check=True
    ).stdout


def gemm(task: Task) -> Answer:
    """FLOP/s of dense n x n x n products of normal random numbers; in FP8 the right side is column-major."""
    device, size = task.device, 128 if task.rehearsal else 8192
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    actions = {}
    reasons = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if name == "bf16" and (0, 0) < task.capability < (8, 0):
            reasons[name] = "compute capability under 8.0 only emulates bf16"
            continue
        a, b = left.to(dtype), right.to(dtype)
        actions[name] = lambda a=a, b=b: torch.mm(a, b)
    one = torch.ones((), device=device)
    forward, backward = torch.float8_e4m3fn, torch.float8_e5m2
    for name, dtype, fast in (
        ("fp8", forward, True),
        ("fp8_precise", forward, False),
        ("fp8_gradient", backward, False),
    ):
        if (0, 0) < task.capability < (8, 9):
            reasons[name] = "FP8 needs compute capability 8.9"
            continue
        a, b = left.to(dtype), right.to(forward).t().contiguous().t()
        actions[name] = lambda a=a, b=b, fast=fast: torch._scaled_mm(
            a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
    del left, right
    turn, rounds = (0.01, 3) if task.rehearsal else (0.15, 9)
    times, failures = in_turns(actions, device, turn, rounds, task.deadline - 3)
    flops = rates(times, dict.fromkeys(times, 2.0 * size**3))
    figures: dict[str, Any] = {"size": size, "flops": flops, "reasons": reasons | failures}
    require(figures["flops"], figures["reasons"])
    if device.type == "cuda":
        figures["under_load"] = under_load(
            next(iter(actions.values())), min(next(iter(times.values())))
        )
    told = ", ".join(f"{name} {row['median'] / 1e12:.4g}" for name, row in figures["flops"].items())
    return Answer(f"TFLOP/s at {size}^3: {told}", figures)


def under_load(action: Any, each: float) -> dict[str, str]:
    """Clock and power while the card works for about two seconds."""
    for _ in range(int(min(4000, 2.0 / each))):
        action()
    smi = nvidia_smi(SMI_LOAD)
    wait(torch.device("cuda", 0))
    return smi


def bandwidth(task: Task) -> Answer:
    """B/s of a copy (bytes read and written) and of a sum (bytes read), of blocks much larger than any cache."""
    device = task.device
    size = (
        2**24
        if task.rehearsal
        else min(2 * GIB, torch.cuda.mem_get_info(device)[0] // 4) // 1024 * 1024
    )
    a = torch.ones(size // 4, device=device)
    b = torch.empty_like(a)
    turn, rounds = (0.01, 3) if task.rehearsal else (0.1, 9)
    times, reasons = in_turns(
        {"copy": lambda: b.copy_(a), "read": lambda: a.sum()},
        device,
        turn,
        rounds,
        task.deadline - 2,
    )
    figures = {
        "bytes": size,
        "rate": rates(times, {"copy": 2.0 * size, "read": 1.0 * size}),
        "reasons": reasons,
    }
    require(figures["rate"], reasons)
    told = ", ".join(f"{name} {row['median'] / 1e9:.4g}" for name, row in figures["rate"].items())
    return Answer(f"GB/s of blocks of {size / 2**20:.0f} MiB: {told}", figures)


def attention(task: Task) -> Answer:
    """FLOP/s of causal attention, 32 heads of 128: 2 products in forward, 5 in backward; the mask halves each.

    torch chooses the kernel, as in training. On an H100 it chose cuDNN's, and FlashAttention took twice the time.
    """
    device = task.device
    batch, heads, length, width = (1, 2, 64, 16) if task.rehearsal else (2, 32, 4096, 128)
    old = (0, 0) < task.capability < (8, 0)
    dtype = torch.float16 if old else torch.bfloat16
    q, k, v = (
        torch.randn(batch, heads, length, width, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    gradient = torch.randn(batch, heads, length, width, device=device, dtype=dtype)
    kernel = SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True)).name

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> None:
        q.grad = k.grad = v.grad = None
        forward().backward(gradient)

    once = 0.5 * 4.0 * batch * heads * length * length * width
    turn, rounds = (0.01, 3) if task.rehearsal else (0.15, 7)
    times, reasons = in_turns(
        {"forward": forward, "both": both}, device, turn, rounds, task.deadline - 2
    )
    figures = {
        "shape": [batch, heads, length, width],
        "kernel": kernel,
        "dtype": str(dtype).removeprefix("torch."),
        "flops": rates(times, {"forward": once, "both": 3.5 * once}),
        "reasons": reasons,
    }
    require(figures["flops"], reasons)
    told = ", ".join(f"{name} {row['median'] / 1e12:.4g}" for name, row in figures["flops"].items())
    return Answer(f"TFLOP/s, {kernel.lower()}: {told}", figures)


def launch(task: Task) -> Answer:
    """Seconds of one eager launch of an empty kernel, and the bytes that a CUDA context takes."""
    device = task.device
    count, rounds = (200, 3) if task.rehearsal else (5000, 9)
    found = launch_seconds(device, count, rounds)
    figures: dict[str, Any] = {"seconds": spread(found), "context_bytes": None}
    told = f"{figures['seconds']['median'] * 1e6:.2f} us a launch"
    if device.type == "cuda":
        figures["context_bytes"] = context_bytes(task, device)
        told += f", {figures['context_bytes'] / GIB:.2f} GiB for the context"
    return Answer(told, figures)


def context_bytes(task: Task, device: torch.device) -> int:
    """Bytes in use outside of torch's allocator, once the libraries of a training step are loaded."""
    dtype = torch.float16 if task.capability < (8, 0) else torch.bfloat16
    a = torch.randn(256, 256, device=device, dtype=dtype, requires_grad=True)
    heads = (a @ a).view(1, 4, 64, 256)
    F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()
    wait(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def require(figures: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raise RuntimeError if nothing could be timed."""
    if not figures:
        raise RuntimeError(
            "; ".join(f"{name}: {why}" for name, why in reasons.items()) or "nothing was timed"
        )
