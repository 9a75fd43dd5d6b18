"""`harness doctor --card`: known answers, and that each fault of a device is found and named."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.capability.readings import Readings, processor_readings, reading_findings
from harness.core.errors import ConfigError, ExitCode
from harness.core.findings import exit_code
from harness.measure import card_check, card_device
from harness.measure.card_check import CardReport, Wrong, check_card
from harness.measure.card_device import TorchDevice
from harness.measure.effort import Effort, check_effort
from harness.measure.known_answers import KINDS, PRECISIONS, known_product
from harness.measure.memory_patterns import patterns
from harness.tools.doctor import command

HERE = torch.device("cpu")
# A few hundred KiB of memory, and a soak of one round.
LITTLE = Effort(share=1e-5, seconds=1e-6)
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.bfloat16,
    "fp8_e5m2": torch.bfloat16,
}


@pytest.fixture(autouse=True)
def known_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each known product is computed once for all tests."""
    monkeypatch.setattr(card_check, "known_product", _KNOWN)


_KNOWN = cache(known_product)


class FaultyDevice(TorchDevice):
    """The processor, with one fault.

    precision: whose products are wrong.
    product: what becomes of the results of a product, by the number of the call.
    stuck: the cell of memory whose bit `bit` is always 1.
    alias: two numbers of cells that are one cell.
    clocks: what the readings are.
    """

    def __init__(
        self,
        precision: str = "",
        product: Callable[[Tensor, int], Tensor] | None = None,
        stuck: int | None = None,
        bit: int = 0,
        alias: tuple[int, int] | None = None,
        clocks: Readings | None = None,
    ) -> None:
        super().__init__(HERE, "processor")
        self._precision, self._product = precision, product
        self._stuck, self._bit, self._alias, self._clocks = stuck, bit, alias, clocks
        self.calls = 0

    def multiplication(self, precision: str, left: Tensor, right: Tensor) -> Callable[[], Tensor]:
        sound = super().multiplication(precision, left, right)

        def multiply() -> Tensor:
            result = sound()
            if precision != self._precision or self._product is None:
                return result
            self.calls += 1
            return self._product(result, self.calls)

        return multiply

    def write(self, block: Tensor, values: Tensor) -> None:
        super().write(block, values)
        if self._alias is not None:
            one, other = self._alias
            block[one] = values[other]

    def read(self, block: Tensor) -> Tensor:
        if self._stuck is None:
            return super().read(block)
        cells = block.clone()
        cells[self._stuck] |= torch.ones((), dtype=torch.int64) << self._bit
        return cells

    def readings(self) -> Readings:
        return self._clocks or super().readings()


def flipped(result: Tensor, row: int, column: int) -> Tensor:
    """`result` with the lowest bit of one element flipped."""
    words = result.clone().view(torch.int16 if result.element_size() == 2 else torch.int32)
    words[row, column] ^= 1
    return words.view(result.dtype)


def only(report: CardReport) -> Wrong:
    (wrong,) = report.wrong
    return wrong


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_known_answers_are_those_of_integer_arithmetic(precision: str, kind: str) -> None:
    known = known_product(precision, kind, (5, 19, 7))
    left, right = known.left.tolist(), known.right.tolist()
    for row in range(5):
        for column in range(7):
            terms = [left[row][each] * right[each][column] for each in range(19)]
            assert known.product[row, column].item() == sum(terms)
            # In whatever order they are added, each sum on the way is exact.
            size = sum(map(abs, terms))
            assert size <= PRECISIONS[precision].total or sum(map(bool, terms)) <= 1
    exact = known.product.to(DTYPES[precision]).double()
    assert torch.equal(exact, known.product.double()), "the product is not exact in the result"
    assert known.product.any()


def test_operands_are_exact_in_their_precision() -> None:
    held = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    for precision in ("bf16", "fp16", *held):
        dtype = held.get(precision, DTYPES[precision])
        other = torch.float8_e4m3fn if precision in held else dtype
        for kind in KINDS:
            known = known_product(precision, kind, (16, 64, 16))
            assert torch.equal(known.left.float().to(dtype).double(), known.left.double())
            assert torch.equal(known.right.float().to(other).double(), known.right.double())


def test_digits_use_every_bit_of_the_significand() -> None:
    for precision, exact in PRECISIONS.items():
        left = known_product(precision, "digits", (32, 32, 8)).left.abs()
        for bit in range(exact.bits):
            assert ((left >> bit) & 1).any(), (precision, bit)


@pytest.fixture
def set_by_a_script() -> Iterator[None]:
    """TF32 by torch's newer settings, which the older ones then refuse to read; a model's file may do so."""
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    yield
    matmul.fp32_precision = before


@pytest.mark.usefixtures("set_by_a_script")
def test_a_precision_that_a_script_has_set_fails_no_device_and_stays() -> None:
    report = check_card(TorchDevice(HERE, "processor"), LITTLE)
    assert [each.code for each in report.findings] == []
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_a_sound_device_has_no_finding() -> None:
    report = check_card(TorchDevice(HERE, "processor"), LITTLE)
    assert report.wrong == []
    # A machine may have counted memory errors of its own.
    assert exit_code([each for each in report.findings if each.code != "machine.ecc"]) == 0
    assert report.passes == len(list(patterns()))
    checked = {name for name, text in report.products.items() if "products by" in text}
    assert checked == set(PRECISIONS) - {"tf32"}
    assert report.products["tf32"].startswith("not checked")
    assert all(count for count in report.soaked.values())


@pytest.mark.parametrize("precision", [each for each in PRECISIONS if each != "tf32"])
def test_one_flipped_bit_of_a_product_is_found_and_named(precision: str) -> None:
    sound = TorchDevice(HERE, "processor")
    known = known_product(precision, "wide", (48, 512, 96))
    true = known.product[3, 5].item()

    def once(result: Tensor, call: int) -> Tensor:
        # Shapes and kinds come in a fixed order: the second shape's second kind is the fifth product.
        return flipped(result, 3, 5) if call == 5 else result

    report = check_card(FaultyDevice(precision, once), LITTLE)
    wrong = only(report)
    assert (wrong.check, wrong.count) == ("product", 1)
    assert wrong.where == f"{precision}, [48, 512] x [512, 96], wide"
    assert wrong.element == "element [3, 5]"
    assert wrong.expected == str(true)
    result = sound.multiplication(precision, known.left, known.right)()
    assert float(wrong.got) == flipped(result, 3, 5)[3, 5].item() != true
    (finding,) = [each for each in report.findings if each.code == "machine.wrong_product"]
    assert wrong.where in finding.where
    assert wrong.element in finding.what
    assert exit_code(report.findings) is ExitCode.MACHINE


@pytest.mark.parametrize(
    ("lost", "element", "got"),
    [
        (lambda result: torch.zeros_like(result), "element [", "0"),
        (lambda result: result * float("nan"), "element [0, 0]", "nan"),
        (lambda result: result[:-1], "the shape of the result", "[127, 128]"),
    ],
)
def test_a_result_that_is_lost_is_found(
    lost: Callable[[Tensor], Tensor], element: str, got: str
) -> None:
    report = check_card(
        FaultyDevice("fp16", lambda result, call: lost(result) if call == 1 else result), LITTLE
    )
    wrong = only(report)
    assert wrong.element.startswith(element)
    assert wrong.got == got
    assert wrong.where.startswith("fp16, [128, 128]")


def test_a_row_that_is_not_written_is_found() -> None:
    def stale(result: Tensor, call: int) -> Tensor:
        if call == 2:
            result = result.clone()
            result[7] = result[8]
        return result

    wrong = only(check_card(FaultyDevice("fp32", stale), LITTLE))
    assert wrong.element.startswith("element [7, ")
    assert wrong.count > 1


@pytest.mark.parametrize("bit", [0, 21, 63])
def test_a_stuck_bit_is_found_with_its_byte_and_its_bit(bit: int) -> None:
    report = check_card(FaultyDevice(stuck=130, bit=bit), LITTLE)
    assert {wrong.check for wrong in report.wrong} == {"memory"}
    names = {wrong.where for wrong in report.wrong}
    assert "memory, pattern zeros" in names
    assert "memory, pattern ones" not in names, "a bit that is stuck at 1 is right there"
    for wrong in report.wrong:
        assert wrong.element == f"byte {130 * 8}"
        assert int(wrong.got, 16) ^ int(wrong.expected, 16) == 1 << bit
    assert exit_code(report.findings) is ExitCode.MACHINE


def test_cells_that_answer_under_two_addresses_are_found() -> None:
    report = check_card(FaultyDevice(alias=(64, 128)), LITTLE)
    # 64 cells apart, every other pattern has the same value in both.
    assert {wrong.where for wrong in report.wrong} == {
        "memory, pattern address",
        "memory, pattern inverted address",
    }
    assert only_address(report) == (f"{64:#018x}", f"{128:#018x}")


def only_address(report: CardReport) -> tuple[str, str]:
    (wrong,) = [each for each in report.wrong if each.where.endswith("pattern address")]
    return wrong.expected, wrong.got


def test_a_product_that_changes_while_it_is_repeated_is_found() -> None:
    known = 12

    def late(result: Tensor, call: int) -> Tensor:
        # The first result of the soak is the one after the known products.
        return flipped(result, 10, 20) if call == known + 2 else result

    report = check_card(FaultyDevice("bf16", late), LITTLE)
    wrong = only(report)
    assert (wrong.check, wrong.element, wrong.count) == ("soak", "element [10, 20]", 1)
    assert wrong.where.startswith("bf16")
    assert [each.code for each in report.findings if each.severity == "error"] == [
        "machine.unstable"
    ]


class SlowToAnswer(FaultyDevice):
    """Its first readings under load come only after further products. went_on: whether these came."""

    def __init__(self) -> None:
        super().__init__("bf16", self._count)
        self.asked = self.wanted = 0
        self.went_on: list[bool] = []
        self._enough = threading.Event()

    def _count(self, result: Tensor, call: int) -> Tensor:
        if self.wanted and call >= self.wanted:
            self._enough.set()
        return result

    def readings(self) -> Readings:
        self.asked += 1
        # The first ones are from before the checks.
        if self.asked == 2:
            self.wanted = self.calls + 4
            self.went_on.append(self._enough.wait(20.0))
        return FAST


def test_a_device_is_loaded_while_it_is_asked_for_its_clocks() -> None:
    """nvidia-smi takes far longer than a batch: a card that waited for it would be idle for most of the soak."""
    device = SlowToAnswer()
    report = check_card(device, LITTLE)
    assert device.went_on == [True]
    assert report.soaked["bf16"] >= 4
    assert report.loaded == [FAST]


def test_a_check_that_fails_is_a_finding_and_the_others_run() -> None:
    def dies(result: Tensor, call: int) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access\x1b[2J was encountered")

    report = check_card(FaultyDevice("fp32", dies), LITTLE)
    assert report.passes == len(list(patterns()))
    texts = [each.what for each in report.findings if each.code == "machine.card_fails"]
    assert len(texts) == 2, "the products and the soak"
    assert "illegal memory access" in texts[0]
    assert "\x1b" not in texts[0]
    assert exit_code(report.findings) is ExitCode.MACHINE


FAST = Readings(1900, 1980, 2600, 60, 600, 0, 0, 0)


@pytest.mark.parametrize(
    ("loaded", "after", "codes"),
    [
        (FAST, FAST, []),
        (Readings(), Readings(), []),
        (Readings(300, 1980, reasons=0), FAST, ["machine.slow_clock"]),
        (Readings(300, 1980, reasons=0x04), FAST, []),
        (Readings(19800, 1980, reasons=0), FAST, ["machine.slow_clock"]),
        (Readings(1900, 1980, celsius=92, reasons=0x40), FAST, ["machine.throttled"]),
        (FAST, Readings(corrected=3, uncorrected=0), ["machine.ecc"]),
        (FAST, Readings(corrected=0, uncorrected=1), ["machine.ecc"]),
    ],
)
def test_readings_become_findings(loaded: Readings, after: Readings, codes: list[str]) -> None:
    found = reading_findings("gpu 0", Readings(corrected=0, uncorrected=0), [loaded], after)
    assert [each.code for each in found] == codes
    lost = bool(after.uncorrected)
    assert exit_code(found) is (ExitCode.MACHINE if lost else ExitCode.DONE)


def test_a_wrong_clock_of_a_device_is_found() -> None:
    report = check_card(FaultyDevice(clocks=Readings(210, 1980, reasons=0)), LITTLE)
    assert [each.code for each in report.findings] == ["machine.slow_clock"]
    assert "210 MHz under load, of 1980 MHz" in report.findings[0].what


def test_a_heavily_loaded_card_is_judged_by_its_best_clock() -> None:
    idle_then_busy = [Readings(210, 1980, reasons=1), Readings(1700, 1980, reasons=0)]
    assert reading_findings("gpu 0", Readings(), idle_then_busy, Readings()) == []


def test_memory_errors_of_a_processor_are_those_that_linux_counts(tmp_path: Path) -> None:
    assert processor_readings(tmp_path) == Readings()
    for number, count in enumerate((2, 3)):
        controller = tmp_path / f"mc{number}"
        controller.mkdir()
        (controller / "ce_count").write_text(f"{count}\n")
        (controller / "ue_count").write_text("no number")
    assert processor_readings(tmp_path) == Readings(corrected=5)


@pytest.mark.parametrize(
    "effort", [Effort(0.0), Effort(1.5), Effort(float("nan")), Effort(None, -1.0), Effort(None, float("inf"))]
)  # fmt: skip
def test_an_effort_that_cannot_be_meant_is_refused(effort: Effort) -> None:
    with pytest.raises(ConfigError, match=r"--memory-share|--soak"):
        check_effort(effort)


def test_the_report_is_json_and_text() -> None:
    report = check_card(FaultyDevice("fp32", lambda result, call: result + 1), LITTLE)
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False))["wrong"]
    text = "\n".join(card_check.lines(report))
    assert "wrong answers" in text
    assert "not checked: a processor has no TF32" in text


def test_doctor_checks_the_processor_where_there_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words: dict[str, Any] = {"card": True, "memory_share": 1e-5, "soak": 0.0}
    code = command(None, None, None, True, **words)
    found = json.loads(capsys.readouterr().out)
    assert (code, found["exit_code"]) == (0, 0)
    (report,) = found["card"]
    assert report["device"] == "processor"
    assert report["wrong"] == []
    assert list(tmp_path.iterdir()) == []

    command(None, None, None, False, **words)
    text = capsys.readouterr().out
    assert "only the processor was checked" in text
    assert "every answer is right, bit for bit" in text


def test_doctor_ends_with_exit_code_4_for_a_wrong_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    faulty = FaultyDevice("bf16", lambda result, call: flipped(result, 0, 0))
    monkeypatch.setattr(card_device, "devices_here", lambda facts: [faulty])
    code = command(None, None, None, True, card=True, memory_share=1e-5, soak=0.0)
    found = json.loads(capsys.readouterr().out)
    assert (code, found["exit_code"]) == (4, 4)
    assert {each["code"] for each in found["findings"]} == {"machine.wrong_product"}
    assert {each["precision"] for each in found["decision"]}, (
        "what doctor prints otherwise is there"
    )


def test_options_of_the_check_need_it() -> None:
    with pytest.raises(ConfigError, match="--soak belongs to --card"):
        command(None, None, None, False, soak=1.0)
