"""Which precision and compile mode to take, and why the others are slower. Pure functions of figures; torch-free.

The fastest median wins. Another candidate is as fast if each of both medians lies within the middle half of the other's
turns. Of these the first one is taken, in the order of the recipe's ladder, eager before compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from harness.core.spread import Spread, as_fast, spread_of

Status = Literal["measured", "not finite", "too slow", "failed", "cannot be built"]
COMPILED = ", compiled"
"""The end of the name of a candidate whose blocks are compiled."""
BITS = {"fp8": 8, "bf16": 16, "fp16": 16, "fp32": 32}
# A unit that is not this much faster does not pay for the casts to its precision.
_FASTER = 1.1
# Shares from which something decides.
_MOST, _SOME = 0.5, 0.2


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine reaches, measured.

    products: precision -> FLOP/s of one large product.
    bandwidth: bytes a second of a copy, read and written.
    launch_seconds: one eager operation that does next to nothing.
    """

    products: Mapping[str, float]
    bandwidth: float
    launch_seconds: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Work of one eager step, counted operation by operation.

    operations: kernels that are launched.
    products: matrix products among them.
    flops: of these.
    bytes: read and written by all operations, as if no cache kept anything.
    product_share: share of the step's predicted time in which arithmetic of products decides.
    memory_share: share in which memory decides.
    small_share: share of the products' FLOPs in products so small that casting their operands to FP8 takes longer than
        it could save; NaN where FP8 is no faster.
    linears, misaligned: Linear layers, and those whose sizes FP8 does not take; 0 where that does not matter.
    """

    operations: int
    products: int
    flops: float
    bytes: int
    product_share: float
    memory_share: float
    small_share: float
    linears: int = 0
    misaligned: int = 0


@dataclass(slots=True)
class Row:
    """One candidate and what was measured of it.

    name: `backend:precision`, with the recipe's name where several recipes compute it differently; ", compiled".
    recipe, precision, compiled: what to ask for to get it. recipe: a name, or the path that the config has.
    status: "measured", or why it cannot be taken.
    why: the reason for any other status.
    out_of_memory: whether that is that memory ran out.
    first_seconds: the first step, which compiles and allocates.
    steps: of one turn.
    seconds: of one step, one entry for each turn.
    peak_bytes: the most memory of one step with all that stays between steps; None if it is not known.
    loss: after the last step.
    skipped: updates that were skipped, of all steps.
    notes: what else the reader has to know.
    figures: of its eager form; None if they are not known.
    shadowed: whether this machine takes another rung of that recipe, so that the recipe has to be changed.
    """

    name: str
    recipe: str
    precision: str
    compiled: bool = False
    status: Status = "measured"
    why: str = ""
    out_of_memory: bool = False
    first_seconds: float | None = None
    steps: int = 1
    seconds: list[float] = field(default_factory=list[float])
    peak_bytes: int | None = None
    loss: float | None = None
    skipped: int = 0
    notes: list[str] = field(default_factory=list[str])
    figures: Figures | None = None
    shadowed: bool = False

    @property
    def eager_name(self) -> str:
        """The name without its compile mode."""
        return self.name.removesuffix(COMPILED)

    @property
    def spread(self) -> Spread:
        """Of its turns, in seconds a step."""
        return spread_of(self.seconds)

    def as_dict(self) -> dict[str, Any]:
        """For --json; NaN is null."""
        found = asdict(self)
        if self.seconds:
            for name, value in self.spread._asdict().items():
                found[f"{name}_seconds"] = value
        # JSON has no NaN, which alone is not equal to itself.
        figures = self.figures
        if figures is not None and figures.small_share != figures.small_share:
            found["figures"]["small_share"] = None
        return found


class Choice(NamedTuple):
    """What to take. fastest: the least median. tied: as fast as it, in the order of the ladder, with itself."""

    taken: Row
    fastest: Row
    tied: list[Row]


def choose(rows: Sequence[Row]) -> Choice | None:
    """What to take of `rows`, which are in the order of the ladder; None if none was measured."""
    measured = [row for row in rows if row.status == "measured" and row.seconds]
    if not measured:
        return None
    fastest = min(measured, key=lambda row: row.spread.median)
    tied = [row for row in measured if as_fast(row.spread, fastest.spread)]
    return Choice(tied[0], fastest, tied)


class Reason(NamedTuple):
    """Why a candidate is slower. word: such as "memory-bound". text: the figures that show it."""

    word: str
    text: str


def reason(row: Row, winner: Row, machine: Machine) -> Reason:
    """Why `row` is slower than `winner`, as far as counted work and measured rates show it."""
    if row.figures is None or winner.figures is None:
        return Reason("unknown", "the work of a step could not be counted")
    mine = BITS[row.precision]
    best = BITS[winner.precision]

    # The first cause that the figures show is the answer.
    rate = _rate(machine, row.precision)
    slower = rate * _FASTER <= _rate(machine, winner.precision)
    if mine < best:
        return _fewer_bits(row, winner, winner.figures, machine)
    if slower and row.figures.product_share >= _SOME:
        share = f"{row.figures.product_share:.0%} of its time is arithmetic of products"
        return Reason("GEMM-bound", f"{share}: {_rates_text(row, winner, machine)}")
    if mine > best:
        moved = f"it moves {_bytes(row.figures.bytes)} a step"
        return Reason("memory-bound", f"{moved}; {_memory_text(row.figures)}")
    if row.eager_name != winner.eager_name:
        return _other_code(row.figures, winner.figures)
    if row.compiled:
        return _compiled_in_vain(winner, winner.figures, machine)
    return _eager(row, row.figures, machine)


def _rate(machine: Machine, precision: str) -> float:
    return machine.products.get(precision, 0.0)


def _rates_text(row: Row, winner: Row, machine: Machine) -> str:
    mine = _rate(machine, row.precision)
    other = _rate(machine, winner.precision)
    return f"{_flops(mine)} in {row.precision}, {_flops(other)} in {winner.precision}"


def _fewer_bits(row: Row, winner: Row, figures: Figures, machine: Machine) -> Reason:
    """Why fewer bits did not pay. figures: the winner's, whose products would have become faster."""
    mine = _rate(machine, row.precision)
    other = _rate(machine, winner.precision)
    rates = _rates_text(row, winner, machine)
    # Causes from the most to the least certain.
    if mine <= other * _FASTER:
        return Reason("emulated", f"this machine multiplies no faster in it: {rates}")
    if row.figures is not None and row.figures.misaligned >= row.figures.linears * _SOME > 0:
        count = f"{row.figures.misaligned} of {row.figures.linears} Linear layers"
        return Reason("misaligned", f"{count} have sizes that FP8 does not take, and stay in bf16")
    if (launches := _launch_share(winner, figures, machine)) >= _MOST:
        return Reason("launch-bound", _launch_text(figures, machine, launches))
    if figures.small_share >= _MOST:
        share = f"{figures.small_share:.0%} of the FLOPs"
        why = f"{share} are in products whose casts cost more than FP8 saves"
        return Reason("small GEMMs", why)
    if figures.memory_share >= _MOST:
        return Reason("memory-bound", _memory_text(figures))
    return Reason("casts", f"they cost more than faster products save: {rates}")


def _other_code(mine: Figures, best: Figures) -> Reason:
    text = (
        f"{mine.operations:,} operations that move {_bytes(mine.bytes)}, "
        f"against {best.operations:,} and {_bytes(best.bytes)}"
    )
    word = "more work" if mine.bytes > best.bytes else "slower kernels"
    return Reason(word, text)


def _compiled_in_vain(winner: Row, figures: Figures, machine: Machine) -> Reason:
    """Why compiling made nothing faster. winner: the eager form."""
    if figures.product_share >= _MOST:
        share = f"{figures.product_share:.0%} of the time is arithmetic of products"
        return Reason("GEMM-bound", f"{share}, which compiling leaves as they are")
    launches = _launch_share(winner, figures, machine)
    return Reason(
        "overhead",
        f"calling compiled code costs more than fusing saves: {_memory_text(figures)}, "
        f"launches {launches:.0%} of the eager step",
    )


def _eager(row: Row, figures: Figures, machine: Machine) -> Reason:
    """Why the eager form is slower than the compiled one."""
    if (launches := _launch_share(row, figures, machine)) >= _SOME:
        return Reason("launch-bound", _launch_text(figures, machine, launches))
    return Reason("memory-bound", f"{_memory_text(figures)}; compiled code fuses operations")


def _launch_share(row: Row, figures: Figures, machine: Machine) -> float:
    """Share of a measured step that its launches take."""
    # Launches were timed apart from the step, so their sum may come out longer than it.
    launches = figures.operations * machine.launch_seconds
    return min(1.0, launches / row.spread.median)


def _launch_text(figures: Figures, machine: Machine, share: float) -> str:
    each = f"{machine.launch_seconds * 1e6:.1f} us"
    return f"{figures.operations:,} operations of at least {each} are {share:.0%} of the step"


def _memory_text(figures: Figures) -> str:
    each_byte = figures.flops / max(figures.bytes, 1)
    return f"memory decides {figures.memory_share:.0%} of the time, {each_byte:.0f} FLOPs a byte"


def _flops(rate: float) -> str:
    if rate >= 1e12:
        return f"{rate / 1e12:.3g} TFLOP/s"
    return f"{rate / 1e9:.3g} GFLOP/s"


def _bytes(count: int) -> str:
    if count >= 2**30:
        return f"{count / 2**30:.2f} GiB"
    return f"{count / 2**20:.1f} MiB"
