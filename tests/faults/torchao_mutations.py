"""torchao's layers: what they measure, eager and compiled. Row 16."""

from __future__ import annotations

from mutation import Mutation

_LINEAR = "harness/precision/backends/torchao.py"
_COMPILED = "tests/unit/precision/test_torchao_compile.py"

TORCHAO = (
    Mutation(
        16,
        "a compiled amax cannot be dropped",
        '_fake_note, mutates=("after",))',
        "_fake_note)",
        f"{_COMPILED} -k whatever_is_trained",
    ),
    Mutation(
        16,
        "an amax is noted by what the compiler keeps",
        "found[needs.index(True)]",
        "found[0]",
        f"{_COMPILED} -k whatever_is_trained",
    ),
    Mutation(
        16,
        "compiled layers are demoted, too",
        "        elif self.block.demoted:\n",
        "        elif False:\n",
        f"{_COMPILED} -k back_in_fp8",
    ),
    Mutation(
        16,
        "a sampled window leaves layers compiled",
        "        elif self.block.demoted:\n",
        "        elif self.block.switching:\n",
        f"{_COMPILED} -k keeps_its_casts",
    ),
    Mutation(
        16,
        "a copy of a torchao layer records nothing",
        "record = torch.is_grad_enabled() and not self.follows\n        if not torch.compiler",
        "record = torch.is_grad_enabled()\n        if not torch.compiler",
        f"{_COMPILED} -k deep_copy",
    ),
    Mutation(
        16,
        "scales of rows inside of an operator",
        "DispatchKey.AutogradFunctionality, False)",
        "DispatchKey.AutogradFunctionality, True)",
        f"{_COMPILED} -k rowwise",
    ),
    Mutation(
        16,
        "a torchao layer keeps the hooks and names of its Linear",
        "made = shallow_copy(linear, WatchedLinear)",
        "made: WatchedLinear = theirs\n    made.__class__ = WatchedLinear",
        "tests/unit/precision/test_torchao.py -k survive",
    ),
    Mutation(
        16,
        "a torchao layer without rows needs no scale",
        "return self.demoted or not x.numel()",
        "return self.demoted",
        "tests/unit/precision/test_torchao.py -k no_rows",
    ),
)
