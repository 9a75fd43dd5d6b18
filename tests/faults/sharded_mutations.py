"""The protections of a state that several ranks share, and of the checkpoints that they write together."""

from __future__ import annotations

from mutation import Mutation

_SAVES = "tests/unit/checkpoint/test_sharded.py"
_RECOVERY = "tests/unit/checkpoint/test_sharded_recovery.py"

_ENGINE = "tests/dist/test_fsdp.py"

SHARDED: tuple[Mutation, ...] = (
    Mutation(
        1,
        "rank 0 does not commit its own half",
        "waits = sorted(set(range(1, self.ranks)) - found.keys())",
        "waits = []",
        f"{_SAVES} -k own_half",
    ),
    Mutation(
        1,
        "every try of a save has a folder of its own",
        'f"{self.start}-{self._tries}"',
        'f"{self.start}-1"',
        f"{_SAVES} -k try_that_failed",
    ),
    Mutation(
        1,
        "rank 0 alone makes the folder of a save",
        "            meeting.await_folder(folder)\n            _leave_pieces",
        "            folder.mkdir(exist_ok=True)\n            _leave_pieces",
        f"{_SAVES} -k comes_late",
    ),
    Mutation(
        1,
        "only files that a rank has named are committed",
        "if differ := set(os.listdir(folder)) ^ {*files, MANIFEST}:",
        "if differ := set():",
        f"{_SAVES} -k nobody_named",
    ),
    Mutation(
        1,
        "a rank does not remove pieces that may be committed already",
        "            written.clear()\n",
        "            pass\n",
        f"{_SAVES} -k last_word",
    ),
    Mutation(
        1,
        "a rank without memory for a copy keeps the others from changing the state",
        "if meeting is not None and self._on_any_rank(saver is not None and not saver.copied):",
        "if False:",
        f"{_RECOVERY} -k without_memory",
    ),
    Mutation(
        3,
        "a rank whose disk is full says so",
        "            meeting.leave_failure(folder, written, error)\n",
        "            pass\n",
        f"{_SAVES} -k full_disk_of_one_rank",
    ),
    Mutation(
        3,
        "a rank without room for the reason makes an empty file",
        '(folder / f"{FAILED}-{self.rank:05d}.json").open("xb").close()',
        "pass",
        f"{_SAVES} -k without_room",
    ),
    Mutation(
        3,
        "ranks learn that another one has failed in silence",
        'saver.give_up(f"rank {named} could not write its part, nor say why")',
        "pass",
        f"{_RECOVERY} -k failure_on_any",
    ),
    Mutation(
        3,
        "ranks learn that rank 0 has ended a save",
        'saver.give_up("rank 0 has ended this save")',
        "pass",
        f"{_RECOVERY} -k failure_on_any",
    ),
    Mutation(
        4,
        "a checkpoint that lacks a rank's file is not whole",
        "if wrong := set_problems(shards, files):",
        "if wrong := []:",
        f"{_SAVES} -k missing_or_foreign",
    ),
    Mutation(
        4,
        "a piece has the rows of its rank",
        "if tuple(shape) != rows[each].local_shape:",
        "if False:",
        f"{_SAVES} -k something_else",
    ),
    Mutation(
        4,
        "every byte is read again before the commit, by one of the ranks",
        '    if problems := check_files(folder, manifest["files"], meeting.rank, meeting.ranks):\n',
        "    if problems := []:\n",
        f"{_SAVES} -k changes_before_the_commit",
    ),
    Mutation(
        4,
        "ranks that share the reading leave no file out",
        "mine = sorted(files)[rank::ranks]",
        "mine = sorted(files)[rank::ranks][:1]",
        f"{_SAVES} -k share_the_reading",
    ),
    Mutation(
        4,
        "a file that one rank found damaged is damaged for all",
        "    if not wrong:\n        store.verified_together(step)",
        "    if not problems:\n        store.verified_together(step)",
        f"{_RECOVERY} -k named_on_every_rank",
    ),
    Mutation(
        25,
        "hashes of the manifest are compared, not of the rows that each rank holds",
        "mine, files = store.manifest_sha256(step), store.file_names(step)",
        "mine, files = str(ranks.rank), store.file_names(step)",
        f"{_RECOVERY} -k goes_on_with_its_rows",
    ),
    Mutation(
        25,
        "ranks that read different manifests do not go on",
        "    if differ or unread:\n",
        "    if unread:\n",
        f"{_RECOVERY} -k another_folder",
    ),
    Mutation(
        25,
        "a folder that ranks do not share is refused before the first step",
        "found = rank == 0 or _finds(folder, token, min(seconds, _CACHED))",
        "found = True",
        f"{_RECOVERY} -k do_not_share",
    ),
    Mutation(
        25,
        "a load after a validation is seen by the next forward",
        "            self._shards.loaded()\n",
        "            pass\n",
        f"{_ENGINE} -k load_after_a_validation",
    ),
    Mutation(
        22,
        "ranks that were built with different weights are refused",
        "        _require_same_weights(model, device)\n",
        "",
        f"{_ENGINE} -k other_weights",
    ),
    Mutation(
        22,
        "norms of rows are summed over ranks",
        "total, orders = gathered[:, :-1].sum(dim=0), gathered[:, -1]",
        "total, orders = values, gathered[:, -1]",
        f"{_ENGINE} -k every_bit",
    ),
    Mutation(
        22,
        "what every rank holds whole is counted once",
        "if name in rows or world_rank() == 0]",
        "]",
        f"{_ENGINE} -k every_bit",
    ),
    Mutation(
        22,
        "gradients of 0-d parameters are averaged over ranks",
        "        self._average_scalars()\n",
        "",
        f"{_ENGINE} -k every_bit",
    ),
    Mutation(
        22,
        "parameters that only some ranks use do not stop the exchange of gradients",
        "        sharded.set_reduce_scatter_unused_params(True, recurse=False)\n",
        "        pass\n",
        f"{_ENGINE} -k only_some_ranks_use",
    ),
    Mutation(
        22,
        "ranks that call different blocks do not train on",
        "if not self._of_rows.same_order.item():",
        "if False:",
        f"{_ENGINE} -k call_different_blocks",
    ),
    Mutation(
        22,
        "a loop of one's own does not train a sharded model",
        '    problems = sharded_problems("prepare()", model.parameters())\n',
        "    problems: list[Problem] = []\n",
        "tests/dist/test_fsdp.py -k refused_in_a_loop",
    ),
    Mutation(
        22,
        "FP8 layers of a sharded model that get no gradient are noticed",
        "    held = dict(model.named_parameters())\n",
        "    held = {name: torch.zeros(()) for name, _ in model.named_parameters()}\n",
        "tests/dist/test_engine_cells.py -k fsdp",
    ),
)
