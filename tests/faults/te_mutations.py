"""Transformer Engine's rung: rows 15 to 17 and 25, and what would be computed wrong without a word.

Their tests run on TE's own Python (tests/te_cpu), each in a process of its own.
"""

from __future__ import annotations

from mutation import Mutation

_TE, _LINEAR, _LIBRARY = (
    f"harness/precision/backends/{name}.py" for name in ("te", "te_linear", "te_library")
)
_RULE = "harness/precision/scaling.py"
_FUSED = "harness/precision/backends/te_fused.py"
_SAME = "tests/te_cpu/test_te_scenarios.py -k same_bits"
# What both backends share cannot differ between them: beside a rule of its own.
_SHARED = "tests/unit/precision/test_te_scales.py"

TRANSFORMER_ENGINE = (
    Mutation(
        15,
        "TE leaves the roll to the harness",
        "    fp8_meta[manager.get_buffer_info()] = []\n",
        "",
        _SAME,
    ),
    Mutation(
        15,
        "a TE that rolls all the same is refused",
        "if _held_by_te(manager) != held:",
        "if False:",
        "tests/te_cpu/test_te_refusals.py -k other_transformer_engine",
    ),
    Mutation(
        15,
        "TE's quantizers use the state that rolls",
        "                module.quantizers[key] = state.make_quantizers()\n",
        "",
        _SAME,
    ),
    Mutation(
        15,
        "tokens are filled up to a whole block of block scaling",
        '"current": 16, "block": 128',
        '"current": 16, "block": 16',
        "tests/te_cpu/test_te_scenarios.py -k whole_blocks",
    ),
    Mutation(15, "TE's scales roll", "        self.scale.copy_(scale)\n", "", _SAME),
    Mutation(
        15,
        "scales roll once per micro-batch",
        'if self.config.roll == "micro_batch":\n            self._roll(',
        "if False:\n            self._roll(",
        _SAME,
    ),
    Mutation(15, "scales roll once per step", 'if self.config.roll == "step":', "if False:", _SAME),
    Mutation(
        15,
        "infinite amaxes are scrubbed under TE",
        (
            "self.history,\n"
            "            self.scale,\n"
            "            self.fp8_max,\n"
            "            config.margin,\n"
            "            config.amax_compute_algo,\n"
            "            config.scrub_inf,"
        ),
        "self.history, self.scale, self.fp8_max, config.margin, config.amax_compute_algo, False",
        _SHARED,
    ),
    Mutation(15, "the recipe's margin under TE", "config.margin,", "0,", _SHARED),
    Mutation(
        15,
        "gradients have the limit of their own format under TE",
        'gradient = "e5m2" if fp8.format == "hybrid" else "e4m3"',
        'gradient = "e4m3"',
        _SAME,
    ),
    Mutation(
        17,
        "a skipped step puts TE's state back",
        "        skipped = skip > 0\n",
        "        skipped = skip > 1\n",
        _SHARED,
    ),
    Mutation(
        17,
        "a new window drops what was staged under TE",
        "        self.history[0].zero_()\n        self._entry = (",
        "        self._entry = (",
        "tests/unit/precision/test_te_scales.py -k staged_without_a_backward",
    ),
    Mutation(
        17,
        "forwards without gradients record nothing under TE",
        "if not delayed or self.follows or self._records():",
        "if True:",
        _SAME,
    ),
    Mutation(
        17,
        "a deep copy records nothing under TE",
        "silent[key] = list(map(_unrecorded, own))",
        "silent[key] = list(own)",
        "tests/te_cpu/conftest.py -k deep_copy_follows",
    ),
    Mutation(
        16,
        "a demoted layer computes in BF16 under TE",
        "in_fp8 = watch.active and not self.demoted",
        "in_fp8 = watch.active",
        _SAME,
    ),
    Mutation(
        16,
        "a demoted layer keeps a shadow amax under TE",
        "        elif self.demoted:\n            observe(",
        "        elif False:\n            observe(",
        _SAME,
    ),
    Mutation(
        16,
        "a demoted layer's gradient is measured under TE",
        "if out.requires_grad and (watch.everything or self.demoted or self._samples()):",
        "if out.requires_grad and (watch.everything or self._samples()):",
        _SAME,
    ),
    Mutation(
        16,
        "which layers are demoted is restored under TE",
        '        self.switch(meta["demoted"], others)\n',
        "",
        "tests/te_cpu/test_te_refusals.py -k continues_bit_for_bit",
    ),
    Mutation(
        16,
        "sampled statistics are of the scale in use under TE",
        "self.fp8_meta[key].scale[column] if self.shared.delayed else None",
        "None",
        _SAME,
    ),
    Mutation(
        16,
        "gradients are cast by the scale of the gradient slot",
        '("scaling_bwd", 0) if role == 2',
        '("scaling_fwd", 1) if role == 2',
        _SAME,
    ),
    Mutation(
        22,
        "ranks share amaxes under TE",
        "self._roll(reduce(self.history[0].clone()))",
        "self._roll(self.history[0].clone())",
        "tests/te_cpu/test_te_several.py -k ranks",
    ),
    Mutation(
        25,
        "formats of another run are refused under TE",
        'elif list(meta["formats"]) != self.formats:',
        "elif False:",
        "tests/te_cpu/test_te_refusals.py -k another_run",
    ),
    Mutation(
        25,
        "a history of another length is refused under TE",
        "elif saved_length != own_length:",
        "elif False:",
        "tests/te_cpu/conftest.py -k round_trip",
    ),
    Mutation(
        25,
        "another scaling is refused under TE",
        "if kind != self.scaling:",
        "if False:",
        "tests/te_cpu/conftest.py -k last_amaxes",
    ),
    Mutation(
        16,
        "a layer goes by the context of its own model",
        "as_it_is = state.fp8_enabled == in_fp8 and (not in_fp8 or state.fp8_recipe is recipe)",
        "as_it_is = True",
        "tests/te_cpu/test_te_several.py -k own_model_alone",
    ),
    Mutation(
        16,
        "inputs are cast to BF16 before TE quantises them",
        "input = input.to(torch.bfloat16 if watch.active else own_dtype)",
        "pass",
        _SAME,
    ),
    Mutation(
        16,
        "rows are filled up to what TE's GEMMs take",
        "missing = -tokens % multiple",
        "missing = 0",
        _SAME,
    ),
    Mutation(
        16,
        "a second backward under TE is refused",
        "        if self._passed:\n",
        "        if False:\n",
        "tests/te_cpu/test_te_refusals.py -k used_twice",
    ),
    Mutation(
        16,
        "gradients of gradients under TE are refused",
        "        if torch.is_grad_enabled():\n            why",
        "        if False:\n            why",
        "tests/te_cpu/conftest.py -k gradients_of_gradients",
    ),
    Mutation(
        16,
        "a compiled TE layer is refused",
        "        if torch.compiler.is_compiling():\n            _refuse_compiled(self",
        "        if False:\n            _refuse_compiled(self",
        "tests/te_cpu/test_te_refusals.py -k compiled_model",
    ),
    Mutation(
        16,
        "a recomputation after scales moved is refused",
        "            self._watch.rolled_under = self._open > 0\n",
        "",
        "tests/te_cpu/conftest.py -k scales_moved",
    ),
    Mutation(
        16,
        "backward computes again in FP8",
        "self._watch.active = self._watch.in_backward = True",
        "self._watch.in_backward = True",
        "tests/te_cpu/conftest.py -k checkpointing_changes",
    ),
    Mutation(
        16,
        "te.checkpoint's queues are emptied of what nobody took",
        "            queue.clear()\n        self._metas.clear()\n",
        "            pass\n        self._metas.clear()\n",
        "tests/te_cpu/test_te_recompute.py -k dropped_last",
    ),
    Mutation(
        16,
        "what te.checkpoint computes again has the scales of its own forward",
        "        if interval < len(self._rolls):\n",
        "        if False:\n",
        "tests/te_cpu/test_te_recompute.py -k interleaved",
    ),
    Mutation(
        16,
        "what te.checkpoint keeps for a dropped loss is not taken for another",
        "            queue.clear()\n\n    def moved",
        "            pass\n\n    def moved",
        "tests/te_cpu/test_te_recompute.py -k dropped_first",
    ),
    Mutation(
        16,
        "a second loss of one context is known to be of before the roll",
        "            self._watch.rolled_under = True\n",
        "            pass\n",
        "tests/te_cpu/test_te_recompute.py -k torch_checkpoint_is_refused",
    ),
    Mutation(
        16,
        "nodes of several threads are not compared by their numbers",
        "        self._one_thread &= threading.get_ident() == self._thread\n\n    def note",
        "        pass\n\n    def note",
        "tests/te_cpu/test_te_recompute.py -k beside_the_training",
    ),
    Mutation(
        16,
        "a te.checkpoint within another goes by no number of a thread of autograd's",
        "look_up = watch.rolled_under or not watch.nested",
        "look_up = True",
        "tests/te_cpu/test_te_recompute.py -k thread_of_its_own",
    ),
    Mutation(
        16,
        "what te.checkpoint computes first is recorded",
        "return shared.watch.with_gradients and shared.library.checkpointing()",
        "return False",
        "tests/te_cpu/test_te_scenarios.py -k te_checkpoint",
    ),
    Mutation(
        16,
        "a recipe key that TE drops is refused",
        "if getattr(recipe, name, None) != value]",
        "if False]",
        "tests/te_cpu/test_te_refusals.py -k other_transformer_engine",
    ),
    Mutation(
        16,
        "a demotion unfuses",
        "return self.shared.delayed and self.shared.watch.active and not self.demoted",
        "return self.shared.delayed and self.shared.watch.active",
        "tests/te_cpu/test_te_fused.py -k demoted",
    ),
    Mutation(
        16,
        "what a fused norm hands on is computed for whoever else takes it",
        "{id(each): each.value() for each in found}",
        "{id(each): each.source for each in found}",
        "tests/te_cpu/test_te_fused_declared.py -k right_all_the_same",
    ),
    Mutation(
        16,
        "what is written to a norm's output reaches its layer",
        "                each.settled = value\n",
        "                pass\n",
        "tests/te_cpu/test_te_fused_declared.py -k has_a_hold",
    ),
    Mutation(
        16,
        "a gradient that a fused pair would lose is refused",
        "            made.register_hook(_Lost(linear))\n",
        "",
        "tests/te_cpu/test_te_fused_declared.py -k refused_by_name",
    ),
    Mutation(
        16,
        "a fused norm's input that was written to is refused",
        "if self.source._version != self.version:",
        "if False:",
        "tests/te_cpu/test_te_fused_declared.py -k refused_by_name",
    ),
    Mutation(
        16,
        "a LayerNorm's bias is not in rows that are filled up",
        (
            "return whole and (\n"
            "            te_fused.is_rms(norm) or not x.numel() // x.shape[-1] % self.shared.multiple\n"
            "        )"
        ),
        "return whole",
        "tests/te_cpu/test_te_fused.py -k both_apart",
    ),
    Mutation(
        17,
        "a fused evaluation records nothing",
        "quantizers=casts, training=linear.training",
        'quantizers=vars(block).setdefault("first", casts), training=linear.training',
        "tests/te_cpu/test_te_fused.py -k leaves_no_trace",
    ),
    Mutation(
        16,
        "an MLP is fused only if it is SwiGLU of the first half",
        '{step, getattr(other, "step", "")} == {"silu", "up"}',
        "other is not None",
        "tests/te_cpu/test_te_fused_between.py -k no_swiglu",
    ),
    Mutation(
        16,
        "an MLP is fused only if silu is what is applied",
        'step == "gate" and func is F.silu and',
        'step == "gate" and',
        "tests/te_cpu/test_te_fused_between.py -k no_swiglu",
    ),
    Mutation(
        16,
        "what was made of a fused layer's output is computed before that is written to",
        "            each.settle_others()\n",
        "            pass\n",
        "tests/te_cpu/test_te_fused_between.py -k written_meanwhile",
    ),
    Mutation(
        16,
        "what a fused MLP kept to itself is not computed after its step",
        "        if self.linear.window != self.window:\n",
        "        if False:\n",
        "tests/te_cpu/test_te_fused_between.py -k after_the_context",
    ),
    Mutation(
        16,
        "a backward hook takes a fused MLP apart",
        "return wanted and whole and not te_fused.hooked(self, second, *self.around, *second.around)",
        "return wanted and whole",
        "tests/te_cpu/test_te_fused_between.py -k backward_hook",
    ),
    Mutation(
        16,
        "a demoted second layer takes the MLP apart",
        "and self._fuses()",
        "and watch.active",
        "tests/te_cpu/test_te_fused_mlp.py -k demoted",
    ),
    Mutation(
        16,
        "casts of a fused MLP are sampled with its parts apart",
        "        if self._samples() and (grads or watch.with_gradients or watch.in_backward):\n",
        "        if False:\n",
        "tests/te_cpu/test_te_fused_mlp.py -k sampled",
    ),
    Mutation(
        16,
        "biases are not in rows that are filled up for a fused MLP",
        "whole = not self.use_bias or not normed.numel() // self.in_features % self.shared.multiple",
        "whole = True",
        "tests/te_cpu/test_te_fused_mlp.py -k all_apart",
    ),
    Mutation(
        17,
        "an evaluation of a fused MLP records nothing of its first layer",
        "        layers = (*before[1:], self)\n",
        "        layers = (self,)\n",
        "tests/te_cpu/test_te_fused.py -k leaves_no_trace",
    ),
    Mutation(
        16,
        "te.checkpoint's queues of fused MLPs are known, too",
        "meta = (self._block(before) if before else self).fp8_meta",
        "meta = self.fp8_meta",
        "tests/te_cpu/test_te_fused_mlp.py -k dropped",
    ),
    Mutation(
        16,
        "a recipe that fuses nothing says so in the plan",
        "        notes = (*notes, note)\n",
        "",
        "tests/unit/precision/test_fuse.py",
    ),
    Mutation(
        16,
        "under FSDP2 a layer in BF16 is torch's own product",
        'return F.linear(input, self.weight, self._parameters.get("bias"))',
        "return super().forward(input)",
        "tests/te_cpu/test_te_sharded.py",
    ),
)
