"""`harness doctor --card`: whether a device computes and remembers what it should.

Three checks, each compared bit for bit:

products   matrices whose exact product is known (known_answers.py), in every precision and several shapes
memory     patterns that are written over a share of the free memory, and read back (memory_patterns.py)
soak       the same product again and again for some seconds, compared with its first result

Meanwhile the device is asked for clocks, throttling and memory errors (capability/readings.py). Every wrong answer is a
finding that says where it was, what came and what should have come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from harness.capability.readings import Readings, reading_findings
from harness.core.errors import Problem, shown
from harness.core.findings import Finding, refused
from harness.core.memory import size_text
from harness.measure.effort import Effort
from harness.measure.known_answers import KINDS, PRECISIONS, KnownProduct, Shape, known_product
from harness.measure.memory_patterns import CELL_BYTES, Pattern, patterns

Multiply = Callable[[], Tensor]

# Shapes of known products: square and flat, a single row, and odd ones, whose edges other code computes.
_SHAPES: tuple[Shape, ...] = ((128, 128, 128), (48, 512, 96), (1, 129, 17), (33, 47, 65))
# One that occupies every processor of a card.
_CARD_SHAPE: Shape = (2048, 2048, 2048)
# Bytes of a block, and what they are a multiple of: 64 cells.
_CARD_BLOCK, _BLOCK, _UNIT = 2**28, 2**22, 64 * CELL_BYTES
_SOAK_SIZE, _CARD_SOAK_SIZE = 192, 4096
# Products that are queued before their results are looked at. A card must not wait for the host in between.
_BATCH, _CARD_BATCH = 1, 16
# Share of the free memory, and seconds of the soak, unless the user says.
_SHARE, _CARD_SHARE = 0.002, 0.5
_SECONDS, _CARD_SECONDS = 5.0, 20.0
_WRONG_FIX = (
    "train nothing here: run it again, and if a wrong answer comes back, replace the device"
)


class CardDevice(Protocol):
    """What is checked.

    name: for people.
    place: where its tensors are.
    is_card: whether it is a GPU.
    multiple: k and n of FP8 products are multiples of this.
    """

    name: str
    place: torch.device
    is_card: bool
    multiple: int

    def lacks(self, precision: str) -> str:
        """Why it cannot multiply in `precision`; empty if it can."""
        ...

    def computes(self, precision: str) -> str:
        """What computes products in `precision`, for people."""
        ...

    def multiplication(self, precision: str, left: Tensor, right: Tensor) -> Multiply:
        """A function that multiplies `left` [m, k] by `right` [k, n] once; its result is on the device."""
        ...

    def free_memory(self) -> int:
        """Bytes that can be allocated now."""
        ...

    def write(self, block: Tensor, values: Tensor) -> None:
        """Write `values` into the cells `block`, both int64 on the device."""
        ...

    def read(self, block: Tensor) -> Tensor:
        """What the cells hold now."""
        ...

    def readings(self) -> Readings:
        """Clocks, temperature and memory errors now."""
        ...


@dataclass(frozen=True, slots=True)
class Wrong:
    """One wrong answer.

    check: "product", "memory" or "soak".
    where: which product, or which pattern.
    element: place in the result, or byte of the memory that was checked.
    got, expected: as text.
    count: how many elements of that result, or cells of that block, are wrong.
    """

    check: str
    where: str
    element: str
    got: str
    expected: str
    count: int

    def finding(self, device: str) -> Finding:
        """The wrong answer as an error of the machine."""
        codes = {
            "product": "machine.wrong_product",
            "memory": "machine.wrong_memory",
            "soak": "machine.unstable",
        }
        reasons = {
            "product": "the exact result is known, and every sound device gives it",
            "memory": "a cell holds something else than was written into it",
            "soak": "the same product gave another result before, bit for bit",
        }
        what = f"{self.element} is {self.got}, and must be {self.expected} ({self.count} wrong)"
        where = f"{device}: {self.where}"
        problem = Problem(what, where, reasons[self.check], _WRONG_FIX)
        (found,) = refused(codes[self.check], [problem])
        return found


@dataclass(slots=True)
class CardReport:
    """What was checked on one device, and what was found.

    device: its name.
    products: precision -> what computed it, and how many products were compared; or why it was not checked.
    memory_bytes, passes: how much memory was checked, and with how many patterns.
    soaked: precision -> products of the soak.
    soak_seconds: how long it took.
    before, loaded, after: what the device reported before, during and after the soak.
    wrong: every wrong answer; of a product or a pattern the first.
    findings: the same, with memory errors, throttling and odd clocks.
    """

    device: str
    products: dict[str, str] = field(default_factory=dict[str, str])
    memory_bytes: int = 0
    passes: int = 0
    soaked: dict[str, int] = field(default_factory=dict[str, int])
    soak_seconds: float = 0.0
    before: Readings = field(default_factory=Readings)
    loaded: list[Readings] = field(default_factory=list[Readings])
    after: Readings = field(default_factory=Readings)
    wrong: list[Wrong] = field(default_factory=list[Wrong])
    findings: list[Finding] = field(default_factory=list[Finding])

    def as_dict(self) -> dict[str, Any]:
        """For --json. The findings are in the list of all findings, and not here again."""
        found = asdict(self)
        del found["findings"]
        return found


def check_card(device: CardDevice, effort: Effort) -> CardReport:
    """Check `device`. A check that the device cannot finish is a finding, and the next one runs."""
    report = CardReport(device.name)
    report.before = device.readings()
    for check in (_check_products, _check_memory, _soak):
        try:
            check(device, effort, report)
        except (RuntimeError, MemoryError) as error:
            name = check.__name__.removeprefix("_")
            what = f"{name} did not finish: {_in_one_line(error)}"
            why = "a sound device with enough free memory finishes it"
            fix = "look at the kernel's log (dmesg) for errors of the device, and run it again"
            problem = Problem(what, device.name, why, fix)
            report.findings += refused("machine.card_fails", [problem])
    # Readings before and after show errors that the card counted meanwhile.
    report.after = device.readings()

    report.findings += [wrong.finding(device.name) for wrong in report.wrong]
    report.findings += reading_findings(device.name, report.before, report.loaded, report.after)
    return report


def _in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return shown(text[:300])


def _check_products(device: CardDevice, effort: Effort, report: CardReport) -> None:
    """Compare known products in every precision that the device has."""
    shapes = [*_SHAPES, _CARD_SHAPE] if device.is_card else _SHAPES
    for precision in PRECISIONS:
        if why := device.lacks(precision):
            report.products[precision] = f"not checked: {why}"
            continue
        count = 0
        for shape in shapes:
            for kind in KINDS:
                # Long sums of a large product would keep the host adding for minutes.
                if shape == _CARD_SHAPE and kind == "many":
                    continue
                fitting = _fitting(precision, shape, device)
                known = known_product(precision, kind, fitting)
                multiply = device.multiplication(precision, known.left, known.right)
                if wrong := compare(known, multiply()):
                    report.wrong.append(wrong)
                count += 1
        report.products[precision] = f"{count} products by {device.computes(precision)}"


def _fitting(precision: str, shape: Shape, device: CardDevice) -> Shape:
    """`shape`, with k and n rounded up to what FP8 units take."""
    if not precision.startswith("fp8"):
        return shape
    m, k, n = shape
    multiple = device.multiple
    return m, -(-k // multiple) * multiple, -(-n // multiple) * multiple


def compare(known: KnownProduct, result: Tensor) -> Wrong | None:
    """The first wrong element of `result`, which is to be `known.product`; None if all are right.

    0 and -0 count as equal: which one a sum of zeros gives is not defined.
    """
    if result.shape != known.product.shape:
        return _misshapen("product", known.text, result, known.product)
    # float64 holds every result exactly.
    got = result.detach().cpu().double()
    places = (got != known.product.double()).nonzero()
    if not len(places):
        return None
    row, column = places[0].tolist()
    return Wrong(
        "product",
        known.text,
        f"element [{row}, {column}]",
        f"{got[row, column].item():.17g}",
        f"{known.product[row, column].item()}",
        len(places),
    )


def _misshapen(check: str, where: str, result: Tensor, expected: Tensor) -> Wrong:
    got = f"{list(result.shape)}"
    wanted = f"{list(expected.shape)}"
    return Wrong(check, where, "the shape of the result", got, wanted, expected.numel())


def _check_memory(device: CardDevice, effort: Effort, report: CardReport) -> None:
    """Write every pattern over all blocks, and then read all blocks."""
    share = effort.share
    if share is None:
        share = _CARD_SHARE if device.is_card else _SHARE
    blocks = _blocks(device, share)
    cells = len(blocks[0])
    report.memory_bytes = len(blocks) * cells * CELL_BYTES
    for pattern in patterns():
        # All is written before anything is read: a cell that answers under two addresses has lost one of its values.
        expected = pattern.values(0, cells, device.place)
        for place, block in enumerate(blocks):
            if pattern.of_address:
                expected = pattern.values(place * cells, cells, device.place)
            device.write(block, expected)
        for place, block in enumerate(blocks):
            if pattern.of_address:
                expected = pattern.values(place * cells, cells, device.place)
            if wrong := _compare_cells(device.read(block), expected, pattern, place * cells):
                report.wrong.append(wrong)
        report.passes += 1


def _blocks(device: CardDevice, share: float) -> list[Tensor]:
    """Blocks of cells, int64 [cells], as many as make up `share` of the free memory; at least one."""
    wanted = int(device.free_memory() * share)
    # A block is a whole number of units, and one unit at least, also where less is wanted.
    largest = _CARD_BLOCK if device.is_card else _BLOCK
    units = wanted // _UNIT * _UNIT
    size = min(largest, max(units, _UNIT))
    shape = (size // CELL_BYTES,)
    count = max(1, wanted // size)
    return [torch.empty(shape, dtype=torch.int64, device=device.place) for _ in range(count)]


def _compare_cells(got: Tensor, expected: Tensor, pattern: Pattern, first: int) -> Wrong | None:
    """The first wrong cell of a block; None if all are right. first: number of the block's first cell."""
    if torch.equal(got, expected):
        return None
    differs = got != expected
    place = int(differs.nonzero()[0])
    name = pattern.name
    if pattern.turn:
        name += f", moved by {pattern.turn}"
    found = _bits(got[place])
    wanted = _bits(expected[place])
    cell = f"byte {(first + place) * CELL_BYTES}"
    return Wrong("memory", f"memory, pattern {name}", cell, found, wanted, int(differs.sum()))


def _bits(cell: Tensor) -> str:
    return f"{int(cell) & (2**64 - 1):#018x}"


@dataclass(slots=True)
class _Soaked:
    """One product of the soak: how to compute it, and its first result, on the device."""

    precision: str
    multiply: Multiply
    first: Tensor
    reported: bool = False


def _soak(device: CardDevice, effort: Effort, report: CardReport) -> None:
    """Compute the same products for `effort.seconds`, each in turn, and compare every result with the first."""
    seconds = effort.seconds
    if seconds is None:
        seconds = _CARD_SECONDS if device.is_card else _SECONDS
    if not seconds:
        return
    # The first product of each precision is what all later ones are compared with.
    products: list[_Soaked] = []
    for precision in PRECISIONS:
        if device.lacks(precision):
            continue
        left, right = _soak_operands(precision, device)
        multiply = device.multiplication(precision, left, right)
        products.append(_Soaked(precision, multiply, multiply()))
        report.soaked[precision] = 0

    # A thread asks for readings, so that products go on: a card ends a batch long before its tool has answered.
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(device.readings)
        began = time.monotonic()
        while True:
            # The time is looked at after whole rounds, so every product is repeated equally often.
            for product in products:
                _soak_batch(device, product, report)
            report.soak_seconds = time.monotonic() - began
            if not reading.done():
                continue
            report.loaded.append(reading.result())
            if report.soak_seconds >= seconds:
                return
            reading = thread.submit(device.readings)


def _soak_operands(precision: str, device: CardDevice) -> tuple[Tensor, Tensor]:
    """What is multiplied again and again, each [size, size].

    Normal random numbers load a card the most, and cuBLAS repeats its sums bit for bit. A processor's library may add
    up in another order when it gets other threads: it gets integers, whose sums are exact in any order.
    """
    if device.is_card:
        generator = torch.Generator().manual_seed(0)
        shape = (2, _CARD_SOAK_SIZE, _CARD_SOAK_SIZE)
        left, right = torch.randn(shape, generator=generator, device="cpu")
        return left, right
    known = known_product(precision, "wide", (_SOAK_SIZE, _SOAK_SIZE, _SOAK_SIZE))
    return known.left, known.right


def _soak_batch(device: CardDevice, product: _Soaked, report: CardReport) -> None:
    """Queue a batch of one product, then compare."""
    outcomes: list[Tensor] = []
    shape = product.first.shape
    for _ in range(_CARD_BATCH if device.is_card else _BATCH):
        result = product.multiply()
        report.soaked[product.precision] += 1
        if result.shape != shape:
            wrong = _misshapen("soak", product.precision, result, product.first)
            _report_once(report, product, wrong)
            continue
        # Compared as bits: a NaN is equal to itself, and -0 is not 0.
        differs = (_as_bits(result) != _as_bits(product.first)).flatten()
        place = differs.to(torch.uint8).argmax()
        got = result.flatten()[place].double()
        outcomes.append(torch.stack([differs.sum().double(), place.double(), got]))

    for outcome in outcomes:
        count, place, got = outcome.tolist()
        if count:
            row, column = divmod(int(place), shape[1])
            wrong = Wrong(
                "soak",
                f"{product.precision}, {list(shape)}, repeated",
                f"element [{row}, {column}]",
                f"{got:.17g}",
                f"{product.first[row, column].item():.17g}",
                int(count),
            )
            _report_once(report, product, wrong)


def _report_once(report: CardReport, product: _Soaked, wrong: Wrong) -> None:
    """Keep the first wrong answer of a product: others of the same kind say nothing new."""
    if not product.reported:
        product.reported = True
        report.wrong.append(wrong)


def _as_bits(values: Tensor) -> Tensor:
    bits = torch.int16 if values.element_size() == 2 else torch.int32
    return values.contiguous().view(bits)


def lines(report: CardReport) -> Sequence[str]:
    """The report as lines of text, without its findings."""
    found = [f"{report.device}"]
    for precision, text in report.products.items():
        found.append(f"  {precision:<9} {text}")
    memory = size_text(report.memory_bytes)
    found.append(f"  memory    {memory}, {report.passes} patterns written and read back")
    if report.soaked:
        repeated = [f"{count} in {name}" for name, count in report.soaked.items()]
        counts = ", ".join(repeated)
        found.append(f"  soak      {report.soak_seconds:.1f} s of the same products: {counts}")
    found.append(f"  readings  {_readings_text(report)}")
    found.append(f"  result    {_result(report)}")
    return found


def _result(report: CardReport) -> str:
    if report.wrong:
        return f"{len(report.wrong)} wrong answers"
    failed = any(finding.code == "machine.card_fails" for finding in report.findings)
    if failed:
        return "not all checks finished"
    return "every answer is right, bit for bit"


def _readings_text(report: CardReport) -> str:
    """The highest clock and temperature under load, and the memory errors."""
    parts: list[str] = []
    clocks = [each.sm_mhz for each in report.loaded if each.sm_mhz is not None]
    if clocks:
        parts.append(f"{min(clocks):.0f} to {max(clocks):.0f} MHz under load")
    degrees = [each.celsius for each in report.loaded if each.celsius is not None]
    if degrees:
        parts.append(f"up to {max(degrees):.0f} degrees Celsius")
    if report.after.uncorrected is not None:
        counts = f"{report.after.corrected or 0} corrected, {report.after.uncorrected} uncorrected"
        parts.append(f"memory errors: {counts}")
    return "; ".join(parts) or "the device reports no clocks and no memory errors"
