"""The protections of torch's standard loop, and of a prepared model: row 8, and 14 for the loss scale."""

from __future__ import annotations

from mutation import Mutation

LOOP = (
    Mutation(
        8,
        "no event of a loop of one's own names a key of harness train",
        "If it comes again, lower the learning rate or lengthen the ",
        "If it comes again, lower train.lr or lengthen the ",
        "tests/unit/precision/test_own_words.py -k no_text",
    ),
    Mutation(
        8,
        "a copy of a Precision is refused by name",
        "        if self._prepared is not None:\n            what = ",
        "        if False:\n            what = ",
        "tests/unit/precision/test_copies_and_evaluation.py -k neither_is",
    ),
    Mutation(
        8,
        "a model that is compiled whole enters its precision",
        "        elif not self._precision.busy:\n            self._enter_compiled(module)\n",
        "",
        "tests/unit/precision/test_standard_compiled.py -k bits_of_eager",
    ),
    Mutation(
        8,
        "a model that is compiled whole leaves its precision",
        "return self._leave_compiled(module, result) if module is self._entrance else None",
        "return None",
        "tests/unit/precision/test_standard_compiled.py -k bits_of_eager",
    ),
    Mutation(
        14,
        "the loss scale of a compiled step is divided out once",
        '    @torch.compiler.disable(reason="Precision.backward() is no part of a graph")\n',
        "",
        "tests/unit/precision/test_standard_compiled.py -k bits_of_eager",
    ),
    Mutation(
        8,
        "a model that was wrapped in torch.compile before prepare() is refused",
        "    if compiled:\n        what = ",
        "    if False:\n        what = ",
        "tests/unit/precision/test_standard_compiled.py -k compile_before",
    ),
    Mutation(
        8,
        "a forward that was compiled after prepare() is the model's own",
        'compiled = getattr(forward, "_torchdynamo_orig_callable", None)',
        "compiled = None",
        "tests/unit/precision/test_standard_compiled.py -k bits_of_eager",
    ),
    Mutation(
        8,
        "a copy is not trained in a loop without wrap",
        "        if module not in self._own and torch.is_grad_enabled():\n",
        "        if self.begun and module not in self._own and torch.is_grad_enabled():\n",
        "tests/unit/precision/test_copies_and_evaluation.py -k not_trained",
    ),
    Mutation(
        8,
        "code of the user's own in evaluating() does not run under autocast",
        '        with self.turn.hold("evaluating()"), torch.no_grad():\n',
        '        with self.turn.hold("evaluating()"), torch.no_grad(), self.prepared.backend.context():\n',
        "tests/unit/precision/test_copies_and_evaluation.py -k computes_as_outside",
    ),
    Mutation(
        8,
        "a model in evaluating() runs as planned in a loop without wrap",
        "        if not self.begun and not self._precision.is_evaluating:\n",
        "        if not self.begun:\n",
        "tests/unit/precision/test_copies_and_evaluation.py -k computes_as_outside",
    ),
    Mutation(
        8,
        "a copy that is prepared itself leaves the hooks of its original",
        "            _drop_hooks_of_originals(module)\n",
        "            pass\n",
        "tests/unit/precision/test_copies_and_evaluation.py -k prepared_itself",
    ),
    Mutation(
        8,
        "a backward in one thread does not stand for those of other models in other threads",
        "        if _calls.own:\n",
        "        if any(each.in_backward for each in _standards.now()):\n",
        "tests/unit/precision/test_standard_threads.py -k while_another_thread",
    ),
    Mutation(
        8,
        "two threads on one model at once are refused",
        '        if self._holder.setdefault("thread", here) != here:\n',
        "        if False:\n",
        "tests/unit/precision/test_standard_threads.py -k two_threads",
    ),
    Mutation(
        8,
        "a call of the model in a second thread does not run without autocast",
        "        if self._precision.turn.elsewhere and not _in_autograd():\n",
        "        if False:\n",
        "tests/unit/precision/test_standard_threads.py -k two_threads",
    ),
    Mutation(
        14,
        "a backward that a hook starts within the same model's is refused",
        "        if within:\n",
        "        if False:\n",
        "tests/unit/precision/test_standard_threads.py -k within_a_backward_of_the_same",
    ),
    Mutation(
        15,
        "an encoder layer is evaluated as it is trained",
        "torch.backends.mha.set_fastpath_enabled(False)",
        "pass",
        "tests/unit/precision/test_products.py -k evaluated_as_it_is_trained",
    ),
    Mutation(
        15,
        "the plan says what products really run in",
        "if ran := products_in(module, half_of(rung.precision)):",
        'if ran := "":',
        "tests/unit/precision/test_products.py -k products_ran_in",
    ),
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
        (
            "norm = (\n"
            "            torch.where(self._overflow > 0, math.inf, norm)\n"
            "            if self._overflow is not None\n"
            "            else norm / loss_scale\n"
            "        )"
        ),
        "norm = norm if self._overflow is not None else norm / loss_scale",
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
        (
            "own = [\n"
            "            module\n"
            "            for module in ready.model.modules()\n"
            "            if next(module.parameters(), None) is not None\n"
            "        ]"
        ),
        "own = [module for module in [ready.model] if next(module.parameters(), None) is not None]",
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
        (
            "self._end_window(\n"
            "                    ready\n"
            "                )  # it was an evaluation: what its forwards left is dropped with the window"
        ),
        "pass  # it was an evaluation: what its forwards left is dropped with the window",
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
        "if forward is not self._forward and not self._is_prepared_forward(forward):",
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
        (
            "built = (\n"
            "            kind.build(self.context) for kind in (Fp8Monitor, FallbackController, WholeRunFallback)\n"
            "        )"
        ),
        "built = (kind.build(self.context) for kind in (FallbackController, WholeRunFallback))",
        "tests/unit/precision/test_api_misuse.py -k never_called",
    ),
)
