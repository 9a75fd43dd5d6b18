"""The native FP8 backend's arithmetic: what must be noticed if it goes another way. Rows 15 and 16."""

from __future__ import annotations

from mutation import Mutation

NATIVE = (
    Mutation(
        15,
        "an inverse scale is finite",
        "scale.clamp_min(SMALLEST_SCALE)",
        "scale",
        "tests/unit/precision/test_native_fp8.py -k infinite",
    ),
    Mutation(
        15,
        "NaN is no amax on a GPU",
        "tl.where(bits <= 0x7F800000, bits, 0)",
        "bits",
        "tests/unit/precision/test_native_triton.py -k bits_of_torch",
    ),
    Mutation(
        15,
        "the kernel rounds once",
        "magic = tl.maximum(exponent, SMALLEST) * MAGIC\n        bits",
        "magic = tl.maximum(exponent, SMALLEST) * 0.0\n        bits",
        "tests/unit/precision/test_native_triton.py -k bits_of_torch",
    ),
    Mutation(
        16,
        "statistics are of what was rounded",
        "quantized = (scaled + magic) - magic\n            some",
        "quantized = scaled\n            some",
        "tests/unit/precision/test_native_triton.py -k interpreted_statistics",
    ),
    Mutation(
        15,
        "scales lie where cuBLASLt takes them",
        "F.pad(self.inverse[:, None], (0, _APART - 1))",
        "self.inverse[:, None]",
        "tests/cuda_on_paper/test_operands.py -k multiples_of_16_bytes",
    ),
    Mutation(
        15,
        "a product of inverse scales over the largest float32",
        "if not _FLT_MIN <= scale <= _FLT_MAX:",
        "if False:",
        "tests/unit/precision/test_native_gemm.py -k no_float32",
    ),
    Mutation(
        15,
        "a product of inverse scales that float32 holds badly",
        "if not _FLT_MIN <= scale <= _FLT_MAX:",
        "if scale > _FLT_MAX:",
        "tests/unit/precision/test_native_gemm.py -k no_float32",
    ),
    Mutation(
        16,
        "gradients are cast to their own format",
        "        fmt = self.formats[slot]\n        rows, columns",
        '        fmt = "e4m3"\n        rows, columns',
        "tests/unit/precision/test_native_fp8.py",
    ),
    Mutation(
        16,
        "compiled gradients are cast to their own format",
        "_scale(scales, _GRADIENT), ctx.gradient, needs[1]",
        '_scale(scales, _GRADIENT), "e4m3", needs[1]',
        "tests/unit/precision/test_native_compile.py -k linear_has_the_bits",
    ),
    Mutation(
        16,
        "a demoted layer's gradient is measured in every window",
        "            if record:\n                buffers.observe(grad, slot)",
        "            if record and buffers.sampling:\n                buffers.observe(grad, slot)",
        "tests/unit/precision/test_native_fp8.py -k plain_bf16",
    ),
    Mutation(
        16,
        "a demoted layer's input and weight are measured in every window",
        "            if record:\n                buffers.observe(left.values, slot)",
        "            if record and buffers.sampling:\n                buffers.observe(left.values, slot)",
        "tests/unit/precision/test_native_fp8.py -k plain_bf16",
    ),
    Mutation(
        16,
        "a compiled forward's amax reaches its slot",
        "        layer.slot_buffers.stage(layer.slot, amax)\n",
        "        pass\n",
        "tests/unit/precision/test_native_compile.py -k linear_has_the_bits",
    ),
    Mutation(
        16,
        "a compiled backward's amax reaches its slot",
        "        layer.slot_buffers.stage(layer.slot + 2, amax)\n",
        "        pass\n",
        "tests/unit/precision/test_native_compile.py -k linear_has_the_bits",
    ),
    Mutation(
        16,
        "a compiled cast rounds to bfloat16 first",
        "torch.where(wide.isnan(), wide, even.view(torch.float32))",
        "wide",
        "tests/unit/precision/test_native_compile.py -k linear_has_the_bits",
    ),
    Mutation(
        16,
        "a block with a demoted layer is not compiled as one without",
        "block.switching = sampling or not",
        "block.switching = False and not",
        "tests/unit/precision/test_native_compile.py -k demoted_block",
    ),
    Mutation(
        16,
        "an output is no view",
        "torch.ops.aten._unsafe_view.default(out, [*x.shape[:-1], weight.shape[0]])",
        "out.reshape([*x.shape[:-1], weight.shape[0]])",
        "tests/unit/precision/test_native_fp8.py -k in_place",
    ),
    Mutation(
        16,
        "x is dequantised with the scale that it was cast under",
        "Fp8Pair(None, columns, _inverse(then, _INPUT))",
        "Fp8Pair(None, columns, _inverse(scales, _INPUT))",
        "tests/unit/precision/test_native_compile.py -k between_a_forward",
    ),
)
