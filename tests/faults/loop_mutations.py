"""The protections of torch's standard loop, and of a prepared model: row 8, and 14 for the loss scale."""

from __future__ import annotations

from mutation import Mutation

LOOP = (
    Mutation(
        14,
        "gradients come out of an fp16 backward unscaled",
        "        self.gradients.active = True\n",
        "        self.gradients.active = False\n",
        "tests/unit/precision/test_standard_loop.py -k true_between",
    ),
    Mutation(
        14,
        "what clips gradients by value cannot hide an overflow",
        "torch.where(self._overflow > 0, math.inf, norm) if",
        "norm if",
        "tests/unit/precision/test_standard_loop.py -k hide_an_overflow",
    ),
    Mutation(
        14,
        "gradients are unscaled before hooks that were there first",
        "                hooks.clear()\n",
        "                before = {}\n",
        "tests/unit/precision/test_standard_loop.py -k users_own",
    ),
    Mutation(
        8,
        "a loss of two prepared models is told whose it is",
        "if len(reached) > 1:",
        "if False:",
        "tests/unit/precision/test_standard_refusals.py -k whose_it_is",
    ),
    Mutation(
        8,
        "ranks that met after prepare() have one plan",
        "            ready.agree()\n",
        "",
        "tests/dist/test_precision_ddp.py -k meet_late",
    ),
    Mutation(
        8,
        "a layer that was compiled alone does not go past FP8",
        "    _refuse_compiled(plan, model)\n",
        "",
        "tests/unit/precision/test_api_misuse.py -k compiled_alone",
    ),
    Mutation(
        8,
        "a deep copy of a wrapped model is not trained",
        "self._ready.window.copies.add(module)",
        "pass",
        "tests/unit/precision/test_standard_refusals.py -k deep_copy",
    ),
    Mutation(
        8,
        "FP8 layers of another Precision are not taken for bf16 ones",
        '    if fp8:\n        what = f"the model has {len(fp8)} FP8 layers of another',
        '    if False:\n        what = f"the model has {len(fp8)} FP8 layers of another',
        "tests/unit/precision/test_standard_refusals.py -k another_precision",
    ),
    Mutation(
        8,
        "what a wrapped model gives out is in float32",
        "return widened(result)",
        "return result",
        "tests/unit/precision/test_standard_loop.py -k come_in_float32",
    ),
    Mutation(
        8,
        "parts that are called from outside run as planned",
        "own = [module for module in ready.model.modules() if",
        "own = [module for module in [ready.model] if",
        "tests/unit/precision/test_standard_loop.py -k parts_that",
    ),
    Mutation(
        8,
        "a GradScaler does not step a wrapped optimizer",
        "def _step_supports_amp_scaling(self)",
        "def _not_asked_for(self)",
        "tests/unit/precision/test_standard_refusals.py -k refused",
    ),
    Mutation(
        8,
        "an evaluation with gradients on leaves no trace",
        "self._end_window(ready)  # it was an evaluation",
        "pass  # it was an evaluation",
        "tests/unit/precision/test_standard_refusals.py -k no_trace",
    ),
    Mutation(
        8,
        "an evaluation in the middle of a window is refused",
        "            if self._training:\n",
        "            if False:\n",
        "tests/unit/precision/test_standard_refusals.py -k refused",
    ),
    Mutation(
        8,
        "another library's autocast around a prepared model is noticed",
        "if forward is not self._forward and not (own and self._forward is None):",
        "if False:",
        "tests/unit/precision/test_api_misuse.py -k part_that_changed",
    ),
    Mutation(
        8,
        "a part that was cast is noticed",
        "if value.dtype != dtype:",
        "if False:",
        "tests/unit/precision/test_api_misuse.py -k part_that_changed",
    ),
    Mutation(
        8,
        "a layer that was replaced is noticed",
        "if module not in here:",
        "if False:",
        "tests/unit/precision/test_api_misuse.py -k part_that_changed",
    ),
    Mutation(
        15,
        "a loop of one's own hears of FP8 layers that nobody calls",
        "in (Fp8Monitor, FallbackController, WholeRunFallback))",
        "in (FallbackController, WholeRunFallback))",
        "tests/unit/precision/test_api_misuse.py -k never_called",
    ),
)
