"""Windows of all kinds against a second implementation of the whole state machine: same scales, history and bytes.

Every operand is compared through the outputs that it leads to, under the scale that the oracle says was in use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from fp8_oracle import quantize, update
from hypothesis import given, settings
from hypothesis import strategies as st
from native_support import APPLY, SKIP, backend_for, same
from torch import nn

from harness.precision import scaling
from harness.precision.backends.slot_buffers import SlotBuffers

SIZE = 16
FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}


@dataclass
class Oracle:
    """History and scale of one layer's input, weight and grad_output, and when they roll."""

    length: int
    margin: int
    algo: str
    roll: str
    scrub: bool
    formats: tuple[str, str, str]
    scale: list[float] = field(default_factory=lambda: [1.0, 1.0, 1.0])
    scrubbed: int = 0

    def __post_init__(self) -> None:
        self.history = [[0.0] * 3 for _ in range(self.length)]

    def collect(self, amaxes: list[float]) -> None:
        self.history[0] = list(map(max, self.history[0], amaxes))

    def settle(self) -> None:
        if self.scrub:
            self.scrubbed += sum(map(math.isinf, self.history[0]))
            self.history[0] = [0.0 if math.isinf(amax) else amax for amax in self.history[0]]
        limits = [FP8_MAX[fmt] for fmt in self.formats]
        self.history, self.scale = update(self.history, self.scale, limits, self.margin, self.algo)
        self.history[0] = [0.0] * 3


def dequantized(x: torch.Tensor, scale: float, fmt: str) -> torch.Tensor:
    return torch.from_numpy(quantize(x.detach().float().numpy(), scale, fmt)) / scale


def largest(x: torch.Tensor) -> float:
    return float(np.fmax.reduce(np.abs(x.detach().float().numpy()), axis=None))


def assert_rounded(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """bfloat16 of the exact product; where terms cancel, as good as float32 sums can be."""
    exact = exact.masked_fill(~exact.isfinite(), torch.nan)
    noise = exact.abs().nan_to_num().max().item() * 1e-5
    torch.testing.assert_close(actual.double(), exact, rtol=2.0**-8, atol=noise, equal_nan=True)


INPUT_PEAKS, GRADIENTS = [0.0, 1e-3, 1.0, 37.0, 4096.0, math.inf], [0.0, 1e-6, 1.0, 9e4]
MICRO_BATCH = st.tuples(st.sampled_from(INPUT_PEAKS), st.sampled_from(GRADIENTS))
WINDOW = st.tuples(
    st.lists(MICRO_BATCH, min_size=1, max_size=3), st.booleans(), st.sampled_from([0.5, 1.0, 8.0])
)


@pytest.mark.slow
@given(
    windows=st.lists(WINDOW, min_size=1, max_size=6),
    length=st.sampled_from([2, 3, 5]),
    margin=st.integers(0, 2),
    algo=st.sampled_from(["max", "most_recent"]),
    roll=st.sampled_from(["step", "micro_batch"]),
    scrub=st.booleans(),
    fmt=st.sampled_from(["hybrid", "e4m3"]),
)
@settings(max_examples=40, deadline=None)
def test_any_run_matches_the_state_machine(
    windows: list[tuple[list[tuple[float, float]], bool, float]],
    length: int,
    margin: int,
    algo: str,
    roll: str,
    scrub: bool,
    fmt: str,
) -> None:
    linear = nn.Linear(SIZE, SIZE, bias=False)
    model = nn.Sequential(linear)
    keys = {"amax_history_len": length, "margin": margin, "amax_compute_algo": algo}
    backend = backend_for(model, **keys, roll=roll, scrub_inf=scrub, format=fmt)
    oracle = Oracle(
        length, margin, algo, roll, scrub, ("e4m3", "e4m3", "e5m2" if fmt == "hybrid" else "e4m3")
    )
    generator = torch.Generator().manual_seed(0)
    for micro_batches, skip, growth in windows:
        before = [list(row) for row in oracle.history], list(oracle.scale)
        oracle.scrubbed = 0
        backend.begin_window(sample=False)
        for size, grad_size in micro_batches:
            x = torch.randn(SIZE, SIZE, generator=generator).to(torch.bfloat16)
            x[0, 0] = size
            x.requires_grad_()
            grad = (torch.randn(SIZE, SIZE, generator=generator) * grad_size).to(torch.bfloat16)
            weight = linear.weight.detach().clone()
            linear.weight.grad = None
            with backend.context():
                out = model(x)
            out.backward(grad)
            x_q, w_q, g_q = (
                dequantized(tensor, scale, kind)
                for tensor, scale, kind in zip(
                    (x, weight, grad), oracle.scale, oracle.formats, strict=True
                )
            )
            assert x.grad is not None
            assert linear.weight.grad is not None
            assert_rounded(out, x_q @ w_q.t())
            assert_rounded(x.grad, g_q @ w_q)
            assert_rounded(linear.weight.grad, g_q.t() @ x_q)
            oracle.collect([largest(x), largest(weight), largest(grad)])
            backend.end_micro_batch(same)
            if roll == "micro_batch":
                oracle.settle()
        backend.end_window(backend.amax(), SKIP if skip else APPLY, same)
        if roll == "step":
            oracle.settle()
        if skip:
            oracle.history, oracle.scale = before
        assert backend.slot_buffers.history.tolist() == torch.tensor(oracle.history).tolist()
        assert backend.slot_buffers.scale.tolist() == oracle.scale
        assert backend.scrubbed().item() == oracle.scrubbed
        inverses = [np.float32(1) / np.float32(scale) for scale in oracle.scale]
        assert backend.slot_buffers.inverses == inverses, "1 / scale, correctly rounded"
        with torch.no_grad():
            linear.weight.mul_(growth)


def test_operands_are_cast_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    casts: list[tuple[str, str, bool]] = []
    quantise = SlotBuffers.quantize

    def counting(buffers: SlotBuffers, x: torch.Tensor, slot: int, record: bool) -> torch.Tensor:
        casts.append((buffers.names[slot], buffers.formats[slot], record))
        return quantise(buffers, x, slot, record)

    monkeypatch.setattr(SlotBuffers, "quantize", counting)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
    backend = backend_for(model)
    for _ in range(2):
        backend.begin_window(sample=False)
        for _ in range(3):
            with backend.context():
                model(torch.randn(8, SIZE, requires_grad=True)).float().sum().backward()
        backend.end_window(backend.amax(), APPLY, same)
    for layer in ("00", "01"):
        assert casts.count((f"{layer}.input", "e4m3", True)) == 2 * 3
        assert casts.count((f"{layer}.grad_output", "e5m2", True)) == 2 * 3
        assert casts.count((f"{layer}.weight", "e4m3", True)) == 2, (
            "once for all micro-batches of a window"
        )
    assert len(casts) == 2 * (2 * 3 + 2 * 3 + 2)


def test_the_bias_gradient_is_of_the_gradient_before_its_cast() -> None:
    linear = nn.Linear(SIZE, SIZE)
    model = nn.Sequential(linear)
    backend = backend_for(model)
    grad = torch.full((8, SIZE), 1.125, dtype=torch.bfloat16)
    assert scaling.quantize(grad, 1.0, "e5m2").unique().tolist() == [1.0], (
        "the cast would lose an eighth"
    )
    with backend.context():
        out = model(torch.randn(8, SIZE))
    out.backward(grad)
    assert linear.bias.grad is not None
    assert linear.bias.grad.tolist() == [9.0] * SIZE
