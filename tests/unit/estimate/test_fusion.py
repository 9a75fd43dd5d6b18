"""Which operations a compiled block launches together, what they move and what they keep, against counts by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from harness.estimate.fusion import Fusion
from harness.estimate.memory import Change, Kept, Peak, as_compiled, peak
from harness.estimate.roofline import Op, Piece

WIDE = 4
"""Bytes of an element, unless a test says otherwise."""


def op(name: str, inputs: str, outputs: str, **more: object) -> Op:
    """An operation of block 0 in forward. inputs, outputs: a storage each, as its number and elements: "1:100"."""
    read, written = (tuple(map(_piece, text.split())) for text in (inputs, outputs))
    made = Op(
        name=name,
        phase="forward",
        purpose="rest of the model",
        reads=sum(each.elements * each.itemsize for each in read),
        writes=sum(each.elements * each.itemsize for each in written),
        flops=0.0,
        unit="none",
        attention=False,
        kernels=1,
        micro=1,
        block=0,
        inputs=read,
        outputs=written,
    )
    return replace(made, **more)  # type: ignore[arg-type]


def _piece(text: str) -> Piece:
    storage, elements, *offset = map(int, text.split(":"))
    return Piece(storage, offset[0] if offset else 0, elements, WIDE)


def product(inputs: str, outputs: str, **more: object) -> Op:
    return op("mm", inputs, outputs, flops=1.0, **more)


def backward(made: Op) -> Op:
    return replace(made, phase="backward")


def moved(ops: list[Op]) -> list[tuple[int, int]]:
    """Elements that each fused kernel reads and writes, in order of its first operation."""
    kernels = [each for each in Fusion(ops).fused() if not each.flops and not each.own]
    return sorted((each.reads // WIDE, each.writes // WIDE) for each in kernels)


def test_a_chain_reads_its_beginning_and_writes_its_end() -> None:
    ops = [
        product("0:9 1:9", "2:100"),
        op("silu", "2:100", "3:100"),
        op("mul", "3:100 4:100", "5:100"),
        product("5:100 6:9", "7:9"),
    ]
    assert moved(ops) == [(200, 100)]
    products = [replace(each, compiled=True) for each in (ops[0], ops[3])]
    assert [each for each in Fusion(ops).fused() if each.flops] == products


def test_what_lies_behind_a_product_is_another_kernel() -> None:
    """Though both read the same memory."""
    ops = [
        op("norm", "0:100", "1:100"),
        product("1:100 2:9", "3:100"),
        op("add", "0:100 3:100", "4:100"),
        product("4:100 5:9", "6:9"),
    ]
    assert moved(ops) == [(100, 100), (200, 100)]


def test_what_shares_no_memory_is_another_kernel() -> None:
    ops = [
        op("cast of a weight", "0:50", "1:50"),
        op("cast of an input", "2:10", "3:10"),
        product("1:50 3:10", "4:9"),
    ]
    assert moved(ops) == [(10, 10), (50, 50)]


def test_one_that_reads_of_two_makes_one_of_them() -> None:
    ops = [
        op("left", "0:10", "1:10"),
        op("right", "2:20", "3:20"),
        op("cat", "1:10 3:20", "4:30"),
        product("4:30", "5:9"),
    ]
    assert moved(ops) == [(30, 30)]


def test_halves_of_a_storage_are_two() -> None:
    ops = [
        product("0:9", "1:200"),
        op("silu", "1:100", "2:100"),
        op("mul", "2:100 1:100:100", "3:100"),
        product("3:100", "4:9"),
    ]
    assert moved(ops) == [(200, 100)]


def test_a_tensor_is_read_to_its_end_before_one_number_of_it_is_known() -> None:
    ops = [
        op("amax", "0:100", "1:1"),
        op("cast", "0:100 1:1", "2:100"),
        product("2:100", "3:9"),
    ]
    assert moved(ops) == [(100, 1), (101, 100)]


def test_a_number_for_each_row_is_no_such_end() -> None:
    ops = [
        op("amax of rows", "0:100", "1:10"),
        op("cast", "0:100 1:10", "2:100"),
        product("2:100", "3:9"),
    ]
    assert moved(ops) == [(100, 100)]


@pytest.mark.parametrize(
    "more", [{"block": None}, {"block": 1}, {"phase": "backward"}, {"micro": 2}]
)
def test_another_graph_is_another_kernel(more: dict[str, object]) -> None:
    ops = [
        op("first", "0:100", "1:100"),
        op("second", "1:100", "2:100", **more),
        product("1:100", "8:9"),
        product("2:100", "9:9"),
    ]
    assert moved(ops) == [(100, 100), (100, 100)]


def test_an_update_in_place_of_older_memory_is_written_though_nobody_reads_it() -> None:
    assert moved([op("add_", "0:100 1:100", "0:100")]) == [(200, 100)]


def test_what_nobody_reads_is_not_written() -> None:
    ops = [op("norm", "0:100", "1:100 2:10"), product("1:100", "3:9")]
    assert moved(ops) == [(100, 100)]


def test_backward_computes_again_what_it_alone_would_read() -> None:
    """SwiGLU: of gate and up, silu(gate) is not kept; their product is, as a matrix product reads it."""
    ops = [
        product("0:9", "1:200"),
        op("silu", "1:100", "2:100"),
        op("mul", "2:100 1:100:100", "3:100"),
        product("3:100 4:9", "5:9"),
        backward(product("6:9 3:100", "7:9")),
        backward(product("6:9 4:9", "8:100")),
        backward(op("of up", "8:100 2:100", "9:100")),
        backward(op("of silu", "8:100 1:100:100", "10:100")),
        backward(op("of gate", "10:100 1:100", "11:100")),
        backward(product("9:100 11:100", "12:9")),
    ]
    # Backward reads gate, up and the gradient; it writes the gradients of both.
    assert moved(ops) == [(200, 100), (300, 200)]


def test_another_micro_batch_does_not_compute_it_again() -> None:
    ops = [
        product("0:9", "1:100"),
        op("silu", "1:100", "2:100"),
        backward(op("of silu", "2:100 3:100", "4:100", micro=2)),
        backward(product("4:100", "5:9")),
    ]
    assert moved(ops) == [(100, 100), (200, 100)]


def test_what_our_casts_alone_read_is_written_in_16_bits() -> None:
    cast = op("fp8_quantize", "1:100", "2:100", own=True)
    ops = [op("norm", "0:100", "1:100"), cast, product("2:100", "3:9")]
    (norm,) = [each for each in Fusion(ops).fused() if each.name == "norm"]
    (after,) = [each for each in Fusion(ops).fused() if each.own]
    assert (norm.reads, norm.writes) == (400, 200)
    assert (after.reads, after.writes) == (200, 400)

    # A weight is older than the step, and somebody else reads the other tensor, too.
    assert Fusion([cast]).fused() == [replace(cast, compiled=True)]
    (norm, *_) = Fusion([*ops, op("add", "1:100", "4:100", block=None)]).fused()
    assert norm.writes == 400


def test_what_only_its_kernel_reads_is_in_no_memory() -> None:
    ops = [
        product("0:9 1:9", "2:100"),
        op("silu", "2:100", "3:100"),
        op("mul", "3:100 4:100", "5:100"),
        product("5:100 6:9", "7:9"),
    ]
    assert Fusion(ops).kept() == Kept({3: 0.0, 5: 1.0}, {})


def test_what_backward_can_compute_again_is_not_kept() -> None:
    """It is computed from 1, which therefore lives until then."""
    ops = [
        product("0:9", "1:100"),
        op("silu", "1:100", "2:100"),
        op("mul", "2:100 3:100", "4:100"),
        product("4:100", "5:9"),
        backward(op("of mul", "2:100 6:100 1:100", "7:100")),
        backward(product("7:100", "8:9")),
    ]
    kept = Fusion(ops).kept(first=10)
    assert (kept.share[2], kept.share[4]) == (0.0, 1.0)
    assert kept.until == {1: 14}


def test_what_two_tensors_are_computed_from_again_lives_until_the_later_one() -> None:
    ops = [
        product("0:9", "1:50"),
        op("silu", "1:50", "2:100"),
        op("gelu", "1:50", "3:100"),
        op("mul", "2:100 3:100", "4:100"),
        product("4:100", "5:9"),
        backward(op("of gelu", "3:100 6:100", "7:100")),
        backward(product("7:100", "8:9")),
        backward(op("of silu", "2:100 8:9", "9:100")),
    ]
    assert Fusion(ops).kept().until == {1: 7}
    # The other way round: the later reader comes first.
    ops[5], ops[7] = (
        backward(op("of silu", "2:100 6:100", "7:100")),
        backward(op("of gelu", "3:100 8:9", "9:100")),
    )
    assert Fusion(ops).kept().until == {1: 7}


def test_the_smaller_is_kept_of_a_tensor_and_what_it_is_computed_from() -> None:
    """As the sum before a norm, of a residual in float32 and a product of half its size, which backward reads too."""

    def until(size: int) -> dict[int, int]:
        ops = [
            product("0:9", f"1:{size}"),
            op("add", f"1:{size} 2:100", "3:100"),
            product("3:100", "4:9"),
            op("add", "3:100 4:9", "5:100"),
            backward(op("of norm", "3:100 2:100 6:100", "7:100")),
        ]
        return dict(Fusion(ops).kept().until)

    assert until(50) == {1: 4, 2: 4, 3: 3}, "3 is freed after forward, and 1 is kept in its place"
    assert until(100) == {}


def test_memory_of_compiled_blocks() -> None:
    """Storage 2 takes half, 3 nothing, and 1 lives for two operations more."""
    changes = [
        Change(0, 1, 100, "activations"),
        Change(1, 2, 80, "activations"),
        Change(2, 3, 60, "activations"),
        Change(2, 1, -100, "activations"),
        Change(3, 4, 50, "gradients"),
        Change(4, 2, -80, "activations"),
    ]
    before = Counter({"weights": 1000})
    assert peak(before, changes) == Peak(1240, Counter(weights=1000, activations=240))
    kept = Kept(share={2: 0.5, 3: 0.0}, until={1: 3})
    found = peak(before, as_compiled(changes, [kept]))
    assert found == Peak(1190, Counter(weights=1000, activations=140, gradients=50))


def test_weights_that_are_gathered_again_are_freed_when_fsdp_frees_them() -> None:
    changes = [
        Change(place, 1, size, "gathered weights") for place, size in enumerate([70, -70] * 2)
    ]
    changes.insert(2, Change(1, 2, 50, "activations"))
    assert peak({}, as_compiled(changes, [Kept(until={1: 9})])) == peak({}, changes)
    assert peak({}, changes).bytes == 120
