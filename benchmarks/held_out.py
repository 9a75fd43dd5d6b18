"""Faults that the fallback's statistics were not chosen on: which are seen, and what the others cost.

    python -m benchmarks.evidence held-out
    python -m benchmarks.evidence missed             # families of `benchmarks.evidence` that are not seen at every duty
    python -m benchmarks.evidence held-out --draw    # table and pictures of what was measured

**Plan**, committed before any of it was run. The limits under test are those of `harness.monitors.evidence` since
16500d2. `FAMILIES` holds 14 faults, at up to seven strengths. Each is tried:

- in the second of three Linears at five duty cycles (`DUTIES`);
- in the first and the third at every step;
- at every step, at four strengths, in each of the 12 Linears of a GPT of three blocks that was trained for 60 steps.

Two families are harmless by construction and should not be seen. Weights do not change. Only the layer's own tensors
have the fault: its output, and the gradient that it passes on, are those without it. So the fault is seen and not its
consequences.

**Harm** is measured with nothing that the fallback uses. The layer's three products of the same tensors, rounded to FP8
by torch's own casts under scales of the last 16 amaxes, are compared with fp32. For each product the relative errors of
all rows and of all columns, 1 at most, are averaged. The worst of these six numbers is the loss of the step, and harm
is its mean over the steps from the first faulty one on, as if no layer ever left. Without a fault FP8 loses 0.03 to
0.1. A fault counts as harmful from 0.2 on. A miss is a harmful fault that is not seen. A needless demotion is a
harmless fault that is seen; it costs speed alone.

`MISSED` was added after the plan had been run: the same measure for families that were known to be missed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.evidence import ChangedGradient, policy
from harness import Precision
from harness.models.gpt import build

DIM, ROWS = 64, 128
CONTEXT, BATCH, BLOCKS = 32, 8, 3
AT, STEPS, GPT_STEPS = 20, 90, 40
"""Steps before the fault, and after it."""
DUTIES = {
    "every step": (1, 1),
    "1 of 2": (2, 1),
    "1 of 4": (4, 1),
    "1 of 10": (10, 1),
    "3 of 40": (40, 3),
}
"""Period and length of a burst, in steps: a fault comes in the first `length` of every `period`."""
HARMFUL = 0.2
PLACES = ("0", "2", "4")
KINDS = ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")


@dataclass(frozen=True, slots=True)
class Moment:
    """When a fault is applied. age: steps since the first faulty one. micro: the micro-batch, from 0."""

    age: int
    micro: int

    def generator(self) -> torch.Generator:
        """Random numbers of that moment alone."""
        return torch.Generator().manual_seed(1000 + self.age)

    def one_of(self, count: int) -> int:
        """A place that changes at every step."""
        return int(torch.randint(count, (), generator=self.generator()))


Change = Callable[[Tensor, float, Moment], Tensor]


def _tails(x: Tensor, bits: float, when: Moment) -> Tensor:
    """Log-normal factors: one standard deviation is `bits` octaves."""
    return x * torch.exp2(bits * torch.randn(x.shape, generator=when.generator()))


def _columns(x: Tensor, which: int | slice, factor: float) -> Tensor:
    """x with one or some of its channels so many times as large."""
    factors = torch.ones(x.shape[1])
    factors[which] = factor
    return x * factors


def _wandering_row(x: Tensor, bits: float, when: Moment) -> Tensor:
    factor = torch.ones(len(x), 1)
    factor[when.one_of(len(x))] = 2.0**bits
    return x * factor


def _wandering_column(x: Tensor, bits: float, when: Moment) -> Tensor:
    return _columns(x, when.one_of(x.shape[1]), 2.0**bits)


def _column(x: Tensor, bits: float, _: Moment) -> Tensor:
    return _columns(x, 0, 2.0**bits)


def _sample(x: Tensor, bits: float, when: Moment) -> Tensor:
    """The tokens of one of eight samples, another one at every step."""
    factor = torch.ones(8, 1, 1)
    factor[when.one_of(8)] = 2.0**bits
    return (x.view(8, -1, x.shape[1]) * factor).flatten(0, 1)


def _rank_one(x: Tensor, bits: float, when: Moment) -> Tensor:
    """All channels along one direction, as large in each token as chance has it."""
    size = 2.0**bits * x.square().mean().sqrt()
    direction = torch.randn(x.shape[1], generator=torch.Generator().manual_seed(3))
    return x + size * torch.outer(torch.randn(len(x), generator=when.generator()), direction)


def _drift(x: Tensor, bits: float, when: Moment) -> Tensor:
    """A channel that begins at 2^12 and grows by `bits` octaves a step, to 2^40; 0.03: 2%."""
    return _column(x, min(12 + bits * when.age, 40.0), when)


def _second_micro(x: Tensor, bits: float, when: Moment) -> Tensor:
    return x * 2.0**bits if when.micro == 1 else x


def _flipped(x: Tensor, bits: float, _: Moment) -> Tensor:
    """The signs of 1 in 2^-bits of the channels are flipped."""
    return _columns(x, slice(max(1, int(x.shape[1] * 2.0**bits))), -1.0)


def _zeroed(x: Tensor, bits: float, _: Moment) -> Tensor:
    return _columns(x, slice(max(1, int(x.shape[1] * 2.0**bits))), 0.0)


@dataclass(frozen=True, slots=True)
class Family:
    """role: the slot, or "input and weight", which take turns. some: the strengths that the GPT gets."""

    role: str
    change: Change
    strengths: tuple[float, ...]
    some: tuple[float, ...]
    micros: int = 1


_UP, _SOME_UP = (8, 12, 14, 15, 16, 18, 24), (12, 15, 18, 24)
_GRADIENT, _SOME_GRADIENT = (8, 16, 24, 28, 32, 36, 40), (16, 28, 32, 40)
_SHARES, _SOME_SHARES = (-4, -3, -2, -1), (-4, -1)
FAMILIES = {
    "input, heavy tails": Family("input", _tails, (1, 2, 3, 4, 5, 6, 8), (2, 4, 6, 8)),
    "input, a wandering row": Family("input", _wandering_row, _UP, _SOME_UP),
    "input, one sample of eight": Family("input", _sample, _UP, _SOME_UP),
    "input, one direction": Family("input", _rank_one, (4, 8, 12, 14, 16, 18, 24), _SOME_UP),
    "input, a drifting channel": Family(
        "input", _drift, (0.03, 0.06, 0.12, 0.25, 0.5, 1), (0.03, 0.12, 0.5, 1)
    ),
    "input, second micro-batch": Family("input", _second_micro, _UP, _SOME_UP, micros=2),
    "input, half zeroed (harmless)": Family("input", _zeroed, _SHARES, _SOME_SHARES),
    "input and weight in turn, a channel": Family("input and weight", _column, _UP, _SOME_UP),
    "weight, a column": Family("weight", _column, _UP, _SOME_UP),
    "weight, heavy tails": Family("weight", _tails, (1, 2, 3, 4, 5, 6, 8), (2, 4, 6, 8)),
    "gradient, heavy tails": Family("grad_output", _tails, (1, 2, 4, 6, 8, 12, 16), (2, 6, 8, 16)),
    "gradient, one sample of eight": Family("grad_output", _sample, _GRADIENT, _SOME_GRADIENT),
    "gradient, a wandering channel": Family(
        "grad_output", _wandering_column, _GRADIENT, _SOME_GRADIENT
    ),
    "gradient, signs flipped (harmless)": Family("grad_output", _flipped, _SHARES, _SOME_SHARES),
}


FORMATS = {
    "input": (448.0, torch.float8_e4m3fn),
    "weight": (448.0, torch.float8_e4m3fn),
    "grad_output": (57344.0, torch.float8_e5m2),
}


def _all(x: Tensor, bits: float, _: Moment) -> Tensor:
    return x * 2.0**bits


def _half(x: Tensor, bits: float, _: Moment) -> Tensor:
    return _columns(x, slice(x.shape[1] // 2), 2.0**bits)


MISSED = {
    "input, all smaller": Family("input", _all, (-8, -12, -14, -16, -18, -20, -24), ()),
    "gradient, all smaller": Family("grad_output", _all, (-16, -24, -28, -32, -36, -40), ()),
    "gradient, half of the channels": Family("grad_output", _half, (8, 16, 24, 28, 32, 36, 40), ()),
}


class Oracle:
    """FP8 of one layer, by torch's casts and a delayed scaling of its own: how much its three products lose."""

    def __init__(self) -> None:
        self.amaxes = {role: deque[float](maxlen=16) for role in FORMATS}

    def copy(self) -> Oracle:
        """A copy with the same history."""
        made = Oracle()
        made.amaxes = {role: deque(amaxes, maxlen=16) for role, amaxes in self.amaxes.items()}
        return made

    def step(self, x: Tensor, weight: Tensor, gradient: Tensor) -> float:
        """What the step lost, 0 to 1. x: [rows, in], weight: [out, in], gradient: [rows, out], of all micro-batches."""
        exact = {"input": x.double(), "weight": weight.double(), "grad_output": gradient.double()}
        rounded = {role: self.rounded(role, tensor) for role, tensor in exact.items()}
        return max(
            _lost(product(exact), product(rounded))
            for product in (
                lambda of: of["input"] @ of["weight"].T,
                lambda of: of["grad_output"] @ of["weight"],
                lambda of: of["grad_output"].T @ of["input"],
            )
        )

    def rounded(self, role: str, x: Tensor) -> Tensor:
        """x as FP8 has it under the scale of the steps before, float64 of the same shape; its amax is noted."""
        largest, dtype = FORMATS[role]
        scale = largest / max(self.amaxes[role]) if self.amaxes[role] else 1.0
        if amax := float(x.abs().max()):
            self.amaxes[role].append(amax)
        return (x * scale).clamp(-largest, largest).float().to(dtype).double() / scale


def _lost(exact: Tensor, got: Tensor) -> float:
    """The mean relative error, each at most 1, of the rows or of the columns, whichever is worse."""
    worst = 0.0
    for dim in (0, 1):
        size = exact.norm(dim=dim)
        error = ((got - exact).norm(dim=dim) / size)[size > 0].clamp_max(1.0)
        worst = max(worst, float(error.mean()) if len(error) else 0.0)
    return worst


@dataclass(frozen=True, slots=True)
class Found:
    """Of one fault. left: steps from the first faulty one to the layer's first in BF16, 0 if it stayed. others: layers
    that left, too. harm: see the module; worst: of one step."""

    left: int
    others: tuple[str, ...]
    harm: float
    worst: float


@dataclass
class Bench:
    """A model in FP8 with one layer that can be given faults; every run begins from the same healthy state."""

    model: nn.Module
    layer: str
    loss: Callable[[nn.Module, int, int], Tensor]
    micros: int
    precision: Precision = field(init=False)
    _change: Callable[[str, Tensor, int], Tensor] | None = None
    _micro: int = 0
    _seen: dict[str, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.precision = Precision(policy())
        self.model = self.precision.prepare(self.model)
        module = self.model.get_submodule(self.layer)
        self.weight = self.model.get_parameter(f"{self.layer}.weight")
        self.healthy = self.weight.detach().clone()
        bias = dict(module.named_parameters()).get("bias")
        clean: list[Tensor] = []

        def enter(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            clean[:] = given
            return (self._faulty("input", given[0]).detach(),)

        def leave(_: nn.Module, __: tuple[Tensor, ...], out: Tensor) -> Tensor:
            # Only the layer's own tensors have the fault: its output, and the gradient that goes back, do not.
            changed = ChangedGradient.apply(
                out, lambda gradient: self._faulty("grad_output", gradient)
            )
            twin = nn.functional.linear(
                clean[0], self.healthy, None if bias is None else bias.detach()
            )
            return twin + (changed - out.detach())

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        self.oracle = Oracle()
        for step in range(1, AT):
            self._step(step, self.oracle)
        if self.precision.demoted:
            raise SystemExit(f"{self.precision.demoted} left FP8 before there was any fault")
        self.state = self.precision.state_dict()

    def run(self, family: Family, bits: float, duty: tuple[int, int], steps: int) -> Found:
        """One fault for `steps` steps."""
        self.precision.load_state_dict(self.state)
        oracle, lost, left = self.oracle.copy(), [0.0] * steps, dict[str, int]()
        name = next(each for each in self.names() if _plain(each) == self.layer)
        for age in range(steps):
            for gone in self.precision.demoted:
                left.setdefault(gone, age)
            bad, turn = age % duty[0] < duty[1], ("input", "weight")[age // duty[0] % 2]
            roles = (turn,) if family.role == "input and weight" else (family.role,)
            self._change = _at(family.change, bits, age, roles) if bad else None
            lost[age] = self._step(AT + age, oracle)
        self._change = None
        with torch.no_grad():
            self.weight.copy_(self.healthy)
        others = tuple(sorted(left.keys() - {name}))
        return Found(left.get(name, 0), others, sum(lost) / steps, max(lost))

    def names(self) -> list[str]:
        """The FP8 layers, numbers padded."""
        stats = self.precision.stats()
        return sorted({slot.rpartition(".")[0] for slot in stats.names}) if stats else []

    def _faulty(self, role: str, x: Tensor) -> Tensor:
        made = x
        if self._change is not None:
            rows = x.detach().float().flatten(0, -2)
            made = self._change(role, rows, self._micro).to(x.dtype).view(x.shape)
        self._seen.setdefault(role, []).append(made.detach().float().flatten(0, -2))
        return made

    def _step(self, step: int, oracle: Oracle) -> float:
        self._seen.clear()
        with torch.no_grad():
            self.weight.copy_(
                self._change("weight", self.healthy, 0) if self._change else self.healthy
            )
        for micro in range(self.micros):
            self._micro = micro
            with self.precision.context():
                loss = self.loss(self.model, step, micro) / self.micros
            self.precision.backward(loss)
        self.precision.step(self.optimizer)
        self.optimizer.zero_grad()
        return oracle.step(
            torch.cat(self._seen["input"]),
            self.weight.detach(),
            torch.cat(self._seen["grad_output"]),
        )


def _at(
    change: Change, bits: float, age: int, roles: Sequence[str]
) -> Callable[[str, Tensor, int], Tensor]:
    return lambda role, x, micro: change(x, bits, Moment(age, micro)) if role in roles else x


def _plain(name: str) -> str:
    """The name of a module in the model, from that of its slots, whose numbers are padded."""
    return ".".join(str(int(part)) if part.isdigit() else part for part in name.split("."))


def linears(layer: str, micros: int) -> Bench:
    """Three Linears with ReLUs between them, fed with noise."""
    torch.manual_seed(0)
    parts = [nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM)]

    def loss(model: nn.Module, step: int, micro: int) -> Tensor:
        x = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(2 * step + micro))
        return nn.functional.mse_loss(model(x).float(), x.roll(1, dims=1))

    return Bench(nn.Sequential(*parts), layer, loss, micros)


def _tokens(step: int, micro: int) -> Tensor:
    """int64 [BATCH, CONTEXT + 1]: letters, of which seven in ten are the fixed successor of the one before."""
    coin = torch.Generator().manual_seed(2 * step + micro)
    successor = torch.randperm(64, generator=torch.Generator().manual_seed(5))
    tokens = torch.randint(64, (BATCH, CONTEXT + 1), generator=coin)
    follows = torch.rand(tokens.shape, generator=coin) < 0.7
    for place in range(1, CONTEXT + 1):
        tokens[:, place] = torch.where(
            follows[:, place], successor[tokens[:, place - 1]], tokens[:, place]
        )
    return tokens


def _loss_of_gpt(model: nn.Module, step: int, micro: int) -> Tensor:
    tokens = _tokens(step, micro)
    return model(tokens[:, :-1], tokens[:, 1:])


def trained(steps: int = 60) -> dict[str, Tensor]:
    """Weights of the GPT after so many steps in fp32."""
    torch.manual_seed(0)
    model = _gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    for step in range(steps):
        _loss_of_gpt(model, 10_000 + step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _gpt() -> nn.Module:
    return build(vocab=64, dim=DIM, layers=BLOCKS, heads=2, ffn=176, tied=True)


def in_gpt(weights: dict[str, Tensor], layer: str, micros: int) -> Bench:
    """The GPT with these weights."""
    model = _gpt()
    model.load_state_dict(weights)
    return Bench(model, layer, _loss_of_gpt, micros)


def measure() -> list[dict[str, Any]]:
    """Every fault, a row each, printed on the way."""
    rows: list[dict[str, Any]] = []
    for layer in PLACES:
        for micros in (1, 2):
            bench = linears(layer, micros)
            for duty in DUTIES if layer == PLACES[1] else ("every step",):
                rows += _faults(bench, "linears", duty, STEPS, micros, whole=True)
    weights = trained()
    for block in range(BLOCKS):
        for kind in KINDS:
            for micros in (1, 2):
                bench = in_gpt(weights, f"blocks.{block}.{kind}", micros)
                rows += _faults(bench, "gpt", "every step", GPT_STEPS, micros, whole=False)
    return rows


def measure_missed() -> list[dict[str, Any]]:
    """As `measure`, of MISSED in the second Linear."""
    bench = linears(PLACES[1], 1)
    return [
        row
        for duty in DUTIES
        for row in _faults(bench, "linears", duty, STEPS, 1, whole=True, families=MISSED)
    ]


HEALTHY = Family("input", lambda x, _, __: x, (0,), (0,))


def _faults(
    bench: Bench,
    model: str,
    duty: str,
    steps: int,
    micros: int,
    whole: bool,
    families: Mapping[str, Family] = FAMILIES,
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    chosen = {name: family for name, family in families.items() if family.micros == micros}
    for name, family in ({"none": HEALTHY} | chosen).items():
        for bits in family.strengths if whole else family.some:
            found = bench.run(family, bits, DUTIES[duty], steps)
            row = {
                "family": name,
                "bits": bits,
                "duty": duty,
                "model": model,
                "layer": bench.layer,
                "left": found.left,
            }
            rows.append(
                row
                | {
                    "others": found.others,
                    "harm": round(found.harm, 4),
                    "worst": round(found.worst, 4),
                }
            )
        told = " ".join(
            f"{row['left'] or '-'}/{row['harm']:.2f}" for row in rows if row["family"] == name
        )
        print(f"{model:<8}{bench.layer:<22}{duty:<11}{name:<36}{told}", flush=True)
    return rows
