"""What is known of cards. Torch-free.

- `tier_of`: the tier of a machine's weakest card.
- `check_usable`: why torch cannot use the cards, if it cannot.
- `CARDS`: datasheets. Estimates compute with them, and a run's FLOPs are compared with their peaks (MFU).

The first two are pure functions of MachineFacts. What a backend can compute on a tier it declares itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from harness.capability.probe import Device, MachineFacts
from harness.core.errors import Problem

GIB = 2**30


class Tier(Enum):
    """Generations that differ in number formats, best first."""

    BLACKWELL = "BLACKWELL"
    HOPPER = "HOPPER"
    ADA = "ADA"
    AMPERE = "AMPERE"
    TURING = "TURING"
    VOLTA = "VOLTA"
    CPU = "CPU"


# Lowest compute capability of each tier, best first.
_FLOORS = (
    ((10, 0), Tier.BLACKWELL),
    ((9, 0), Tier.HOPPER),
    ((8, 9), Tier.ADA),
    ((8, 0), Tier.AMPERE),
    ((7, 5), Tier.TURING),
    ((7, 0), Tier.VOLTA),
)
# Oldest Linux driver for programs built for a CUDA major version (minor-version compatibility).
_MINIMUM_DRIVER = {11: 450, 12: 525, 13: 580}
_ON_PURPOSE = 'to train on the CPU on purpose, set CUDA_VISIBLE_DEVICES=""'


def tier_of(facts: MachineFacts) -> tuple[Tier, str]:
    """The tier that a plan may count on, and why: the weakest visible card decides, no card means CPU.

    Ask `check_usable` first: a card that torch cannot use is not the same as no card.
    """
    if facts.cpu_on_purpose:
        return Tier.CPU, f"CUDA_VISIBLE_DEVICES={facts.cuda_visible_devices!r} hides every GPU"
    if not facts.cuda_available or not facts.devices:
        return Tier.CPU, "torch sees no GPU"

    # Ranks on unlike cards train one model, so all of them compute what the weakest can.
    weakest = min(facts.devices, key=lambda device: device.capability)
    text = f"{weakest.name}, compute capability {_dotted(weakest.capability)}"
    if any(device.capability != weakest.capability for device in facts.devices):
        text += f", the weakest of {len(facts.devices)} (choose cards with CUDA_VISIBLE_DEVICES)"
    for floor, tier in _FLOORS:
        if weakest.capability >= floor:
            return tier, text
    return Tier.CPU, f"{text}: below 7.0, no tier uses it"


def check_usable(facts: MachineFacts) -> list[Problem]:
    """Why this machine's NVIDIA cards cannot be used as they are; empty if they can, or if there are none.

    Without a card two problems are left: torch cannot be imported, or it is a ROCm build and the user hid no card.
    Callers raise MachineError (exit 4) for any of them: on a rented card, a run must not end up on the CPU unnoticed.
    """
    if facts.torch_version is None:
        why = facts.torch_error or "it is not installed for this Python"
        return [Problem("PyTorch cannot be imported", "torch", why=why, fix="make setup")]
    if facts.cpu_on_purpose:
        return []
    if facts.torch_hip is not None:
        fix = f"use a CUDA build of torch on an NVIDIA card; {_ON_PURPOSE}"
        return [Problem("this is a ROCm build of torch", f"torch {facts.torch_version}", fix=fix)]
    if not facts.cuda_available:
        problem = _unseen_card(facts)
        return [problem] if problem else []

    # Cards that are alike have one problem, not one each.
    found = [_card_problem(device, facts) for device in dict.fromkeys(facts.devices)]
    return [problem for problem in found if problem]


def _unseen_card(facts: MachineFacts) -> Problem | None:
    """Why torch sees no card although the driver, or the PCI bus, has one; None if there is none."""
    smi = facts.nvidia_smi

    # No driver that answers: only the PCI bus shows whether there is a card.
    if not smi.gpus:
        if not (smi.error and facts.nvidia_on_pci):
            return None
        what = "an NVIDIA card is plugged in, but its driver does not answer"
        fix = f"reboot or reinstall the driver, or rent another machine; {_ON_PURPOSE}"
        return Problem(what, "nvidia-smi", smi.error, fix)

    card = smi.gpus[0]
    if len(smi.gpus) > 1:
        card = f"{len(smi.gpus)} x {card}"
    what = f"this machine has {card}, but torch cannot use it"
    where = f"torch {facts.torch_version}"
    if facts.torch_cuda is None:
        fix = f"install a CUDA build (pip install --force-reinstall torch from https://pytorch.org); {_ON_PURPOSE}"
        return Problem(what, where, "it is a CPU-only build", fix)

    # A driver that is older than what torch was built for.
    needed = _MINIMUM_DRIVER.get(int(facts.torch_cuda.split(".")[0]))
    major = (smi.driver or "").split(".")[0]
    driver = int(major) if major.isdigit() else None
    if needed and driver and driver < needed:
        why = f"it was built for CUDA {facts.torch_cuda}, which needs driver {needed} or newer; here is {smi.driver}"
        fix = f"choose a machine or image with driver {needed}+, or a torch built for an older CUDA; {_ON_PURPOSE}"
        return Problem(what, where, why, fix)

    # Anything else: torch's own words.
    why = facts.torch_error or "torch.cuda.is_available() is False"
    if facts.cuda_visible_devices is not None:
        why += f" (CUDA_VISIBLE_DEVICES={facts.cuda_visible_devices!r})"
    return Problem(what, where, why, f"check the driver and CUDA_VISIBLE_DEVICES; {_ON_PURPOSE}")


def _card_problem(device: Device, facts: MachineFacts) -> Problem | None:
    """Why this card cannot be used, though torch sees it; None if it can."""
    capability = _dotted(device.capability)
    where = f"{device.name} (compute capability {capability})"
    if device.capability < (7, 0):
        why = "it has no fast number format to train in"
        fix = f"choose a card of compute capability 7.0 (V100) or newer; {_ON_PURPOSE}"
        return Problem("this card is too old", where, why, fix)
    if facts.arch_list and not _has_code_for(device.capability, facts.arch_list):
        why = f"torch {facts.torch_version} was built for {', '.join(facts.arch_list)}"
        fix = f"install a torch build that has sm_{capability.replace('.', '')}; {_ON_PURPOSE}"
        if device.capability == (7, 0):
            fix = f"recent torch has sm_70 only in its cu126 wheels: install one of those; {_ON_PURPOSE}"
        return Problem("this build of torch has no code for this card", where, why, fix)
    return None


def _has_code_for(capability: tuple[int, int], arch_list: tuple[str, ...]) -> bool:
    """Whether a build of torch has code for a card.

    Machine code (`sm_*`) runs on cards of the same major and no lower minor version. PTX (`compute_*`) of any older
    version is compiled when it is loaded. Two suffixes narrow this, for both kinds:
    `a`, as in sm_90a: code for one architecture, which runs on that one only.
    `f`, as in sm_100f: code for a family, which runs on the same major and no lower minor version.
    """
    for arch in arch_list:
        kind, _, digits = arch.partition("_")
        number = digits.rstrip("af")
        if not number.isdigit():
            continue
        built = (int(number[:-1]), int(number[-1]))
        if built == capability:
            return True
        if digits.endswith("a") or built > capability:
            continue
        any_newer = kind == "compute" and not digits.endswith("f")
        if any_newer or built[0] == capability[0]:
            return True
    return False


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


@dataclass(frozen=True, slots=True)
class Card:
    """The datasheet of one card.

    name: as torch reports it.
    capability: compute capability (major, minor).
    memory: bytes that torch reports.
    bandwidth: of the memory, B/s.
    half: dense peak in FLOP/s of fp16 or bf16 with fp32 accumulation, without sparsity.
    fp8, fp32: the same for those; 0 where the card has no such unit.
    processors: streaming multiprocessors.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    bandwidth: float
    half: float
    fp8: float
    fp32: float
    processors: int

    @property
    def tf32(self) -> float:
        """FLOP/s of float32 GEMMs under TF32: half the 16-bit rate on every card of 8.0 and more, else plain fp32."""
        return self.half / 2 if self.capability >= (8, 0) else self.fp32

    def peaks(self, tf32: bool = False) -> dict[str, float]:
        """Dense FLOP/s by precision, 0 where the card has no such unit. tf32: float32 products may use it."""
        bf16 = self.half if self.capability >= (8, 0) else 0.0
        return {
            "fp8": self.fp8,
            "bf16": bf16,
            "fp16": self.half,
            "fp32": self.tf32 if tf32 else self.fp32,
        }


# Peaks are NVIDIA's dense figures: half of those printed "with sparsity". Memory is what torch calls "total capacity"
# in its out-of-memory messages. It is less than the round figure of the datasheet, as ECC and the driver take some.
CARDS: dict[str, Card] = {
    # NVIDIA H100 Tensor Core GPU datasheet, column SXM: 3.35 TB/s, 1,979 / 3,958 / 67 TFLOPS (the first two sparse).
    "H100": Card(
        "NVIDIA H100 80GB HBM3", (9, 0), int(79.1 * GIB), 3.35e12, 989e12, 1979e12, 67e12, 132
    ),
    # NVIDIA H200 Tensor Core GPU datasheet, column SXM: 4.8 TB/s; the processor is the H100's.
    "H200": Card("NVIDIA H200", (9, 0), int(139.7 * GIB), 4.8e12, 989e12, 1979e12, 67e12, 132),
    # NVIDIA HGX B200 datasheet, for eight cards, dense: 18 PFLOPS 16-bit, 36 FP8, 600 TFLOPS fp32, 62 TB/s, 1.44 TB.
    "B200": Card("NVIDIA B200", (10, 0), int(178.3 * GIB), 7.7e12, 2250e12, 4500e12, 75e12, 148),
    # NVIDIA L40S datasheet: 864 GB/s, 362.05 and 733 TFLOPS dense, 91.6 fp32.
    "L40S": Card("NVIDIA L40S", (8, 9), int(44.4 * GIB), 0.864e12, 362e12, 733e12, 91.6e12, 142),
    # NVIDIA L4 datasheet: 300 GB/s, 242 and 485 TFLOPS with sparsity, 30.3 fp32.
    "L4": Card("NVIDIA L4", (8, 9), int(22.0 * GIB), 0.3e12, 121e12, 242e12, 30.3e12, 58),
    # NVIDIA Ada GPU architecture whitepaper, appendix A: 1,008 GB/s; tensor cores with fp32 accumulation, dense.
    "RTX4090": Card(
        "NVIDIA GeForce RTX 4090",
        (8, 9),
        int(23.6 * GIB),
        1.008e12,
        165.2e12,
        330.3e12,
        82.6e12,
        128,
    ),
    # NVIDIA A100 Tensor Core GPU datasheet, SXM: 2,039 and 1,555 GB/s, 312 TFLOPS, 19.5 fp32.
    "A100-80GB": Card(
        "NVIDIA A100-SXM4-80GB", (8, 0), int(79.1 * GIB), 2.039e12, 312e12, 0.0, 19.5e12, 108
    ),
    "A100-40GB": Card(
        "NVIDIA A100-SXM4-40GB", (8, 0), int(39.4 * GIB), 1.555e12, 312e12, 0.0, 19.5e12, 108
    ),
    # NVIDIA A10 datasheet: 600 GB/s, 125 TFLOPS, 31.2 fp32.
    "A10": Card("NVIDIA A10", (8, 6), int(22.0 * GIB), 0.6e12, 125e12, 0.0, 31.2e12, 72),
    # NVIDIA T4 datasheet: 320 GB/s (maximum), 65 TFLOPS, 8.1 fp32.
    "T4": Card("Tesla T4", (7, 5), int(14.6 * GIB), 0.32e12, 65e12, 0.0, 8.1e12, 40),
    # NVIDIA V100 datasheet, SXM2: 900 GB/s, 125 TFLOPS, 15.7 fp32; 16 and 32 GB.
    "V100-16GB": Card(
        "Tesla V100-SXM2-16GB", (7, 0), int(15.7 * GIB), 0.9e12, 125e12, 0.0, 15.7e12, 80
    ),
    "V100-32GB": Card(
        "Tesla V100-SXM2-32GB", (7, 0), int(31.7 * GIB), 0.9e12, 125e12, 0.0, 15.7e12, 80
    ),
}


def card_named(name: str) -> Card | None:
    """The card that torch calls `name`; None if there is no datasheet of it here, so that its peaks are not known."""
    return next((card for card in CARDS.values() if card.name == name), None)
