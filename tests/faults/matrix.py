"""The fault matrix: what can go wrong with a run, and what must happen then, row by row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """number: stable, used by the marker `faults(1)`, by figures and by mutation_list."""

    number: int
    fault: str
    must: str


MATRIX = (
    Row(1, "killed (SIGKILL) at any point of a save", "the newest complete checkpoint loads"),
    Row(
        2,
        "killed in retention or in a rollback",
        "at least two checkpoints verify; done again, it ends the same",
    ),
    Row(
        3,
        "disk full, I/O error, a failing fsync",
        "the save fails loudly, nothing is left over, training goes on",
    ),
    Row(
        4,
        "a shard cut short, a bit flipped in a shard or manifest",
        "found always, set aside, the one before loads",
    ),
    Row(
        5,
        "folder read-only, gone, or too small",
        "refused before any work starts, with the figure and the fix",
    ),
    Row(
        6,
        "SIGTERM, SIGUSR1, Ctrl-C, to a rank or only the launcher; twice",
        "step finished, saved, outcome.json",
    ),
    Row(
        7,
        "two runs in one folder; a stale lock",
        "the second is refused and told the owner; a dead owner's is free",
    ),
    Row(8, "NaN or Inf in a batch", "samples named, step skipped on all ranks, state unchanged"),
    Row(9, "a label out of range", "named before any kernel sees it"),
    Row(
        10,
        "NaN or Inf in one layer, forward or backward",
        "module, direction, tensor and sample named",
    ),
    Row(
        11,
        "gradient or loss 10, 100, 1000 times too large",
        "clipped or skipped; rolled back; halted within budget",
    ),
    Row(12, "NaN fed to the detectors", "later decisions are the same"),
    Row(13, "the same window bad again after a rollback", "passed over once, then a halt: no loop"),
    Row(14, "a loss scale that collapses, or only grows", "halt at its floor; held at its cap"),
    Row(
        15,
        "amax 0, Inf or NaN in a history",
        "scale kept, Inf taken out, recovered at the next update",
    ),
    Row(
        16,
        "saturation or underflow storm in a layer, oscillation",
        "that layer to BF16; ever longer stays",
    ),
    Row(17, "a skipped step", "weights, moments and FP8 state bit-equal"),
    Row(
        18,
        "MLflow refuses, answers 500, hangs, is locked or gone",
        "no step waits; delivered once, in order, later",
    ),
    Row(19, "the journal's disk is full", "rows dropped are counted and told; training goes on"),
    Row(20, "a rank killed or frozen", "every rank ends, no orphan, the last checkpoint is valid"),
    Row(21, "one bit differs on one rank", "parameter named, all ranks back to one state"),
    Row(22, "NaN on one rank only", "every rank skips"),
    Row(
        23,
        "data missing, corrupt, cut short or slow to come",
        "named; policy skip or fail; recorded",
    ),
    Row(
        24,
        "hostile pickle, YAML, header, path, link, text",
        "never executed or obeyed; refused by name, in bounded time",
    ),
    Row(
        25,
        "resume on another world size, recipe, tier, torch",
        "global data order kept; else a clear refusal",
    ),
    Row(26, "the clock jumps", "order by step; durations from a clock that does not jump"),
    Row(
        27,
        "the run's own files lost, swapped, older",
        "refused by name: never another run in silence",
    ),
)
