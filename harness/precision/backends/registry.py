"""All backends: what each computes, needs and can do, and where it is built. This file loads no torch.

The declarations are here because the backends' own files import torch and their libraries. A declaration is read where
neither needs to be installed: by `harness doctor`, while a recipe is validated, and in an estimate for another card.
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
"""(facts, tier, the recipe's fp8.scaling) -> whether this machine can run it, and a reason in both cases."""

PLAIN = "autocast"
"""The backend of every module that is not converted."""

_FP8_TIERS = (Tier.BLACKWELL, Tier.HOPPER, Tier.ADA)
_BF16_TIERS = (*_FP8_TIERS, Tier.AMPERE)


@dataclass(frozen=True, slots=True)
class Backend:
    """What is known of a backend without loading it.

    place: "module:name" of the class or function that builds it from (plan, recipe, model, device). It converts the
        model in place. On an fp16 rung it also gets the keyword loss_scale.
    computes: each precision that it computes in, with the rule that says which machines can.
    library: module of the library that it needs, as in `MachineFacts.libraries`; empty if none.
    scalings: values of fp8.scaling that it supports; empty if it has a rule of its own, or no scales. Backends that
        support the same one compute by the same rule, and differ in their kernels only.
    multiples: by fp8.scaling, the number that an FP8 layer's features must be a multiple of, if not 16.
    keeps_amax: whether amaxes of its FP8 layers last from step to step. Non-zero ones prove that FP8 ran.
    fuses: values of fp8.scaling under which it has fused blocks.
    fuses_casts: whether torch.compile can fuse its casts with what makes the tensor.
    not_compiled: why torch.compile cannot compile blocks with its layers in them; empty if it can.
    not_by_default: why engine.compile=auto leaves such blocks eager all the same; empty if it does not.
    transposed: whether it also takes weights stored as [in, out] (Conv1D).
    wide_gradients: whether it can give weight gradients in float32 (fp8.weight_gradients).
    stand_in: the backend that an estimate uses in its place, if its kernels do not run on fake tensors.
    """

    place: str
    computes: Mapping[str, Rule]
    library: str = ""
    scalings: tuple[str, ...] = ()
    multiples: Mapping[str, int] = field(default_factory=dict[str, int])
    keeps_amax: bool = False
    fuses: tuple[str, ...] = ()
    fuses_casts: bool = False
    not_compiled: str = ""
    not_by_default: str = ""
    transposed: bool = False
    wide_gradients: bool = False
    stand_in: str = ""

    def load(self) -> Callable[..., Any]:
        """The class or function that `place` names. This imports its module, and with it the library."""
        module, _, name = self.place.partition(":")
        return getattr(import_module(module), name)


def can_run(
    backend: str, precision: str, facts: MachineFacts, tier: Tier, scaling: str = "delayed"
) -> Answer:
    """Whether `backend` can compute in `precision` on this machine, and a reason in both cases.

    precision: fp8 | bf16 | fp16 | fp32.
    scaling: the recipe's fp8.scaling (delayed | current | block).

    A pair that does not exist gives (False, reason). bf16 is decided by compute capability, never by
    `torch.cuda.is_bf16_supported()`, which is True for emulated bf16 on T4 and V100.
    """
    if backend in BACKENDS and precision in BACKENDS[backend].computes:
        return BACKENDS[backend].computes[precision](facts, tier, scaling)

    pairs: list[str] = []
    for name, declared in BACKENDS.items():
        pairs += [f"{name} {each}" for each in declared.computes]
    known = ", ".join(sorted(pairs))
    return False, f"{backend} does not compute in {precision} (known: {known})"


def _te_fp8(facts: MachineFacts, tier: Tier, scaling: str) -> Answer:
    if tier not in _FP8_TIERS:
        needs = "Transformer Engine's FP8 needs compute capability 8.9 or more"
        return False, f"{needs}, {_here(facts, tier)}"

    library = facts.libraries.get("transformer_engine")
    if library is None:
        return False, "Transformer Engine: not installed (make setup builds it)"
    if not library.ok:
        return False, f"Transformer Engine: {library.reason} (make setup builds it)"

    lacking = _te_lacks(scaling, facts)
    if lacking:
        return False, lacking

    version = f" {library.version}" if library.version else ""
    # Blackwell's units scale by blocks of 32: TE expresses blocks of 128 with those.
    emulated = ""
    if scaling == "block" and _weakest(facts).capability >= (10, 0):
        emulated = ", emulated with MXFP8"
    return True, f"Transformer Engine{version} on FP8 tensor cores, {scaling} scaling{emulated}"


def _te_lacks(scaling: str, facts: MachineFacts) -> str:
    """Why TE would refuse this scaling here (its check_recipe_support in quantization.py); empty if it would not.

    On compute capability 8.9 TE asks for cuBLASLt 12.1.3, which came with CUDA 12.1.
    """
    weakest = _weakest(facts)
    cuda = _release(facts.torch_cuda)
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
    if library is None:
        return False, "torchao: not installed"
    if not library.ok:
        return False, f"torchao: {library.reason}"
    version = "torchao"
    if library.version:
        version += f" {library.version}"
    emulated = ""
    if tier is Tier.CPU:
        emulated = ", emulated on the CPU"
    return True, f"{version}, dynamic scaling{emulated}"


def _bf16(facts: MachineFacts, tier: Tier, _: str) -> Answer:
    if tier is Tier.CPU and facts.cpu_bf16_isa:
        return True, f"bf16 on the CPU ({', '.join(facts.cpu_bf16_isa)})"
    if tier is Tier.CPU:
        return True, "bf16 on the CPU, slow: it has no bf16 instructions"
    if tier in _BF16_TIERS:
        return True, "bf16 tensor cores"
    needs = "bf16 needs compute capability 8.0 or more"
    return False, f"{needs}, {_here(facts, tier)} and would only emulate it"


def _fp16(facts: MachineFacts, tier: Tier, _: str) -> Answer:
    if tier is Tier.CPU:
        return True, "fp16 on the CPU, very slow: for tests at tiny sizes"
    return True, "fp16 tensor cores"


def _fp32(facts: MachineFacts, tier: Tier, _: str) -> Answer:
    if tier is Tier.CPU:
        return True, "fp32 on the CPU"
    return True, "fp32, TF32 where the card has it"


def _here(facts: MachineFacts, tier: Tier) -> str:
    """What this machine has, for the end of a sentence that says what is needed."""
    if tier is Tier.CPU or not facts.devices:
        return "this machine runs on its CPU"
    return _has(_weakest(facts))


def _weakest(facts: MachineFacts) -> Device:
    """The GPU with the lowest compute capability, which decides for the machine."""
    return min(facts.devices, key=lambda device: device.capability)


def _has(device: Device) -> str:
    major, minor = device.capability
    return f"{device.name} has {major}.{minor}"


def _release(version: str | None) -> tuple[int, ...]:
    """(12, 9) for "12.9"; () if the version is unknown, which compares as less than any version."""
    parts = (version or "").split(".")
    # A part that is no number, such as "0a0", is left out.
    return tuple(int(part) for part in parts if part.isdigit())


BACKENDS: dict[str, Backend] = {
    "transformer_engine": Backend(
        place="harness.precision.backends.te:TransformerEngineBackend",
        computes={"fp8": _te_fp8},
        library="transformer_engine",
        scalings=("delayed", "current", "block"),
        multiples={"block": 128},
        keeps_amax=True,
        fuses=("delayed",),
        not_by_default="only what lies between its modules would be compiled, and no card has run that yet",
        stand_in="native",
    ),
    "native": Backend(
        place="harness.precision.backends.native:NativeBackend",
        computes={"fp8": _native_fp8},
        scalings=("delayed",),
        keeps_amax=True,
        fuses_casts=True,
        transposed=True,
        wide_gradients=True,
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
"""All backends by their name in a recipe's ladder, in the order in which messages list them."""
