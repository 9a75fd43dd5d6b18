"""The protections of checkpoints and resumes: rows 1 to 5, 12 and 25."""

from __future__ import annotations

from mutation import Mutation

SURVIVAL: tuple[Mutation, ...] = (
    Mutation(
        1,
        "a checkpoint is written under another name and renamed whole",
        'temporary = self.root / f"{_TMP}{final.name}"',
        "temporary = final",
        "tests/faults/test_checkpoint_kill.py -k save_killed",
    ),
    Mutation(
        1,
        "what is saved is a copy of the moment",
        "return self._staging.copy(tensors) if self._staging is not None else None",
        "return tensors if self._staging is not None else None",
        "tests/unit/checkpoint/test_saver.py -k state_of_the_moment",
    ),
    Mutation(
        2,
        "never fewer than two that verify",
        "if missing > 0:",
        "if False:",
        "tests/unit/checkpoint/test_policy.py",
    ),
    Mutation(
        4,
        "what changed since it verified is read again",
        "known[0] == self._files(step) and",
        "",
        "tests/unit/checkpoint/test_store.py -k changed_since",
    ),
    Mutation(
        4,
        "times of new files are not relied on",
        "(known[1] or not settled)",
        "True",
        "tests/unit/checkpoint/test_store.py -k so_new",
    ),
    Mutation(
        3,
        "a save that fails is told on the screen at once",
        'self.tracker.tell(saved.step, "checkpoint.failed", text, failures=count)',
        'self.tracker.event(saved.step, "checkpoint.failed", text=text)',
        "tests/faults/test_full_disk.py -k told_waited",
    ),
    Mutation(
        3,
        "a run waits for room",
        'if config.on_failure == "pause" and last != "stop":',
        "if False:",
        "tests/faults/test_full_disk.py -k told_waited",
    ),
    Mutation(
        3,
        "75 only for what was saved",
        "        if not kept.safe:\n            return _lost(run, reason)\n        run",
        "        run",
        "tests/faults/test_full_disk.py -k names_the_steps",
    ),
    Mutation(
        3,
        "a run whose end is not saved is not done",
        "return _lost(run, _with_note(_reason(run), kept) if kept.asked else reason, val_loss)",
        "pass",
        "tests/faults/test_full_disk.py -k not_done",
    ),
    Mutation(
        3,
        "steps are counted by the state",
        "counted |= told |",
        "told |=",
        "tests/faults/test_full_disk.py -k not_done",
    ),
    Mutation(
        3,
        "a last save elsewhere is taken back",
        "back += filter(None, [bring_back(open_store(folder, worker), spare)])",
        "pass",
        "tests/faults/test_full_disk.py -k elsewhere",
    ),
    Mutation(
        3,
        "the last words have a place in reserve",
        "stream.write(os.urandom(_RESERVED))",
        "pass",
        "tests/faults/test_full_disk.py -k last_words",
    ),
    Mutation(
        25,
        "random numbers of a step start on every GPU",
        "            generator.manual_seed(seed)\n",
        "            pass\n",
        "tests/unit/core/test_train_state.py -k every_gpu",
    ),
    Mutation(
        2,
        "a mark waits for its save",
        "if self._now is not None and self._now.step == step:",
        "if False:",
        "tests/unit/checkpoint/test_saver.py -k waits_for_its_save",
    ),
    Mutation(
        3,
        "a save that failed never becomes good",
        "self._failed.add(self._now.step)",
        "pass",
        "tests/unit/checkpoint/test_saver.py -k never_becomes_good",
    ),
    Mutation(
        5,
        "room for three checkpoints",
        "if free < count * bytes_each:",
        "if False:",
        "tests/unit/checkpoint/test_preflight.py",
    ),
    Mutation(
        25,
        "ranks compare what they read",
        "if found and not problems:",
        "if False:",
        "tests/dist/test_different_folders.py",
    ),
)
