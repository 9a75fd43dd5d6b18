"""Facts about this machine: cards, torch, libraries, compiler. What follows from them is decided elsewhere.

Optional libraries are found without importing them, as an import may take seconds, or crash.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from harness.core.processes import find_compiler


class LibraryFacts(NamedTuple):
    """What is known of one library without importing it.

    version: of the installed distribution.
    ok: whether it should import, judged without importing it.
    reason: why not.
    """

    version: str | None
    ok: bool
    reason: str


# module -> distribution
_LIBRARIES = {
    "transformer_engine": "transformer-engine",
    "torchao": "torchao",
    "deepspeed": "deepspeed",
    "mlflow": "mlflow",
}
# `te.autocast`, which this project builds on, came with this version.
_TE_MINIMUM = (2, 9)


def library_facts() -> dict[str, LibraryFacts]:
    """Facts on every optional library, by module name."""
    found: dict[str, LibraryFacts] = {}
    for module, distribution in _LIBRARIES.items():
        facts = _library(module, distribution)
        found[module] = facts
    return found


def _library(module: str, distribution: str) -> LibraryFacts:
    # Either can be there without the other, in a broken installation.
    found = _version(distribution)
    if find_spec(module) is None:
        reason = "not installed"
        if found:
            reason = f"{distribution} {found} is installed, but holds no module {module}"
        return LibraryFacts(found, False, reason)
    if module == "transformer_engine":
        return _transformer_engine(found)
    return LibraryFacts(found, True, "installed")


def _transformer_engine(found: str | None) -> LibraryFacts:
    # The meta package and the core library can be installed without the part that is built against torch.
    extension = "transformer_engine_torch"
    if find_spec(extension) is None and _version("transformer-engine-torch") is None:
        return LibraryFacts(found, False, f"its PyTorch extension ({extension}) is not installed")
    if found is not None and _release(found) < _TE_MINIMUM:
        needed = ".".join(map(str, _TE_MINIMUM))
        reason = f"version {found} is older than {needed}, which brought te.autocast"
        return LibraryFacts(found, False, reason)
    return LibraryFacts(found, True, "installed")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    """(2, 20) of "2.20.2+abc": enough to compare with a minimum."""
    parts = text.split("+")[0].split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())


_BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
_NVIDIA_PCI_VENDOR = "0x10de"
_PCI_DISPLAY_CLASSES = ("0x0300", "0x0302")


class Device(NamedTuple):
    """One card as torch sees it. capability: compute capability (major, minor). memory_bytes: total."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class NvidiaSmi:
    """What the driver's own tool reports, without torch. error: its complaint when it ran and failed."""

    present: bool = False
    driver: str | None = None
    gpus: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Everything that precision, engines and doctor need to know of a machine. `dataclasses.asdict` of it is JSON-able.

    python: its version.
    torch_version: None if torch cannot be imported.
    torch_cuda: CUDA version that torch was built for; None for a CPU build.
    torch_hip: the same for ROCm.
    torch_error: torch's own complaint about CUDA, or about its import.
    nccl: version of the NCCL that torch was built with; None without one.
    arch_list: `torch.cuda.get_arch_list()`.
    nvidia_on_pci: a card is plugged in, whatever the driver says.
    cpu_bf16_isa: bf16 instructions of the CPU.
    has_ninja: on PATH, or in this interpreter's folder, which the launch scripts put first on PATH.
    memory_bytes: of this machine, or of its container.
    disk_free_bytes: where the folder that was asked about is.
    libraries: see `library_facts`.
    """

    python: str = ""
    torch_version: str | None = None
    torch_cuda: str | None = None
    torch_hip: str | None = None
    torch_error: str = ""
    nccl: str | None = None
    cuda_available: bool = False
    cuda_visible_devices: str | None = None
    devices: tuple[Device, ...] = ()
    arch_list: tuple[str, ...] = ()
    nvidia_smi: NvidiaSmi = NvidiaSmi()
    nvidia_on_pci: bool = False
    cpu_cores: int = 1
    cpu_bf16_isa: tuple[str, ...] = ()
    has_compiler: bool = False
    has_ninja: bool = False
    memory_bytes: int = 0
    disk_free_bytes: int = 0
    libraries: dict[str, LibraryFacts] = field(default_factory=dict)

    @property
    def cpu_on_purpose(self) -> bool:
        """The user hid every GPU: training on the CPU is what was asked for."""
        return self.cuda_visible_devices in ("", "-1")

    def card(self, index: int | None) -> str:
        """The name of a GPU; index: torch's, None for the first."""
        return self.devices[index or 0].name


def probe(folder: Path | None = None) -> MachineFacts:
    """Look at this machine (imports torch, which takes about a second). folder: where disk space is measured."""
    torch_facts = _torch_facts()
    # A virtual environment that is not activated has its ninja beside its Python, and not on the path.
    ninja_beside_python = Path(sys.executable).parent / "ninja"
    has_ninja = shutil.which("ninja") is not None or ninja_beside_python.is_file()
    # A container may have less memory than the machine.
    meminfo = _read(Path("/proc/meminfo"))
    cgroup_max = _read(Path("/sys/fs/cgroup/memory.max"))
    disk = shutil.disk_usage(folder or Path.cwd())
    return MachineFacts(
        python=platform.python_version(),
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        nvidia_smi=_nvidia_smi(),
        nvidia_on_pci=_nvidia_on_pci(Path("/sys/bus/pci/devices")),
        cpu_cores=_cpu_cores(),
        cpu_bf16_isa=cpu_bf16_isa(_read(Path("/proc/cpuinfo"))),
        has_compiler=find_compiler() is not None,
        has_ninja=has_ninja,
        memory_bytes=memory_limit(meminfo, cgroup_max),
        disk_free_bytes=disk.free,
        libraries=library_facts(),
        **torch_facts,
    )


def _cpu_cores() -> int:
    """The cores that this process may use; all cores where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_bf16_isa(cpuinfo: str) -> tuple[str, ...]:
    """The bf16 instruction sets named in the text of /proc/cpuinfo (x86 `flags`, Arm `Features`)."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            flags = set(value.split())
            return tuple(flag for flag in _BF16_FLAGS if flag in flags)
    return ()


def memory_limit(meminfo: str, cgroup_max: str) -> int:
    """Bytes this process may use: the machine's memory or its container's limit, whichever is less; 0 if unknown."""
    total = 0
    for line in meminfo.splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    limit = cgroup_max.strip()
    if total and limit.isdigit():
        return min(total, int(limit))
    return total


def parse_nvidia_smi(output: str) -> NvidiaSmi:
    """Facts from `nvidia-smi --query-gpu=name,driver_version --format=csv,noheader`."""
    names: list[str] = []
    driver = None
    for line in output.splitlines():
        # Other lines are warnings.
        if "," not in line:
            continue
        name, version_text, *_ = line.split(",")
        names.append(name.strip())
        # One driver serves all cards.
        if driver is None:
            driver = version_text.strip()
    return NvidiaSmi(present=True, driver=driver, gpus=tuple(names))


def _nvidia_smi() -> NvidiaSmi:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return NvidiaSmi()
    command = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return NvidiaSmi(present=True, error=str(error))
    if done.returncode:
        complaint = " ".join((done.stdout + done.stderr).split())[:300]
        return NvidiaSmi(present=True, error=complaint or "no output")
    return parse_nvidia_smi(done.stdout)


def _nvidia_on_pci(folder: Path) -> bool:
    """Whether a display device of NVIDIA's is plugged in. folder: /sys/bus/pci/devices."""
    if not folder.is_dir():
        return False
    for device in folder.iterdir():
        vendor = _read(device / "vendor").strip()
        kind = _read(device / "class").strip()
        # NVIDIA also makes network cards, and a GPU's audio output is a device of its own.
        if vendor == _NVIDIA_PCI_VENDOR and kind.startswith(_PCI_DISPLAY_CLASSES):
            return True
    return False


def _torch_facts() -> dict[str, Any]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"torch_error": " ".join(str(error).split())[:300]}

    # For an old driver torch warns and then answers False: the warning is the reason.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    complaint = " ".join(str(caught[0].message).split())[:300] if caught else ""

    devices: list[Device] = []
    if available:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = (properties.major, properties.minor)
            devices.append(Device(properties.name, capability, properties.total_memory))
    return {
        "torch_version": str(torch.__version__),
        "torch_cuda": torch.version.cuda,
        "torch_hip": torch.version.hip,
        "torch_error": complaint,
        "nccl": _nccl(),
        "cuda_available": available,
        "devices": tuple(devices),
        "arch_list": tuple(torch.cuda.get_arch_list()) if available else (),
    }


def _nccl() -> str | None:
    import torch

    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return None
    numbers: Any = import_module("torch.cuda.nccl").version()
    return ".".join(map(str, numbers)) if isinstance(numbers, tuple) else str(numbers)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
