"""What every module really ran in, as a run ends."""

from __future__ import annotations

from collections.abc import Mapping

from harness.precision.plan import Plan, pad_numbers
from harness.run import Run


def effective_layers(run: Run, plan: Plan) -> dict[str, str]:
    """What each planned module really ran in at the end: an FP8 layer counts only if its slots saw a nonzero amax."""
    used: set[str] = set()
    if run.precision.slot_names:
        tensors, _ = run.precision.state_dict()
        nonzero = (tensors["history"].amax(dim=0) > 0).tolist()
        slots = zip(run.precision.slot_names, nonzero, strict=True)
        used = {slot.rpartition(".")[0] for slot, saw_amax in slots if saw_amax}
    demoted = set(run.precision.demoted)
    layers: dict[str, str] = {}
    for layer in plan.layers:
        name = pad_numbers(layer.module)
        precision = layer.precision
        if run.precision.lowered and precision in ("fp8", "fp16"):
            precision = run.precision.lowered
        elif precision == "fp8" and name in demoted:
            precision = "bf16"
        elif precision == "fp8" and name not in used:
            precision = "unused"
        layers[layer.module] = precision
    return layers


def describe(layers: Mapping[str, str]) -> str:
    """Such as "fp8: 16 layers, bf16: 1, fp32: 10"."""
    counts: dict[str, int] = {}
    for precision in layers.values():
        counts[precision] = counts.get(precision, 0) + 1
    return ", ".join(f"{precision}: {count} modules" for precision, count in sorted(counts.items()))
