"""Every backend there is: what it computes and needs, what it can do, and where it is built. Torch-free.

Declared here and not in the backends' own files, because these import torch and their libraries, and a declaration is
asked where neither need be: by `harness doctor`, by a recipe that is read, on paper for another card.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from harness.capability.cards import Tier
from harness.capability.probe import Device, MachineFacts

Answer = tuple[bool, str]
Rule = Callable[[MachineFacts, Tier, str], Answer]
"""(facts, tier, the recipe's fp8.scaling) -> whether this machine can, and the reason in words, given in both cases."""

PLAIN = "autocast"
"""What every module computes under that nothing converts."""

_FP8_TIERS = (Tier.BLACKWELL, Tier.HOPPER, Tier.ADA)
_BF16_TIERS = (*_FP8_TIERS, Tier.AMPERE)


@dataclass(frozen=True, slots=True)
class Backend:
    """What is known of a backend without loading it.

    place: "module:name" of what makes it of (plan, recipe, model, device), converting the model in place; on an fp16
    rung of the keyword loss_scale, too. computes: the rule of each precision that it computes in. library: module of
    the library that it stands on, as in `MachineFacts.libraries`. scalings: values of fp8.scaling that it goes by;
    none: it has a rule of its own, or no scales. multiples: of features of an FP8 layer by fp8.scaling, if not 16.
    keeps_amax: its FP8 layers' amaxes last from step to step, and so prove that FP8 ran. fuses: values of fp8.scaling
    under which it has fused blocks. not_compiled: why torch.compile cannot have it, empty if it can. transposed: it
    computes from weights [in, out] (Conv1D), too. stand_in: backend that is estimated in its place, for kernels that
    do not run on fake tensors.
    """

    place: str
    computes: Mapping[str, Rule]
    library: str = ""
    scalings: tuple[str, ...] = ()
    multiples: Mapping[str, int] = field(default_factory=dict[str, int])
    keeps_amax: bool = False
    fuses: tuple[str, ...] = ()
    not_compiled: str = ""
    transposed: bool = False
    stand_in: str = ""

    def load(self) -> Callable[..., Any]:
        """What `place` names; its module is imported, and with it the library."""
        module, _, name = self.place.partition(":")
        return getattr(import_module(module), name)


def can_run(
    backend: str, precision: str, facts: MachineFacts, tier: Tier, scaling: str = "delayed"
) -> Answer:
    """Whether `backend` can compute in `precision` (fp8 | bf16 | fp16 | fp32) on this machine, and the reason in words,
    which is given in both cases. scaling: the recipe's fp8.scaling (delayed | current | block).

    Pairs that do not exist answer (False, reason). bf16 goes by compute capability, never by
    `torch.cuda.is_bf16_supported()`, which is True for emulated bf16 on T4 and V100.
    """
    if backend in BACKENDS and precision in BACKENDS[backend].computes:
        return BACKENDS[backend].computes[precision](facts, tier, scaling)
    known = sorted(
        f"{name} {each}" for name, declared in BACKENDS.items() for each in declared.computes
    )
    return False, f"{backend} does not compute in {precision} (known: {', '.join(known)})"


def _te_fp8(facts: MachineFacts, tier: Tier, scaling: str) -> Answer:
    if tier not in _FP8_TIERS:
        return (
            False,
            f"Transformer Engine's FP8 needs compute capability 8.9 or more, {_here(facts, tier)}",
        )
    library = facts.libraries.get("transformer_engine")
    if library is None or not library.ok:
        return (
            False,
            f"Transformer Engine: {library.reason if library else 'not installed'} (make setup builds it)",
        )
    if lacking := _te_lacks(scaling, facts):
        return False, lacking
    version = f" {library.version}" if library.version else ""
    emulated = (
        ", emulated with MXFP8"
        if scaling == "block" and _weakest(facts).capability >= (10, 0)
        else ""
    )
    return True, f"Transformer Engine{version} on FP8 tensor cores, {scaling} scaling{emulated}"


def _te_lacks(scaling: str, facts: MachineFacts) -> str:
    """What TE's own check for this scaling (quantization.py, check_recipe_support) would complain of; empty if nothing.

    Its check on compute capability 8.9 is for cuBLASLt 12.1.3, which came with CUDA 12.1.
    """
    weakest, cuda = _weakest(facts), _release(facts.torch_cuda)
    built_for = f"torch is built for {facts.torch_cuda or 'no known version of it'}"
    if scaling == "block" and weakest.capability < (9, 0):
        return f"block scaling needs compute capability 9.0 or more, {_has(weakest)}"
    if scaling == "block" and cuda < (12, 9):
        return f"block scaling needs CUDA 12.9 or more, {built_for}"
    if weakest.capability < (9, 0) and cuda < (12, 1):
        return f"FP8 on compute capability 8.9 needs cuBLASLt 12.1.3, so CUDA 12.1 or more, {built_for}"
    return ""


def _native_fp8(facts: MachineFacts, tier: Tier, _: str) -> Answer:
    if tier is Tier.CPU:
        return True, "emulation in PyTorch: FP8 values held in bf16"
    if tier in _FP8_TIERS:
        return True, "torch._scaled_mm on FP8 tensor cores"
    return False, f"torch._scaled_mm needs compute capability 8.9 or more, {_here(facts, tier)}"


def _torchao_fp8(facts: MachineFacts, tier: Tier, _: str) -> Answer:
    if tier is not Tier.CPU and tier not in _FP8_TIERS:
        return False, f"torchao's FP8 needs compute capability 8.9 or more, {_here(facts, tier)}"
    library = facts.libraries.get("torchao")
    if library is None or not library.ok:
        return False, f"torchao: {library.reason if library else 'not installed'}"
    version = f"torchao {library.version}" if library.version else "torchao"
    return True, f"{version}, dynamic scaling" + (
        ", emulated on the CPU" if tier is Tier.CPU else ""
    )


def _bf16(facts: MachineFacts, tier: Tier, _: str) -> Answer:
    if tier is Tier.CPU:
        isa = ", ".join(facts.cpu_bf16_isa)
        return (
            True,
            f"bf16 on the CPU ({isa})"
            if isa
            else "bf16 on the CPU, slow: it has no bf16 instructions",
        )
    if tier in _BF16_TIERS:
        return True, "bf16 tensor cores"
    return (
        False,
        f"bf16 needs compute capability 8.0 or more, {_here(facts, tier)} and would only emulate it",
    )


def _fp16(facts: MachineFacts, tier: Tier, _: str) -> Answer:
    return (
        True,
        "fp16 on the CPU, very slow: for tests at tiny sizes"
        if tier is Tier.CPU
        else "fp16 tensor cores",
    )


def _fp32(facts: MachineFacts, tier: Tier, _: str) -> Answer:
    return True, "fp32 on the CPU" if tier is Tier.CPU else "fp32, TF32 where the card has it"


def _here(facts: MachineFacts, tier: Tier) -> str:
    if tier is Tier.CPU or not facts.devices:
        return "this machine runs on its CPU"
    return _has(_weakest(facts))


def _weakest(facts: MachineFacts) -> Device:
    return min(facts.devices, key=lambda device: device.capability)


def _has(device: Device) -> str:
    return f"{device.name} has {device.capability[0]}.{device.capability[1]}"


def _release(version: str | None) -> tuple[int, ...]:
    """(12, 9) of "12.9"; () if unknown, which is less than any version."""
    return tuple(int(part) for part in (version or "").split(".") if part.isdigit())


BACKENDS: dict[str, Backend] = {
    "transformer_engine": Backend(
        place="harness.precision.backends.te:TransformerEngineBackend",
        computes={"fp8": _te_fp8},
        library="transformer_engine",
        scalings=("delayed", "current", "block"),
        multiples={"block": 128},
        keeps_amax=True,
        fuses=("delayed",),
        not_compiled="its FP8 modules cannot be traced",
        stand_in="native",
    ),
    "native": Backend(
        place="harness.precision.backends.native:NativeBackend",
        computes={"fp8": _native_fp8},
        scalings=("delayed",),
        keeps_amax=True,
        transposed=True,
    ),
    "torchao": Backend(
        place="harness.precision.backends.torchao:TorchaoBackend",
        computes={"fp8": _torchao_fp8},
        library="torchao",
    ),
    PLAIN: Backend(
        place="harness.precision.backends.autocast:of_plan",
        computes={"bf16": _bf16, "fp16": _fp16, "fp32": _fp32},
    ),
}
"""By the names in a recipe's ladder, in the order in which messages list them."""
