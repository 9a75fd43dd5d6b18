"""What follows from a machine's facts: the tier of its weakest card, and whether torch can use the cards at all.

Pure functions of MachineFacts. What a backend can compute there it declares itself.
"""

from __future__ import annotations

from enum import Enum

from harness.capability.probe import Device, MachineFacts
from harness.core.errors import Problem


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
# Oldest Linux driver that runs programs built for a CUDA major version (minor-version compatibility).
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
    weakest = min(facts.devices, key=lambda device: device.capability)
    text = f"{weakest.name}, compute capability {_dotted(weakest.capability)}"
    if any(device.capability != weakest.capability for device in facts.devices):
        text += f", the weakest of {len(facts.devices)} (choose cards with CUDA_VISIBLE_DEVICES)"
    for floor, tier in _FLOORS:
        if weakest.capability >= floor:
            return tier, text
    return Tier.CPU, f"{text}: below 7.0, no tier uses it"


def check_usable(facts: MachineFacts) -> list[Problem]:
    """Why the NVIDIA cards of this machine cannot be used as they are; empty when they can, or when there are none.

    Callers raise MachineError (exit 4) on any: a paid card must never turn into a silent CPU run.
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
    found = [_card_problem(device, facts) for device in dict.fromkeys(facts.devices)]
    return [problem for problem in found if problem]


def _unseen_card(facts: MachineFacts) -> Problem | None:
    smi = facts.nvidia_smi
    if not smi.gpus:
        if smi.error and facts.nvidia_on_pci:
            fix = f"reboot or reinstall the driver, or rent another machine; {_ON_PURPOSE}"
            return Problem("an NVIDIA card is plugged in, but its driver does not answer", "nvidia-smi", smi.error, fix)
        return None
    card = smi.gpus[0] if len(smi.gpus) == 1 else f"{len(smi.gpus)} x {smi.gpus[0]}"
    what = f"this machine has {card}, but torch cannot use it"
    where = f"torch {facts.torch_version}"
    if facts.torch_cuda is None:
        fix = f"install a CUDA build (pip install --force-reinstall torch from https://pytorch.org); {_ON_PURPOSE}"
        return Problem(what, where, "it is a CPU-only build", fix)
    built_for = int(facts.torch_cuda.split(".")[0])
    needed = _MINIMUM_DRIVER.get(built_for)
    driver = int(smi.driver.split(".")[0]) if smi.driver and smi.driver.split(".")[0].isdigit() else None
    if needed and driver and driver < needed:
        why = f"it was built for CUDA {facts.torch_cuda}, which needs driver {needed} or newer; here is {smi.driver}"
        fix = f"choose a machine or image with driver {needed}+, or a torch built for an older CUDA; {_ON_PURPOSE}"
        return Problem(what, where, why, fix)
    visible = facts.cuda_visible_devices
    why = facts.torch_error or "torch.cuda.is_available() is False"
    if visible is not None:
        why += f" (CUDA_VISIBLE_DEVICES={visible!r})"
    return Problem(what, where, why, f"check the driver and CUDA_VISIBLE_DEVICES; {_ON_PURPOSE}")


def _card_problem(device: Device, facts: MachineFacts) -> Problem | None:
    capability = _dotted(device.capability)
    where = f"{device.name} (compute capability {capability})"
    if device.capability < (7, 0):
        fix = f"choose a card of compute capability 7.0 (V100) or newer; {_ON_PURPOSE}"
        return Problem("this card is too old", where, "it has no fast number format to train in", fix)
    if facts.arch_list and not _has_code_for(device.capability, facts.arch_list):
        why = f"torch {facts.torch_version} was built for {', '.join(facts.arch_list)}"
        fix = f"install a torch build that has sm_{capability.replace('.', '')}; {_ON_PURPOSE}"
        if device.capability == (7, 0):
            fix = f"recent torch has sm_70 only in its cu126 wheels: install one of those; {_ON_PURPOSE}"
        return Problem("this build of torch has no code for this card", where, why, fix)
    return None


def _has_code_for(capability: tuple[int, int], arch_list: tuple[str, ...]) -> bool:
    """Machine code of the same major and no higher minor version, or PTX of any older version (compiled at load)."""
    for arch in arch_list:
        kind, _, digits = arch.partition("_")
        number = digits.rstrip("af")
        if not number.isdigit():
            continue
        built = (int(number[:-1]), int(number[-1]))
        if digits.endswith("a"):
            # Architecture-specific code runs on that one architecture only.
            if built == capability:
                return True
        elif built == capability or (built < capability and (kind == "compute" or built[0] == capability[0])):
            return True
    return False


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
