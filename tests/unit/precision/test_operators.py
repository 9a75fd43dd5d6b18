"""How the operators of FP8 layers are registered."""

from __future__ import annotations

import torch

from harness.precision.backends import native, native_fp8, native_triton, torchao

# Their import registers the operators.
MODULES = (native, native_fp8, native_triton, torchao)


def test_no_cuda_graph_records_an_operator() -> None:
    """A replay does not run an operator's Python: it would keep the scales, demotions and samples of the recording.

    Its outputs are on the GPU, so without the tag inductor would record it (`mode="reduce-overhead"`).
    """
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("hopper_harness::")]
    packets = {name: getattr(torch.ops.hopper_harness, name.split("::")[1]) for name in names}
    assert {"fp8_linear", "fp8_forward", "torchao_switching"} <= {n.split("::")[1] for n in names}
    recorded = [n for n, op in packets.items() if torch.Tag.cudagraph_unsafe not in op.default.tags]
    assert recorded == []
