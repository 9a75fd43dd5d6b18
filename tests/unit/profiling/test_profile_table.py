"""From a trace to a table: what counts as what, each instant once, and files of others."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from harness.profiling.kinds import KINDS, kind_of_kernel, kind_of_op
from harness.profiling.report import Profile, rows, write_text
from harness.profiling.table import Events, Table, table
from harness.profiling.trace_file import read_events, write_trace

BF16, FLOAT = "c10::BFloat16", "float"


def op(name: str, start: float, end: float, *types: str, thread: int = 1, number: int = 0) -> Any:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": thread, "ts": start, "dur": end - start,
            "args": {"Input type": list(types), "External id": number}}  # fmt: skip


def annotation(name: str, start: float, end: float, thread: int = 1) -> Any:
    return {**op(name, start, end, thread=thread), "cat": "user_annotation"}


def on_device(name: str, start: float, end: float, number: int = -1, cat: str = "kernel") -> Any:
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": start, "dur": end - start,
            "args": {"External id": number}}  # fmt: skip


def made_of(*events: Any) -> Table:
    found = Events()
    for event in events:
        found.add(event)
    made = table(found)
    assert made is not None
    assert sum(row.seconds for row in made.rows) == pytest.approx(made.seconds, rel=1e-9)
    assert {row.kind for row in made.rows} <= set(KINDS)
    return made


def microseconds(made: Table) -> dict[str, float]:
    return {row.kind: round(row.seconds * 1e6, 3) for row in made.rows if row.seconds}


def test_on_a_cpu_an_operation_counts_without_those_in_it() -> None:
    made = made_of(
        annotation("harness step 5", 0, 100),
        op("aten::linear", 10, 40),
        op("aten::addmm", 15, 35, BF16, BF16),
        op("aten::copy_", 20, 22, BF16, BF16),
        op("aten::_to_copy", 50, 60),
        op("aten::copy_", 51, 59, FLOAT, BF16),
        annotation("Optimizer.step#AdamW.step", 70, 90),
        op("aten::mul", 75, 80),
        op("aten::mm", 81, 85, FLOAT),
        op("aten::item", 92, 93),
    )
    assert microseconds(made) == {
        "GEMMs bf16": 20,
        "casts": 10,
        "optimizer": 20,
        "other operations": 10,
        "host waits": 1,
        "gaps": 39,
    }
    calls = {row.kind: row.calls for row in made.rows}
    assert (calls["GEMMs bf16"], calls["casts"], calls["optimizer"]) == (1, 1, 1)
    assert (made.steps, made.device) == ((5,), "cpu")


def test_communication_counts_where_nothing_else_runs() -> None:
    made = made_of(
        annotation("harness step 1", 0, 50),
        op("aten::mm", 10, 20, FLOAT),
        op("gloo:all_reduce", 15, 40, thread=2),
        op("aten::add", 0, 50, thread=3),
        annotation("harness step 2", 60, 80),
    )
    assert microseconds(made) == {
        "GEMMs fp32": 10,
        "communication": 20,
        "between steps": 10,
        "gaps": 40,
    }


def test_what_is_computed_between_steps_is_no_work_of_a_step() -> None:
    steps = (annotation("harness step 1", 0, 50), annotation("harness step 2", 170, 200))
    made = made_of(
        *steps,
        op("aten::mm", 10, 20, BF16),
        op("aten::linear", 60, 160),
        op("aten::mm", 70, 150, BF16),
        op("aten::mm", 175, 185, BF16),
    )
    assert microseconds(made) == {"GEMMs bf16": 20, "between steps": 120, "gaps": 60}
    assert {row.kind: row.calls for row in made.rows}["GEMMs bf16"] == 2

    # A kernel belongs to the step that launched it, also if it runs when the step's mark is over.
    made = made_of(
        *steps,
        op("aten::mm", 10, 20, BF16, number=1),
        op("aten::mm", 60, 70, BF16, number=2),
        op("aten::copy_", 70, 75, number=3),
        on_device("nvjet_tst", 40, 90, 1),
        on_device("nvjet_tst", 90, 130, 2),
        on_device("Memcpy DtoH (Device -> Pinned)", 130, 140, 3, cat="gpu_memcpy"),
        # Of a step that was cut from the trace.
        op("aten::mm", 210, 211, BF16, number=4),
        on_device("nvjet_tst", 215, 400, 4),
    )
    assert microseconds(made) == {"GEMMs bf16": 50, "between steps": 80, "gaps": 70}
    assert made.seconds == pytest.approx(200e-6)


def test_on_a_gpu_kernels_count_as_the_operations_that_launched_them() -> None:
    made = made_of(
        annotation("harness step 7", 0, 60),
        op("aten::mm", 1, 2, BF16, number=11),
        op("aten::mm", 2, 3, FLOAT, number=12),
        op("aten::rms_norm", 3, 6, number=13),
        op("aten::mul", 4, 5, number=14),
        op("aten::add", 6, 7, number=15),
        on_device("nvjet_tst_128x256_64x4", 5, 15, 11),
        on_device("sm80_xmma_gemm_f32f32_tf32f32_f32_tn", 15, 25, 12),
        on_device("void vectorized_elementwise_kernel<4, MulFunctor>", 25, 30, 14),
        on_device("elementwise_kernel", 28, 40, 15),
        on_device("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 35, 50),
        on_device("Memcpy HtoD (Pinned -> Device)", 55, 58, cat="gpu_memcpy"),
        on_device("triton_poi_fused_add_0", 70, 75),
        {**on_device("cudaStreamSynchronize", 45, 54), "cat": "cuda_runtime"},
    )
    assert microseconds(made) == {
        "GEMMs bf16": 10,
        "GEMMs tf32": 10,
        "norms": 5,
        "other operations": 15,
        "communication": 10,
        "copies to and from the host": 3,
        "host waits": 4,
        "gaps": 18,
    }
    assert (made.device, made.waits) == ("cuda", 1)
    assert made.waited == pytest.approx(9e-6), "hidden behind communication as well"
    assert made.seconds == pytest.approx(75e-6), "to the end of the last kernel"


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_qqtst_128x256_128x4_2x1_v_bz_coopA_TNT", "GEMMs fp8"),
        # Seen on an H100; the operations of Transformer Engine that launch the first say nothing of a GEMM.
        ("nvjet_sm90_qrtst_128x128_128x6_1x2_h_bz_coopA_algo2_TNT", "GEMMs fp8"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "GEMMs bf16"),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTN", "GEMMs fp16"),
        ("ampere_sgemm_128x64_tn", "GEMMs fp32"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "GEMMs bf16"),
        ("cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4", "GEMMs tf32"),
        ("volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_tn", "GEMMs fp16"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>", "norms"),
        ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<>", "norms"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("void transformer_engine::cast_transpose_kernel<__nv_fp8_e4m3>", "casts"),
        ("void at::native::bfloat16_copy_kernel_cuda", "casts"),
        ("triton_poi_fused_convert_element_type_0", "casts"),
        ("void cudnn::detail::conv2d_grouped_direct_kernel<>", "convolutions"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", ""),
    ],
)
def test_kernels_without_an_operation_are_told_by_their_names(kernel: str, kind: str) -> None:
    assert kind_of_kernel(kernel) == kind


def test_what_no_name_says_is_left_open() -> None:
    for name in ("aten::add_", "autograd::engine::evaluate_function: MmBackward0", "my block", ""):
        assert kind_of_op(name) == ""
    assert kind_of_op("aten::_scaled_mm", ["c10::Float8_e4m3fn"]) == "GEMMs fp8"
    assert kind_of_op("bmm", precision="fp16") == "GEMMs fp16"
    assert kind_of_op("aten::mm", ["int"]) == "GEMMs other types"
    assert kind_of_op("aten::_foreach_norm") == "", "not a layer's norm"
    assert kind_of_op("aten::_to_copy", retypes=False) == "", "to another device"


def trace(path: Path, count: int, tail: str = ' ], "traceName": "x"}') -> Path:
    events = [{"ph": "M", "name": "thread_name", "ts": 0, "args": {"name": "main"}}]
    for step in range(1, count + 1):
        start = step * 100
        events.append(annotation(f"harness step {step}", start, start + 90))
        events.append(op("aten::mm", start + 10, start + 20, FLOAT))
    # Not in the order of time, as torch writes device events behind those of the host.
    text = ",\n".join(json.dumps(event, indent=1) for event in reversed(events))
    path.write_text(f'{{"schemaVersion": 1,\n "traceEvents": [\n{text}\n{tail}')
    return path


def test_a_trace_that_is_too_large_is_cut_at_a_moment(tmp_path: Path) -> None:
    source = trace(tmp_path / "raw.json", 50)
    whole, cut = write_trace(source, tmp_path / "whole.json.gz")
    assert (len(whole.marks), cut) == (50, "")
    some, cut = write_trace(source, tmp_path / "cut.json.gz", most=source.stat().st_size // 2)
    assert "later events are left out" in cut
    held = json.loads(gzip.decompress((tmp_path / "cut.json.gz").read_bytes()))
    names = [event["name"] for event in held["traceEvents"]]
    assert held["cut"] == cut
    assert "thread_name" in names
    steps = sorted(some.marks)
    assert steps == list(range(1, len(steps) + 1)), "the first ones"
    assert 15 < len(steps) < 30
    made = table(some)
    assert made is not None
    assert microseconds(made)["GEMMs fp32"] == 10 * len(steps), "whole steps"


def test_a_trace_that_ends_early_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    text = trace(tmp_path / "raw.json", 5).read_text()
    (tmp_path / "half.json").write_text(text[: len(text) // 2])
    assert 3 < len(list(read_events(tmp_path / "half.json"))) < 8
    (tmp_path / "none.json").write_text("no JSON")
    assert list(read_events(tmp_path / "none.json")) == []
    assert table(Events()) is None


def test_odd_events_are_no_harm() -> None:
    found = Events()
    good = annotation("harness step 1", 0, 10)
    odd: list[Any] = [{}, {**good, "ts": "soon"}, {**good, "dur": -1}, {**good, "dur": float("nan")},
                      {**good, "name": 3}, {**good, "args": None}, {**good, "args": {"Input type": 3}}]  # fmt: skip
    for event in [*odd, {**op("aten::mm", 1, 2), "args": {"External id": [], "Input type": None}}]:
        found.add(event)
    assert table(found) is not None


def test_tables_of_other_programs_are_refused(tmp_path: Path) -> None:
    made = Profile.of(made_of(annotation("harness step 1", 0, 10), op("a|b\x1b[1m", 1, 9)), 0, "")
    path = tmp_path / "steps-000001-000001.table.json"
    path.write_text(json.dumps(made.as_dict()))
    assert Profile.read(path) == made
    text = write_text(made, path).read_text()
    assert "\x1b" not in text
    assert "a/b" in text
    assert "No prediction" in text
    good = made.as_dict()
    for change in (
        {"seconds": 0}, {"steps": []}, {"rows": [{"kind": "x", "seconds": 1, "calls": 1, "mostly": ""}]},
        {"waits": -1}, {"more": 1},
    ):  # fmt: skip
        path.write_text(json.dumps({**good, **change}))
        assert Profile.read(path) is None
    path.write_text("{")
    assert Profile.read(path) is None


def test_a_prediction_stands_beside_what_was_measured() -> None:
    made = Profile.of(
        made_of(annotation("harness step 1", 0, 10), op("aten::mm", 1, 9, FLOAT)), 0, ""
    )
    beside = rows(made.with_prediction("a card", {"GEMMs fp32": 2e-6, "norms": 1e-6}))
    cells = {row[0]: row[1:4] for row in beside}
    assert cells["GEMMs fp32"] == ["0.01", "0.00", "80.0%"]
    assert cells["norms"] == ["0.00", "0.00", "0.0%"], "predicted alone"
    assert cells["gaps"] == ["0.00", "-", "20.0%"], "measured alone"
