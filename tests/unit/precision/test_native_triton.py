"""The fused kernel without a GPU: interpreted, bit for bit the torch path; and compiled ahead for its cards."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.precision import scaling
from harness.precision.backends import native_triton
from tests.support.matrix import rest_slow

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
FORMATS = ("e4m3", "e5m2")
REGISTERS = 42
"""A thread may have this many for six blocks of 256 threads to share a multiprocessor's 65,536."""

needs_triton = pytest.mark.skipif(native_triton.triton is None, reason="triton is not installed")


def interpreted(code: str) -> str:
    """Output of `code` where triton interprets, which it decides at its import: a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_triton
@pytest.mark.slow
def test_the_interpreted_kernel_has_the_bits_of_torch() -> None:
    """Every bfloat16 value and others, both formats, several scales, odd shapes: what a GPU is asked, too."""
    code = "import torch; from harness.precision.backends import native_triton as n; "
    code += "print(n.check(torch.device('cpu')))"
    assert interpreted(code) == "[]"


@pytest.mark.slow
@needs_triton
def test_the_interpreted_transpose_has_the_bytes_of_torch() -> None:
    code = "import torch; from harness.precision.backends import native_triton as n; "
    code += "print(n.check_turn(torch.device('cpu')))"
    assert interpreted(code) == "[]"


@needs_triton
@pytest.mark.nightly
def test_the_interpreted_statistics_are_those_of_torch() -> None:
    code = "import torch; from harness.precision.backends import native_triton as n\n"
    code += "print(n.check_stats(torch.device('cpu')))"
    assert interpreted(code) == "[]"


@needs_triton
@pytest.mark.nightly
def test_the_statistics_are_right_of_tensors_in_any_layout() -> None:
    """A Conv1D's weight is a transposed view, and the gradient of a sum is one number, expanded.

    The kernels once read both as if they were rows: other numbers, or memory of somebody else. The scale 0 is that of
    an infinite amax.
    """
    assert interpreted(OTHER_LAYOUTS).split() == ["True"] * 12


OTHER_LAYOUTS = """
import torch
from harness.precision import scaling
from harness.precision.backends import native_triton as native

x = torch.randn(48, 40, generator=torch.manual_seed(0))
by_row = torch.linspace(10, 100, 40)[:, None]
for values in (x.t(), x[:1, :1].expand(40, 48), x[:40, ::2], x.bfloat16().t()):
    for scale in (torch.tensor(100.0), by_row, torch.tensor(0.0)):
        parts = torch.ops.hopper_harness.fp8_cast_sums(values, scale, "e4m3", True)
        expected = scaling.cast_stats(values, scale, "e4m3", True)
        print(torch.allclose(parts.sum(0), expected[0], rtol=1e-9, equal_nan=True))
"""


@needs_triton
@pytest.mark.nightly
def test_the_check_finds_statistics_that_are_wrong() -> None:
    """With each number of the kernel's replaced: the largest value, the smallest exponent, the rounding, the scale."""
    assert interpreted(OTHER_STATS).splitlines() == [f"{place} True" for place in (5, 6, 7, 8)]


OTHER_STATS = """
import torch
from harness.precision.backends import native_triton as native

kernel = native._stats_kernel

class Other:
    def __init__(self, place, value):
        self.place, self.value = place, value
    def __getitem__(self, grid):
        def launch(*args, **options):
            args = list(args)
            args[self.place] = self.value
            kernel[grid](*args, **options)
        return launch

for place, value in ((5, 0), (6, 1e30), (7, 2.0**-3), (8, 1.5 * 2.0**10)):
    native._stats_kernel = Other(place, value)
    print(place, len(native.check_stats(torch.device("cpu"))) > 0)
"""

ALTERED = """
import torch
from harness.precision import scaling
from harness.precision.backends import native_triton as native

kernel = native._kernel
scaling.FORMATS = {"e5m2": scaling.E5M2}  # half the time

class Altered:
    def __init__(self, **changes):
        self.changes = changes
    def __getitem__(self, grid):
        return lambda *args, **options: kernel[grid](*args, **{**options, **self.changes})

for changes in (dict(LIMIT=1e30), dict(SMALLEST=2.0**-13), dict(MAGIC=1.5 * 2.0**20), dict(NAN=0),
                dict(THROUGH_BF16=False), dict(RECORD=False)):
    native._kernel = Altered(**changes)
    print(*changes, len(native.check(torch.device("cpu"))) > 0)
"""


@needs_triton
@pytest.mark.nightly
def test_the_check_finds_a_kernel_that_is_wrong() -> None:
    assert interpreted(ALTERED).splitlines() == [
        f"{name} True" for name in ("LIMIT", "SMALLEST", "MAGIC", "NAN", "THROUGH_BF16", "RECORD")
    ]


@pytest.mark.slow
@needs_triton
def test_the_interpreted_operator_records_and_fills_up(tmp_path: Path) -> None:
    """Through the registered operator: the caller's amax is raised, 5 rows are 16 columns of the transpose."""
    code = """
import torch
from harness.precision.backends import native_triton
x, scale, amax = torch.randn(5, 32, generator=torch.manual_seed(0)), torch.tensor([50.0]), torch.tensor([2.0])
x[3, 3] = float("nan")
rows, columns = torch.ops.hopper_harness.fp8_quantize(x, scale, amax, "e4m3", True, True)
expected = x.bfloat16().nan_to_num(0.0).abs().max().float()
print(columns.shape == (32, 16), not columns[:, 5:].float().any(), amax.item() == max(2.0, expected.item()))
print(torch.equal(rows.view(torch.uint8), columns[:, :5].t().contiguous().view(torch.uint8)))
none = torch.ops.hopper_harness.fp8_quantize(x, scale, None, "e5m2", False, False)
print(none[0].dtype == torch.float8_e5m2, none[1].shape == (0,))
"""
    assert interpreted(code).split() == ["True"] * 6


@pytest.mark.parametrize("rows", [0, 1, 16, 20])
@pytest.mark.parametrize("transpose", [False, True])
def test_the_fake_operator_promises_what_torch_makes(rows: int, transpose: bool) -> None:
    x, scale = torch.randn(rows, 32), torch.ones(1)
    for fmt in FORMATS:
        real = native_triton.quantize_pair(
            x, scale, None, fmt, through_bf16=True, transpose=transpose
        )
        with torch._subclasses.FakeTensorMode() as mode:
            fakes = [mode.from_tensor(tensor) for tensor in (x, scale)]
            fake = torch.ops.hopper_harness.fp8_quantize(*fakes, None, fmt, True, transpose)
        for made, promised in zip(real, fake, strict=True):
            assert (made.shape, made.dtype) == (promised.shape, promised.dtype)
            assert promised.is_contiguous() == made.is_contiguous()


def test_where_the_kernel_cannot_run_torch_casts_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert native_triton.load(CPU) == (native_triton.quantize_pair, "FP8 casts in PyTorch: no GPU")
    assert not caplog.records
    gpu = torch.device("cuda", 0)

    def reason() -> str:
        caplog.clear()
        cast, note = native_triton.load(gpu)
        assert cast is native_triton.quantize_pair
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert note.removeprefix("FP8 casts in PyTorch: ") in caplog.text
        return note

    if native_triton.triton is not None:
        monkeypatch.setattr(
            torch, "empty", lambda *_, **__: None
        )  # there is nothing to allocate on
        if not torch.cuda.is_available():
            assert "the fused kernel failed: " in reason()
        monkeypatch.setattr(native_triton, "check", lambda *_, **__: ["bytes of something"])
        assert "the fused kernel differs: bytes of something" in reason()
    monkeypatch.setattr(native_triton, "triton", None)
    assert "triton is not installed" in reason()


def test_statistics_that_fall_back_are_in_the_backends_note(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For days every card measured in PyTorch, at three times a step's time, and only a log line said so."""
    monkeypatch.setattr(
        native_triton,
        "_unusable",
        lambda device, check: "it does not compile" if device.type == "cuda" else "",
    )
    assert native_triton.load_stats(CPU) == (scaling.cast_stats, "")
    measure, note = native_triton.load_stats(torch.device("cuda", 0))
    assert measure is scaling.cast_stats
    assert note == "; FP8 statistics in PyTorch: it does not compile"
    assert "it does not compile" in caplog.text


def test_the_reference_is_on_the_cpu_whatever_the_default_device() -> None:
    """`torch.set_default_device("cuda")` once made every check fail, and casts slow."""
    with torch.device("meta"):
        reason = native_triton._unusable(CPU, lambda: [torch.tensor(1.0).device.type])
    triton_here = native_triton.triton is not None
    assert reason == ("the fused kernel differs: cpu" if triton_here else "triton is not installed")


def cast_source(dtype: str, fmt: str) -> Any:
    """The kernel that casts, as the launcher specialises it."""
    from triton.compiler import ASTSource

    pointer = {"e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}[fmt]
    names: list[str] = native_triton._kernel.arg_names
    kinds = ["*" + dtype, "*fp32", "*fp32", pointer, pointer, "i32", "i32", "i32"]
    constants = native_triton.constants(fmt) | {
        "RECORD": True,
        "TRANSPOSE": True,
        "THROUGH_BF16": dtype == "fp32",
    }
    signature = dict(zip(names, kinds, strict=False)) | dict.fromkeys(constants, "constexpr")
    return ASTSource(native_triton._kernel, signature, constants, multiples(0, 3, 4, 5, 6, 7))


def turn_source() -> Any:
    """The kernel that transposes, as the launcher specialises it."""
    from triton.compiler import ASTSource

    constants = {"ROWS": native_triton.ROWS, "COLS": native_triton.COLS}
    kinds = ["*u8", "*u8", "i32", "i32", "i32"]
    signature = dict(zip(native_triton._turn_kernel.arg_names, kinds, strict=False))
    signature |= dict.fromkeys(constants, "constexpr")
    return ASTSource(native_triton._turn_kernel, signature, constants, multiples(0, 1, 2, 3, 4))


def stats_source(kernel: str, dtype: str) -> Any:
    """A kernel behind the statistics of a sampled step, as the launcher specialises it."""
    from triton.compiler import ASTSource

    made = getattr(native_triton, kernel)
    constants: dict[str, float]
    if kernel == "_stats_kernel":
        # columns, step, scale_step
        integers = ["i32"] * 3
        constants = {"BY_ROW": True, "STRETCH": native_triton.STRETCH}
    else:
        # rows, count, gap, columns, step, scale_step
        integers = ["i32"] * 6
        constants = {
            "IN_BF16": scaling.IN_BF16,
            "TOGETHER": scaling.ROWS_TOGETHER,
            "CHANNELS": native_triton.CHANNELS,
            "DEPTH": native_triton.DEPTH,
        }
    constants["SUMS"] = scaling.SUMS
    # x, scale, sums; LIMIT, SMALLEST, MAGIC
    kinds = ["*" + dtype, "*fp32", "*fp64", *integers, *["fp32"] * 3]
    signature = dict(zip(made.arg_names, kinds, strict=False))
    signature |= dict.fromkeys(constants, "constexpr")
    return ASTSource(made, signature, constants, multiples(0, 1, 2))


def multiples(*places: int) -> dict[tuple[int], Any]:
    """Which arguments are multiples of 16, as addresses, rows and columns usually are."""
    return {(place,): [["tt.divisibility", 16]] for place in places}


def compiled(source: Any, arch: int, folder: Path) -> tuple[str, int, int]:
    """PTX, registers and bytes of local memory (spills) of a kernel as a GPU of `arch` would run it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile

    made: Any = compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": native_triton.WARPS}
    )
    cubin = folder / f"{arch}.cubin"
    cubin.write_bytes(made.asm["cubin"])
    tool = Path(native_triton.triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    told = subprocess.run(
        [tool, "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    registers, local = re.search(r"REG:(\d+)", told), re.search(r"LOCAL:(\d+)", told)
    stack = re.search(r"STACK:(\d+)", told)
    assert registers is not None
    assert local is not None
    assert stack is not None
    return made.asm["ptx"], int(registers[1]), int(local[1]) + int(stack[1])


@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="triton's assembler is for Linux")
@pytest.mark.parametrize("arch", rest_slow([89, 90, 100], 90))
@pytest.mark.parametrize(("dtype", "fmt"), [("bf16", "e4m3"), ("bf16", "e5m2"), ("fp32", "e4m3")])
def test_it_compiles_ahead_without_spills(
    arch: int, dtype: str, fmt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    ptx, registers, spilled = compiled(cast_source(dtype, fmt), arch, tmp_path)
    assert registers <= REGISTERS
    assert spilled == 0
    starts_from = "f16x2" if arch == 89 else "f32"
    assert re.search(rf"cvt\.rn\.satfinite\.{fmt}x2\.{starts_from}", ptx), (
        "the FP8 units' own conversion"
    )
    assert re.search(r"(atom|red)\.\S*max\.s32", ptx), "amax by integer maximum"
    assert ".ftz" not in ptx, "denormal values are values"
    assert re.search(r"ld\.global\S*\.v[24]", ptx), "several elements a load"


@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="triton's assembler is for Linux")
@pytest.mark.parametrize("arch", [89, 90, 100])
def test_the_transpose_compiles_ahead_without_spills(
    arch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    ptx, registers, spilled = compiled(turn_source(), arch, tmp_path)
    assert registers <= REGISTERS
    assert spilled == 0
    assert re.search(r"ld\.global\S*\.v[24]", ptx), "several elements a load"
    assert re.search(r"st\.global\S*\.v[24]", ptx), "several elements a store"


@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="triton's assembler is for Linux")
@pytest.mark.parametrize("arch", rest_slow([89, 90, 100], 90))
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("kernel", ["_stats_kernel", "_channel_kernel"])
def test_the_statistics_compile_ahead(
    kernel: str, dtype: str, arch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter runs what the compiler refuses, such as a variable whose shape changes in a loop."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    ptx, _, _ = compiled(stats_source(kernel, dtype), arch, tmp_path)
    assert ".f64" in ptx, "sums in float64"


@pytest.mark.slow
def test_on_a_cpu_nothing_of_it_is_loaded() -> None:
    """Triton and the compiler take seconds to import."""
    code = "import sys; import harness.precision.backends.native; print({'triton', 'torch._dynamo'} & {*sys.modules})"
    assert interpreted(code) == "set()"
