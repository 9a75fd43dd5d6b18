"""Record what Transformer Engine's delayed scaling really does, and check our rule against it. Needs an FP8 GPU.

    python benchmarks/te_golden.py [--out tests/golden/te_delayed_scaling.json]

It has not been run yet: there is no golden file without a GPU. Each case feeds one te.Linear a sequence of tensors of
known magnitude, and notes after every step TE's own history and scale for input, weight and grad_output. The amaxes
in the file are measured on the tensors, not read from TE. Exit code 1 if `harness.precision.scaling` disagrees
anywhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness.core.atomic import write_json
from harness.precision import scaling

FEATURES, TOKENS = 64, 32
FP8_MAX = torch.tensor([scaling.E4M3.max, scaling.E4M3.max, scaling.E5M2.max])
# A slow drift, a spike and its end, a tensor of zeros (which must not roll), and values at both ends of the range.
MAGNITUDES = (1.0, 1.1, 1.2, 500.0, 1.0, 1.0, 0.0, 1.0, 1e-6, 1.0, 1e-38, 1e4, 1.0, 1.0, 1.0, 1.0)
CASES = (
    {"margin": 0, "amax_history_len": 4, "amax_compute_algo": "max"},
    {"margin": 0, "amax_history_len": 16, "amax_compute_algo": "max"},
    {"margin": 2, "amax_history_len": 4, "amax_compute_algo": "max"},
    {"margin": 0, "amax_history_len": 4, "amax_compute_algo": "most_recent"},
)


def record(case: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a step: amax float32 [3] of the tensors, TE's scale [3] and history [L, 3] after it rolled."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format

    torch.manual_seed(0)
    recipe = DelayedScaling(fp8_format=Format.HYBRID, **case)
    layer = te.Linear(FEATURES, FEATURES, bias=False, params_dtype=torch.float32, device="cuda")
    rows = []
    for magnitude in MAGNITUDES:
        x = magnitude * torch.randn(TOKENS, FEATURES, device="cuda")
        grad = (magnitude * torch.randn(TOKENS, FEATURES, device="cuda")).bfloat16()
        with torch.autocast("cuda", torch.bfloat16), te.autocast(enabled=True, recipe=recipe):
            out = layer(x)
        out.backward(grad)
        forward, backward = layer.fp8_meta["scaling_fwd"], layer.fp8_meta["scaling_bwd"]
        rows.append(
            {
                "amax": [
                    scaling.amax(x.bfloat16()).item(),
                    scaling.amax(layer.weight).item(),
                    scaling.amax(grad).item(),
                ],
                "scale": [*forward.scale[:2].tolist(), *backward.scale[:1].tolist()],
                "history": torch.cat([forward.amax_history[:, :2], backward.amax_history[:, :1]], dim=1).tolist(),
            }
        )
    return rows


def disagreements(case: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Where `scaling.update`, fed with the amaxes, does not give TE's bits."""
    history, scale = torch.zeros(case["amax_history_len"], 3), torch.ones(3)
    found = []
    for step, row in enumerate(rows):
        history[0] = torch.tensor(row["amax"])
        history, scale = scaling.update(history, scale, FP8_MAX, case["margin"], case["amax_compute_algo"])
        for what, ours in (("history", history), ("scale", scale)):
            theirs = torch.tensor(row[what])
            if not torch.equal(ours, theirs):
                found.append(f"{case}, step {step}, {what}: ours {ours.tolist()}, TE {theirs.tolist()}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parents[1] / "tests" / "golden" / "te_delayed_scaling.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        print("needs an NVIDIA GPU with compute capability 8.9 or more", file=sys.stderr)
        return 4
    import transformer_engine

    cases = [{**case, "steps": record(case)} for case in CASES]
    about = {
        "transformer_engine": transformer_engine.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "fp8_max": FP8_MAX.tolist(),
    }
    write_json(options.out, {**about, "cases": cases})
    found = [
        line for case, recorded in zip(CASES, cases, strict=True) for line in disagreements(case, recorded["steps"])
    ]
    print("\n".join(found) or f"{len(cases)} cases of {len(MAGNITUDES)} steps agree bit for bit: {options.out}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
