"""The fault matrix: what can go wrong with a run, and what must happen then: rows of docs/studies/reliability.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """number: stable; the marker `faults(1)`, figures and mutation_list refer to it."""

    number: int
    fault: str
    must: str


MATRIX = (
    Row(1, "SIGKILL at any point of a save", "the newest complete checkpoint loads"),
    Row(
        2,
        "killed in retention or a rollback",
        "at least two checkpoints verify; repeated, it ends the same",
    ),
    Row(
        3,
        "disk full, I/O error, a failing fsync",
        "the save is an error and leaves nothing; training goes on",
    ),
    Row(
        4,
        "a shard cut short, a bit flipped in it or the manifest",
        "found, set aside; the one before loads",
    ),
    Row(
        5,
        "folder read-only, gone, or too small",
        "refused before any work, with figure and fix",
    ),
    Row(
        6,
        "SIGTERM, SIGUSR1, Ctrl-C, to a rank or the launcher; twice",
        "step finished and saved; outcome.json says so",
    ),
    Row(
        7,
        "two runs in one folder; a stale lock",
        "the second is refused, the owner named; a dead owner's lock is free",
    ),
    Row(
        8,
        "NaN or Inf in a batch",
        "samples named, all ranks skip, no state changes",
    ),
    Row(9, "a label out of range", "named before any kernel reads it"),
    Row(
        10,
        "NaN or Inf in one layer, forward or backward",
        "module, direction, tensor, sample named",
    ),
    Row(
        11,
        "gradient or loss 10, 100, 1000 times too large",
        "clipped, skipped, rolled back; halted within budget",
    ),
    Row(12, "NaN fed to the detectors", "later decisions do not change"),
    Row(13, "a window bad again after a rollback", "skipped once, then a halt: no loop"),
    Row(14, "a loss scale that collapses, or only grows", "halt at its floor; held at its cap"),
    Row(
        15,
        "amax 0, Inf or NaN in a history",
        "scale kept, Inf dropped, the next update recovers",
    ),
    Row(
        16,
        "saturation or underflow storm in a layer; oscillation",
        "it moves to BF16; its stays get longer",
    ),
    Row(17, "a skipped step", "weights, moments, FP8 state keep every bit"),
    Row(
        18,
        "MLflow refuses, answers 500, hangs, is locked or gone",
        "no step waits; rows delivered later, once, in order",
    ),
    Row(19, "the journal's disk is full", "lost rows counted and reported; training goes on"),
    Row(20, "a rank killed or frozen", "every rank ends, no orphan, last checkpoint valid"),
    Row(21, "one bit differs on one rank", "parameter named; all ranks return to one state"),
    Row(22, "NaN on one rank only", "every rank skips"),
    Row(
        23,
        "data missing, corrupt, cut short, slow",
        "named, recorded; skipped or fatal, by policy",
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
    Row(26, "the clock jumps", "order by step; durations by a clock without jumps"),
    Row(
        27,
        "the run's own files lost, swapped or older",
        "refused by name; never silently another run",
    ),
)
