"""Records what Transformer Engine's delayed scaling does on a GPU, and compares the native backend with a record.

    python benchmarks/te_golden.py [--out tests/golden/te]           # records; needs an FP8 GPU and Transformer Engine
    python benchmarks/te_golden.py --check tests/golden/te/*.json    # compares; needs neither

The records in tests/golden/te were made on an H100. A record is one JSON file with two parts.

`sequences`: one te.Linear is fed tensors of known magnitude (drift, spikes, zeros, subnormals, infinities, NaN), and
after every step TE's own history and scale of input, weight and grad_output are recorded. The amaxes beside them are
measured on the tensors, not read from TE.

`casts`: the FP8 byte of every bfloat16 value under several scales, by TE's quantizer, as runs: [first bfloat16
pattern, byte] wherever the byte changes from one pattern to the next.

Exit code 1 if the native backend disagrees anywhere, 2 on a wrong command line, 4 on a machine that cannot record.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.core.files import write_json
from harness.precision.backends.slot_buffers import SlotBuffers
from harness.precision.recipe import Fp8Config
from harness.precision.scaling import FORMATS

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "golden" / "te"
FEATURES, TOKENS, PATTERNS = 64, 32, 1 << 16
ROLES = ("input", "weight", "grad_output")
# Standard deviation of the step's tensors, or what their first element is set to (the others: standard deviation 1).
STEPS: tuple[float | str, ...] = (
    1.0,
    1.1,
    1.2,
    500.0,
    1.0,
    1.0,
    0.0,
    1.0,
    1e-6,
    1.0,
    1e-38,
    1e4,
    1.0,
    "inf",
    1.0,
    1.0,
)
STEPS += (
    "nan",
    1.0,
    5e37,
    1.0,
    1e-40,
    0.0,
    0.0,
    1.0,
    2.0,
    4.0,
    8.0,
    16.0,
    "inf",
    "inf",
    1.0,
    0.5,
    0.25,
    0.125,
)
CASES: tuple[dict[str, Any], ...] = (
    {"margin": 0, "amax_history_len": 4, "amax_compute_algo": "max", "format": "hybrid"},
    {"margin": 0, "amax_history_len": 2, "amax_compute_algo": "max", "format": "hybrid"},
    {"margin": 0, "amax_history_len": 16, "amax_compute_algo": "max", "format": "e4m3"},
    {"margin": 2, "amax_history_len": 4, "amax_compute_algo": "max", "format": "hybrid"},
    {"margin": 0, "amax_history_len": 4, "amax_compute_algo": "most_recent", "format": "hybrid"},
)
SCALES = (1.0, 448.0 / 3.0, 0.0137, 7.3e5, 2.0**-20, float(np.finfo(np.float32).max))


def bfloat16_values(device: torch.device) -> Tensor:
    """Every bfloat16, by bit pattern: [512, 128]."""
    patterns = np.arange(PATTERNS, dtype=np.uint16).view(np.int16)
    return torch.from_numpy(patterns).to(device).view(torch.bfloat16).reshape(512, 128)


def to_runs(codes: np.ndarray) -> list[list[int]]:
    """uint8 [65536] by bfloat16 pattern -> [[first pattern, byte], ...]."""
    starts = np.flatnonzero(np.diff(codes.astype(np.int16), prepend=-1))
    return [[int(start), int(codes[start])] for start in starts]


def from_runs(runs: Sequence[Sequence[int]]) -> np.ndarray:
    """The inverse of `to_runs`. Raises ValueError if the runs are not in order from pattern 0."""
    starts = [start for start, _ in runs]
    if not starts or starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= PATTERNS:
        raise ValueError("runs must start at pattern 0 and go up")
    lengths = np.diff([*starts, PATTERNS])
    return np.repeat(np.array([code for _, code in runs], dtype=np.uint8), lengths)


def numbers(values: Any) -> Any:
    """Nested lists for strict JSON, infinities spelled out; float() reads both kinds."""
    if isinstance(values, list):
        return [numbers(value) for value in values]
    return values if np.isfinite(values) else str(values)


def floats(values: Any) -> Tensor:
    """The inverse of `numbers`: float32."""
    return torch.from_numpy(np.array(values, dtype=object).astype(np.float64).astype(np.float32))


def record_sequence(case: Mapping[str, Any]) -> dict[str, Any]:
    """One case of `sequences`: amax [steps][3] of the tensors; TE's scale [steps][3], history [steps][L][3]."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format

    torch.manual_seed(0)
    options = {name: value for name, value in case.items() if name != "format"}
    recipe = DelayedScaling(fp8_format=getattr(Format, case["format"].upper()), **options)
    layer = te.Linear(FEATURES, FEATURES, bias=False, params_dtype=torch.float32, device="cuda")
    amaxes, scales, histories = [], [], []
    for step in STEPS:
        x, weight, grad = (_tensor(step, rows) for rows in (TOKENS, FEATURES, TOKENS))
        with torch.no_grad():
            layer.weight.copy_(weight)
        with torch.autocast("cuda", torch.bfloat16), te.autocast(enabled=True, recipe=recipe):
            out = layer(x.bfloat16())
        out.backward(grad.bfloat16())
        forward, backward = layer.fp8_meta["scaling_fwd"], layer.fp8_meta["scaling_bwd"]
        amaxes.append(
            [_largest(tensor) for tensor in (x.bfloat16(), layer.weight, grad.bfloat16())]
        )
        scales.append([*forward.scale[:2].tolist(), *backward.scale[:1].tolist()])
        histories.append(
            torch.cat([forward.amax_history[:, :2], backward.amax_history[:, :1]], dim=1).tolist()
        )
    return {
        **case,
        "amax": numbers(amaxes),
        "scale": numbers(scales),
        "history": numbers(histories),
    }


def record_cast(fmt: str, scale: float) -> dict[str, Any]:
    """One case of `casts`."""
    from transformer_engine.pytorch import Float8Quantizer

    tex = import_module(
        "transformer_engine_torch"
    )  # found once Transformer Engine has loaded it, and not before
    dtype = {"e4m3": tex.DType.kFloat8E4M3, "e5m2": tex.DType.kFloat8E5M2}[fmt]
    quantizer = Float8Quantizer(
        torch.full((1,), scale, device="cuda"), torch.zeros(1, device="cuda"), dtype
    )
    quantizer.set_usage(rowwise=True, columnwise=False)
    codes = quantizer(bfloat16_values(torch.device("cuda")))._data
    return {"format": fmt, "scale": scale, "runs": to_runs(codes.cpu().numpy().reshape(-1))}


def _tensor(step: float | str, rows: int) -> Tensor:
    values = torch.randn(rows, FEATURES, device="cuda") * (1.0 if isinstance(step, str) else step)
    if isinstance(step, str):
        values[0, 0] = float(step)
    return values


def _largest(x: Tensor) -> float:
    return float(np.fmax.reduce(np.abs(x.detach().float().cpu().numpy()), axis=None))


def disagreements(golden: Mapping[str, Any]) -> list[str]:
    """Places where the native backend, fed with a record's amaxes and values, gives other bits than the record.

    Empty if there are none. The sign of a NaN does not count."""
    return [
        line
        for part, check in (("sequences", _sequence_disagreements), ("casts", _cast_disagreements))
        for case in golden[part]
        for line in check(case)
    ]


def _sequence_disagreements(case: Mapping[str, Any]) -> list[str]:
    options = {
        name: case[name] for name in ("margin", "amax_history_len", "amax_compute_algo", "format")
    }
    # TE rolls once per forward and backward, and keeps infinities.
    config = Fp8Config(**options, roll="micro_batch", scrub_inf=False)
    backward = "e5m2" if config.format == "hybrid" else "e4m3"
    buffers = SlotBuffers(ROLES, ("e4m3", "e4m3", backward), config, torch.device("cpu"))
    for step, (amax, scale, history) in enumerate(
        zip(case["amax"], case["scale"], case["history"], strict=True)
    ):
        buffers.begin_window(sample=False)
        buffers.history[0] = floats(amax)
        buffers.end_micro_batch(_one_rank)
        buffers.end_window(floats(amax), torch.zeros(()))
        for what, ours, theirs in (
            ("scale", buffers.scale, floats(scale)),
            ("history", buffers.history, floats(history)),
        ):
            wrong = (ours != theirs).nonzero().tolist()
            if wrong:
                place = tuple(wrong[0])
                values = f"native {ours[place].item()!r}, TE {theirs[place].item()!r}"
                return [f"{options}, first at step {step}, {what} of {ROLES[place[-1]]}: {values}"]
    return []


def _cast_disagreements(case: Mapping[str, Any]) -> list[str]:
    spec = FORMATS[case["format"]]
    buffers = SlotBuffers(["x"], [spec.name], Fp8Config(), torch.device("cpu"))
    tensors, meta = buffers.state_dict()
    buffers.load_state_dict({**tensors, "scale": torch.tensor([case["scale"]])}, meta)
    values = buffers.quantize(bfloat16_values(torch.device("cpu")), 0, record=False)
    ours = values.to(spec.dtype).view(torch.uint8).numpy().reshape(-1)
    theirs = from_runs(case["runs"])
    neither = [
        torch.from_numpy(codes).view(spec.dtype).float().isnan().numpy() for codes in (ours, theirs)
    ]
    wrong = np.flatnonzero((ours != theirs) & ~(neither[0] & neither[1]))
    if not wrong.size:
        return []
    first = int(wrong[0])
    where = f"first at bfloat16 {first:#06x}: native {ours[first]:#04x}, TE {theirs[first]:#04x}"
    return [
        f"{spec.name} at scale {case['scale']:g}: {wrong.size} of {PATTERNS} bytes differ, {where}"
    ]


def _one_rank(values: Tensor) -> Tensor:
    return values


def record() -> dict[str, Any]:
    """Everything, on the current GPU."""
    import transformer_engine

    return {
        "transformer_engine": transformer_engine.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "sequences": [record_sequence(case) for case in CASES],
        "casts": [record_cast(fmt, scale) for fmt, scale in product(FORMATS, SCALES)],
    }


def main(arguments: Sequence[str] | None = None, show: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=FOLDER, metavar="FOLDER", help="where to put the record"
    )
    parser.add_argument(
        "--check", type=Path, nargs="+", metavar="FILE", help="compare with these records instead"
    )
    options = parser.parse_args(arguments)
    if options.check:
        files = list(options.check)
    elif not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        print("recording needs an NVIDIA GPU with compute capability 8.9 or more", file=sys.stderr)
        return 4
    else:
        golden = record()
        name = re.sub(
            r"[^a-z0-9.]+", "-", f"te-{golden['transformer_engine']}-{golden['gpu']}".lower()
        )
        files = [options.out / f"{name}.json"]
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(files[0], golden)
    found = [
        f"{path}: {line}" for path in files for line in disagreements(json.loads(path.read_text()))
    ]
    show(
        "\n".join(found)
        or f"the native backend agrees bit for bit with {', '.join(map(str, files))}"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
