"""The protections of the guard, each with the tests that notice its absence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """row: of the fault matrix in docs/guard.md. protection: what is taken away. test: pytest arguments."""

    row: int
    protection: str
    file: str
    old: str
    new: str
    test: str


MUTATIONS = (
    Mutation(
        8,
        "unfit samples gate the update",
        "harness/step.py",
        " | (told[1:4].amax() > 0)",
        "",
        "tests/faults/test_bad_data.py -k leave_no_trace",
    ),
    Mutation(
        9,
        "samples are checked before the forward pass",
        "harness/step.py",
        "found = check_batch(inputs, targets, run.task.vocab_size)",
        "found = 0",
        "tests/faults/test_bad_data.py -k label_out_of_range",
    ),
    Mutation(
        10,
        "the first module that spoils its output is the one named",
        "harness/monitors/nonfinite.py",
        "if call.clean and spoiled and self._now.forward is None:",
        "if call.clean and spoiled:",
        "tests/unit/monitors/test_nonfinite.py",
    ),
    Mutation(
        11,
        "the gate on the gradient norm",
        "harness/engines/torch_engine.py",
        " | (norm > limits.norm)",
        "",
        "tests/faults/test_ladder.py -k gradient-1000",
    ),
    Mutation(
        11,
        "the gate on the loss",
        "harness/step.py",
        "(over | ~torch.isfinite(mean_loss)",
        "(~torch.isfinite(mean_loss)",
        "tests/faults/test_ladder.py -k loss-10",
    ),
    Mutation(
        11,
        "skips in a row roll back",
        "harness/monitors/gradients.py",
        "if run >= self.max_consecutive_skips:",
        "if run >= 10**9:",
        "tests/faults/test_ladder.py -k from_memory",
    ),
    Mutation(
        12,
        "what was skipped stays out of the detector's window",
        "harness/monitors/robust.py",
        '    if facts.applied:\n        return ""\n',
        '    return ""\n',
        "tests/unit/monitors/test_gradient_monitor.py",
    ),
    Mutation(
        13,
        "a rollback passes over the windows that did it",
        "harness/recovery.py",
        "incidents.skipped_windows = sorted({*incidents.skipped_windows, *bad})",
        "bad = []",
        "tests/faults/test_ladder.py -k from_memory",
    ),
    Mutation(
        13,
        "rollbacks have a budget",
        "harness/responder.py",
        "if self.incidents.rollbacks >= self.guard.max_rollbacks:",
        "if self.incidents.rollbacks >= 10**9:",
        "tests/unit/test_responder.py",
    ),
    Mutation(
        14,
        "the loss scale has a floor",
        "harness/precision/loss_scale.py",
        "scale.clamp(config.floor, config.cap)",
        "scale.clamp(0.0, config.cap)",
        "tests/unit/precision/test_loss_scale.py",
    ),
    Mutation(
        14,
        "the loss scale has a cap",
        "harness/precision/loss_scale.py",
        "scale.clamp(config.floor, config.cap)",
        "scale.clamp(config.floor)",
        "tests/faults/test_loss_scale_collapse.py",
    ),
    Mutation(
        15,
        "an infinite amax is taken out of the history",
        "harness/precision/backends/arena.py",
        "if self.config.scrub_inf:",
        "if False:",
        "tests/faults/test_fp8_storms.py -k damaged_histories",
    ),
    Mutation(
        16,
        "the fallback demotes",
        "harness/precision/fallback.py",
        "demote, stuck = leaving[: max(0, room)], leaving[max(0, room) :]",
        "demote, stuck = [], []",
        "tests/faults/test_fp8_storms.py::test_a_layer_in_a_storm_leaves_fp8_within_two_windows[down]",
    ),
    Mutation(
        17,
        "a skipped step restores the FP8 histories",
        "harness/precision/backends/arena.py",
        "self.history.copy_(torch.where(skipped, history, self.history))",
        "pass",
        "tests/faults/test_ladder.py -k gradient-1000",
    ),
    Mutation(
        21,
        "ranks compare their weights",
        "harness/monitors/ranks.py",
        "if facts.diverged:",
        "if False:",
        "tests/faults/test_rank_divergence.py -k one_bit",
    ),
    Mutation(
        22,
        "ranks agree on the gate",
        "harness/engines/torch_engine.py",
        "skip = self.max_(agree)[0].clone()",
        "skip = agree[0].clone()",
        "tests/dist/test_engines_ddp.py -k fault_on_one_rank",
    ),
)
