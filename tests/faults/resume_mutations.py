"""What a resume must restore, and see: rows 1, 2, 4, 12 and 25."""

from __future__ import annotations

from mutation import Mutation

RESUME: tuple[Mutation, ...] = (
    Mutation(
        1,
        "numpy's generator is restored",
        'np.random.set_state(("MT19937", key, position, has_gauss, gauss))',
        "pass",
        "tests/faults/test_resume_sweep.py -k killed_fp8",
    ),
    Mutation(
        1,
        "Python's generator is restored",
        "random.setstate((version, tuple(words), gauss_next))",
        "pass",
        "tests/faults/test_resume_sweep.py -k killed_fp8",
    ),
    Mutation(
        1,
        "detector windows are restored",
        "monitor.load_state_dict(meta[monitor.key])",
        "pass",
        "tests/faults/test_resume_sweep.py -k killed_fp8",
    ),
    Mutation(
        1,
        "demoted layers are restored",
        'self.switch(meta["demoted"], ())',
        "pass",
        "tests/faults/test_resume_sweep.py -k killed_fp8",
    ),
    Mutation(
        1,
        "FP8 scales are restored",
        'self.scale.copy_(tensors["scale"])',
        "pass",
        "tests/faults/test_resume_sweep.py -k killed_fp8",
    ),
    Mutation(
        1,
        "applied updates are restored",
        'state[key] = value\n        self.applied.copy_(tensors["applied"])',
        "state[key] = value",
        "tests/faults/test_resume_sweep.py -k killed_fp8",
    ),
    Mutation(
        1,
        "windows passed over stay so",
        "if skipped <= index:",
        "if False:",
        "tests/faults/test_resume_sweep.py -k counts_once",
    ),
    Mutation(
        1,
        "a last step validated again is told once",
        'if row.get("step", -1) < resume_step - 1:',
        'if row.get("step", -1) < resume_step:',
        "tests/faults/test_resume_sweep.py -k only_its_outcome",
    ),
    Mutation(
        4,
        "files are hashed",
        'if file_entry(path)["sha256"] != entry.get("sha256"):',
        "if False:",
        "tests/faults/test_bit_flips.py -k every_flipped",
    ),
    Mutation(
        4,
        "the manifest has its own hash",
        "if raw != expected:",
        "if False:",
        "tests/faults/test_bit_flips.py -k every_flipped",
    ),
    Mutation(
        4,
        "links are refused",
        "if not stat.S_ISREG(path.lstat().st_mode):",
        "if False:",
        "tests/faults/test_bit_flips.py -k a_link",
    ),
    Mutation(
        4,
        "a run whose checkpoints are all damaged does not start over",
        "        if damaged:\n",
        "        if False:\n",
        "tests/faults/test_bit_flips.py -k all_damaged",
    ),
    Mutation(
        2,
        "how far checkpoints are from good is in the checkpoint",
        (
            "self._waiting = {\n"
            "            each: count for each, count in counts.items() if each in there and each not in marked\n"
            "        }"
        ),
        "self._waiting = {}",
        "tests/unit/checkpoint/test_policy.py",
    ),
    Mutation(
        12,
        "rank times must be finite",
        "if not 0 < fastest <= slowest < math.inf:",
        "if not fastest > 0:",
        "tests/faults/test_detector_windows.py",
    ),
    Mutation(
        12,
        "skipped steps are no evidence",
        "        if not facts.applied:\n            return quiet\n        if facts.applied_steps <=",
        "        if facts.applied_steps <=",
        "tests/faults/test_detector_windows.py",
    ),
    Mutation(
        12,
        "skipped steps are not clipped ones",
        "if not facts.applied or facts.applied_steps <= self.warmup_steps:",
        "if facts.applied_steps <= self.warmup_steps:",
        "tests/faults/test_detector_windows.py",
    ),
    Mutation(
        12,
        "an infinite norm is no growth",
        "self._infinite = math.isinf(norm)",
        "self._infinite = math.isinf(norm); self._growing |= self._infinite",
        "tests/faults/test_detector_windows.py -k every_verdict",
    ),
    Mutation(
        12,
        "the loss window takes finite applied losses",
        "if not why and math.isfinite(facts.loss):",
        "if True:",
        "tests/faults/test_detector_windows.py",
    ),
    Mutation(
        25,
        "no loss scale, no collapse",
        "context.scales_loss",
        "True",
        "tests/faults/test_resume_elsewhere.py -k fp16_scaler-bf16",
    ),
    Mutation(
        25,
        "the window of an unknown monitor is refused",
        "        if unknown:\n            raise CheckpointError(\n",
        "        if False:\n            raise CheckpointError(\n",
        "tests/unit/monitors/test_registry.py -k unknown",
    ),
    Mutation(
        25,
        "FP8 state is new after a run without FP8",
        'if not meta["slots"]:\n            self.history.zero_()',
        "if False:\n            self.history.zero_()",
        "tests/faults/test_resume_elsewhere.py -k bf16-fp8_hybrid",
    ),
    Mutation(
        25,
        "shapes are compared",
        "if a.shape != b.shape or a.dtype != b.dtype:",
        "if False:",
        "tests/faults/test_resume_elsewhere.py -k other_sizes",
    ),
    Mutation(
        1,
        "what an optimizer counts in itself is restored",
        'self._count(meta.get("counted", {}))',
        "pass",
        "tests/unit/optim/test_kinds.py -k continues_bit_identically",
    ),
    Mutation(
        1,
        "quantised moments are restored",
        "for inner, tensor in _inner(now).items()\n        }",
        "for inner, tensor in _inner(now).items()\n            if not inner\n        }",
        "tests/unit/optim/test_kinds.py -k continues_bit_identically",
    ),
    Mutation(
        17,
        "an optimizer that only says it reads the gate is refused",
        "if takes_found_inf(optimizer) and not torch.equal(before, copy):",
        "if False:",
        "tests/unit/optim/test_kinds.py -k cannot_gate",
    ),
    Mutation(
        11,
        "embeddings keep whole moments",
        (
            "state = {\n"
            "                key: torch.zeros_like(param)\n"
            "                if id(param) in whole\n"
            "                else optimizer._new_buffer(param, signed)\n"
            "                for key, signed in moments.items()\n"
            "            }"
        ),
        "state = {key: optimizer._new_buffer(param, signed) for key, signed in moments.items()}",
        "tests/unit/optim/test_kinds.py -k embeddings_too",
    ),
    Mutation(
        25,
        "DeepSpeed refuses what it cannot save",
        "problems += refused_by(worker.engine, config.train)",
        "pass",
        "tests/e2e/test_optimizer_runs.py -k deepspeed",
    ),
    Mutation(
        25,
        "a changed key needs --accept-changed",
        "elif not change.key.startswith(RESUME_MAY_CHANGE) and change.key not in accepted:",
        "elif False:",
        "tests/e2e/test_resume.py -k refused_by_name",
    ),
    Mutation(
        25,
        "other data are not to be accepted",
        'if key.startswith("data.") and key not in DATA_MAY_CHANGE:',
        "if False:",
        "tests/e2e/test_resume.py -k cannot_be_accepted",
    ),
    Mutation(
        25,
        "a change that does not load is not written",
        "if not start.resuming:\n            if start.source:",
        "if True:\n            if start.source:",
        "tests/e2e/test_resume.py -k cannot_be_accepted",
    ),
    Mutation(
        25,
        "a jump of the learning rate is told",
        "if jump := lr_jump(",
        "if False and lr_jump(",
        "tests/e2e/test_resume.py -k jump_of_the_rate",
    ),
    Mutation(
        25,
        "a replay takes the config of before a change",
        'later = [event for event in self.changed if event["step"] >= step]',
        "later = []",
        "tests/e2e/test_resume.py -k written_down",
    ),
    Mutation(
        23,
        "a first loss that cannot be one is told",
        (
            "if (\n"
            "            facts.step != 1\n"
            "            or not math.isfinite(facts.loss)\n"
            "            or LOW_FIRST * blind <= facts.loss <= HIGH_FIRST * blind\n"
            "        ):"
        ),
        "if True or LOW_FIRST * blind <= facts.loss <= HIGH_FIRST * blind:",
        "tests/unit/monitors/test_first_loss.py -k blind",
    ),
    Mutation(
        4,
        "a damaged checkpoint that eval, sample and export pass over is named",
        "        if store.damaged:\n",
        "        if False:\n",
        "tests/unit/tools/test_export.py -k damaged_weights",
    ),
    Mutation(
        4,
        "a damaged good checkpoint that a rollback passes over is named",
        "self.good.damaged_good(newest) if",
        "() if",
        "tests/unit/checkpoint/test_passed_over.py -k rollback",
    ),
    Mutation(
        4,
        "a damaged last save is not replaced by an older one beside it",
        (
            "raise CheckpointError(\n"
            "                lost\n"
            "            )  # the last save itself: an older one beside it must not stand for it unasked"
        ),
        "pass  # the last save itself: an older one beside it must not stand for it unasked",
        "tests/unit/checkpoint/test_passed_over.py -k last_save",
    ),
    Mutation(
        25,
        "the card of a run names the recipe of every stretch",
        '*(("trained under", text) for text in _recipes(history, step)),',
        "",
        "tests/unit/tools/test_export.py -k stretch",
    ),
    Mutation(
        25,
        "a checkpoint is not described by the plan of another recipe",
        'if self.recipe != plan["recipe_sha256"]:',
        "if False:",
        "tests/unit/tools/test_export.py -k stretch",
    ),
)
