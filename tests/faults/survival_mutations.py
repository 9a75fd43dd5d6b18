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
    Mutation(
        27,
        "a checkpoint knows the ledger it was saved beside",
        'if not ledger.follows(*meta.get("sealed", (0, ""))):',
        "if False:",
        "tests/faults/test_other_files.py -k runs_own",
    ),
    Mutation(
        27,
        "a ledger older than the journal is found",
        "lost = worker.group.broadcast(journaled if journaled > attempt else 0)",
        "lost = 0",
        "tests/faults/test_other_files.py -k runs_own",
    ),
    Mutation(
        27,
        "a changed ledger is found by its seal",
        "if ledger.seals and ledger.seals[-1] != ledger._next_seal(ledger.seals[:-1]):",
        "if False:",
        "tests/faults/test_other_files.py -k runs_own",
    ),
    Mutation(
        27,
        "a checkpoint is bound to its config and data",
        "if refused := [each for each in problems if each.where not in accepted]:",
        "if refused := []:",
        "tests/faults/test_other_files.py -k held_to",
    ),
)
