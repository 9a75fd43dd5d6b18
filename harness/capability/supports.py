"""Which backend can compute in which precision here, and why (not). Pure functions of MachineFacts and Tier."""

from __future__ import annotations

from collections.abc import Callable

from harness.capability.probe import Device, MachineFacts
from harness.capability.tier import Tier

Answer = tuple[bool, str]

_FP8_TIERS = (Tier.BLACKWELL, Tier.HOPPER, Tier.ADA)
_BF16_TIERS = (*_FP8_TIERS, Tier.AMPERE)


def can_run(backend: str, precision: str, facts: MachineFacts, tier: Tier, scaling: str = "delayed") -> Answer:
    """Whether `backend` (transformer_engine | native | torchao | autocast) can compute in `precision` (fp8 | bf16 |
    fp16 | fp32) on this machine, and the reason in words, which is given in both cases. scaling: the recipe's
    fp8.scaling (delayed | current | block), which transformer_engine alone goes by.

    Pairs that do not exist answer (False, reason). bf16 goes by compute capability, never by
    `torch.cuda.is_bf16_supported()`, which is True for emulated bf16 on T4 and V100.
    """
    rule = _RULES.get((backend, precision))
    if rule is None:
        known = ", ".join(sorted(f"{known_backend} {known_precision}" for known_backend, known_precision in _RULES))
        return False, f"{backend} does not compute in {precision} (known: {known})"
    able, reason = rule(facts, tier)
    if not able or backend != "transformer_engine":
        return able, reason
    lacking = _te_lacks(scaling, facts)
    emulated = ", emulated with MXFP8" if scaling == "block" and _weakest(facts).capability >= (10, 0) else ""
    return (False, lacking) if lacking else (True, f"{reason}, {scaling} scaling{emulated}")


def _te_fp8(facts: MachineFacts, tier: Tier) -> Answer:
    if tier not in _FP8_TIERS:
        return False, f"Transformer Engine's FP8 needs compute capability 8.9 or more, {_here(facts, tier)}"
    library = facts.libraries.get("transformer_engine")
    if library is None or not library.ok:
        return False, f"Transformer Engine: {library.reason if library else 'not installed'} (make setup builds it)"
    return True, f"Transformer Engine {library.version or ''} on FP8 tensor cores".replace("  ", " ")


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


def _native_fp8(facts: MachineFacts, tier: Tier) -> Answer:
    if tier is Tier.CPU:
        return True, "rehearsal in PyTorch: FP8 values held in bf16"
    if tier in _FP8_TIERS:
        return True, "torch._scaled_mm on FP8 tensor cores"
    return False, f"torch._scaled_mm needs compute capability 8.9 or more, {_here(facts, tier)}"


def _torchao_fp8(facts: MachineFacts, tier: Tier) -> Answer:
    if tier is not Tier.CPU and tier not in _FP8_TIERS:
        return False, f"torchao's FP8 needs compute capability 8.9 or more, {_here(facts, tier)}"
    library = facts.libraries.get("torchao")
    if library is None or not library.ok:
        return False, f"torchao: {library.reason if library else 'not installed'}"
    version = f"torchao {library.version}" if library.version else "torchao"
    return True, f"{version}, dynamic scaling" + (", emulated on the CPU" if tier is Tier.CPU else "")


def _bf16(facts: MachineFacts, tier: Tier) -> Answer:
    if tier is Tier.CPU:
        isa = ", ".join(facts.cpu_bf16_isa)
        return True, f"bf16 on the CPU ({isa})" if isa else "bf16 on the CPU, slow: it has no bf16 instructions"
    if tier in _BF16_TIERS:
        return True, "bf16 tensor cores"
    return False, f"bf16 needs compute capability 8.0 or more, {_here(facts, tier)} and would only emulate it"


def _fp16(_: MachineFacts, tier: Tier) -> Answer:
    return True, "fp16 on the CPU, very slow: for tests at tiny sizes" if tier is Tier.CPU else "fp16 tensor cores"


def _fp32(_: MachineFacts, tier: Tier) -> Answer:
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


_RULES: dict[tuple[str, str], Callable[[MachineFacts, Tier], Answer]] = {
    ("transformer_engine", "fp8"): _te_fp8,
    ("native", "fp8"): _native_fp8,
    ("torchao", "fp8"): _torchao_fp8,
    ("autocast", "bf16"): _bf16,
    ("autocast", "fp16"): _fp16,
    ("autocast", "fp32"): _fp32,
}
