"""The model card of an exported checkpoint, with its precision passport: what each layer really ran in. Torch-free.

What ran is read from the checkpoint itself (which layers had left FP8, which slots had ever seen an amax), not from the
plan alone, so that it is right for every checkpoint of a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.config import RunConfig
from harness.core.errors import shown
from harness.core.facts import as_it_ran
from harness.tracking.history import RunHistory, bare, split_slot
from harness.tracking.journal import JOURNAL, read_rows


@dataclass(frozen=True, slots=True)
class Stamp:
    """What the checkpoint of `step` says of itself. versions: of its manifest. fp8: its FP8 part's meta. seen: for each
    of that part's slots, whether it had seen an amax; empty where none are kept.
    """

    step: int
    versions: Mapping[str, str]
    fp8: Mapping[str, Any]
    seen: Sequence[bool]

    def ran(self, plan: Mapping[str, Any]) -> dict[str, str]:
        """Module -> what it ran in, of every layer of `plan`; "unused" if it was to run in FP8 and never did."""
        demoted, fell_to = {bare(name) for name in self.fp8["demoted"]}, self.fp8["lowered"]
        slots = list(zip(self.fp8["slots"], self.seen, strict=True)) if self.seen else []
        silent = {bare(split_slot(slot)[0]) for slot, _ in slots} - {
            bare(split_slot(slot)[0]) for slot, saw in slots if saw
        }
        return {
            layer["module"]: as_it_ran(layer["precision"], fell_to, name in demoted, name in silent)
            for layer in plan["layers"]
            for name in [bare(layer["module"])]
        }


@dataclass(frozen=True, slots=True)
class Contents:
    """Of an exported folder. weights: what they are. loads: the Python that loads them. tokenizer: which one."""

    weights: str
    loads: str
    tokenizer: str


def model_card(history: RunHistory, stamp: Stamp, config: RunConfig, contents: Contents) -> str:
    """README.md, in Markdown."""
    tags = ["hopper-harness", *([" ".join(history.plan["recipe"].split())] if history.plan else [])]
    lines = ["---", "tags:", *(f"- {tag}" for tag in tags), "---", f"# {shown(history.run_dir.name)}", ""]
    lines += [contents.weights, "", "```python", contents.loads, "```", "", "## Training", ""]
    facts = [*_training(history, stamp, config), ("tokenizer", contents.tokenizer)]
    lines += [*_table(("what", ""), facts), "", "## Precision passport", ""]
    if history.plan:
        lines += _passport(history, stamp)
    else:
        lines.append("The run has no plan.json that can be read: what it ran in is not known.")
    return "\n".join([*lines, ""])


def _training(history: RunHistory, stamp: Stamp, config: RunConfig) -> Iterator[tuple[str, str]]:
    step, train, data = stamp.step, config.train, history.run["data"]
    applied = [value for at, value in history.series.get("train/step_applied", {}).items() if at <= step]
    yield "steps", f"{step} of {train.steps}, {sum(value == 0 for value in applied)} updates skipped"
    for key, title in (("train/loss", "training loss"), ("val/loss", "validation loss")):
        points = {at: value for at, value in history.series.get(key, {}).items() if at <= step}
        told = f"{points[max(points)]:.6f} nats per token, after step {max(points)}" if points else "not measured"
        yield title, told
    back = [each for each in history.rollbacks if each.to_step <= step]
    windows = sum(len(each.passed_over) for each in back)
    yield "rollbacks", f"{len(back)}, {windows} windows of the data passed over" if back else "none"
    yield "data", f"`{_last(data.get('source', 'not recorded'))}`, SHA-256 `{data.get('sha256', 'not recorded')}`"
    yield "batch", f"{train.global_batch} samples of {config.data.context} tokens a step"
    yield "seed", str(train.seed)
    args = {key: _last(value) if isinstance(value, str) else value for key, value in config.model.args.items()}
    kind, _, of = config.model.target.partition(":")
    yield "model", f"`{kind}:{_last(of)}`, args `{args}`"
    yield "commit", history.run["tags"].get("git.commit", "not recorded")
    yield "versions", ", ".join(f"{name} {version}" for name, version in sorted(stamp.versions.items()))


def _last(path: object) -> str:
    """A card is for others, whom the folders of this machine do not concern."""
    return Path(str(path)).name


def _passport(history: RunHistory, stamp: Stamp) -> Iterator[str]:
    plan, step = history.plan, stamp.step
    ran = stamp.ran(plan)
    counts = sorted(Counter(ran.values()).items())
    rows = [
        ("recipe", f"{plan['recipe']}, SHA-256 `{plan['recipe_sha256']}`"),
        ("requested", plan["requested"]),
        ("resolved", f"{plan['resolved']} on {plan['tier']}"),
        ("effective", ", ".join(f"{precision}: {count} modules" for precision, count in counts)),
        *(("not taken", text) for text in _not_taken(plan)),
        *(("started before as", text) for text in _elsewhere(history)),
    ]
    yield from _table(("what", ""), rows)
    yield ""
    layers = (
        (f"`{layer['module']}`", layer["precision"], ran[layer["module"]], layer["backend"], layer["reason"])
        for layer in plan["layers"]
    )
    yield from _table(("layer", "planned", f"ran in, at step {step}", "backend", "why"), layers)
    yield ""
    moves = [event for event in history.switches if event["step"] <= step]
    yield "Layers that left FP8, or came back, up to this step:" if moves else "No layer had left FP8 by this step."
    for event in moves:
        told = [f"to BF16: {', '.join(event['demote'])}"] if event.get("demote") else []
        told += [f"back in FP8: {', '.join(event['promote'])}"] if event.get("promote") else []
        told += [f"the whole run to {event['lowered']}"] if event.get("lowered") else []
        yield f"- before step {event['step']}: {'; '.join(told)}"


def _not_taken(plan: Mapping[str, Any]) -> Iterator[str]:
    """The rungs above the one that was taken, and why not."""
    for rung in plan["rungs"]:
        if rung["taken"]:
            return
        yield f"{rung['rung']}: {rung['reason']}"


def _elsewhere(history: RunHistory) -> list[str]:
    """The rungs of the run's earlier starts, if they were others: it may have been stopped and gone on elsewhere."""
    tags = (row.get("tags", {}) for row in read_rows(history.run_dir / JOURNAL, metrics=False) if row["kind"] == "run")
    starts = [
        shown(f"{each['precision.resolved']} on {each.get('tier', '?')}")
        for each in tags
        if "precision.resolved" in each
    ]
    return sorted({*starts[:-1]} - {*starts[-1:]})


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield _row(heading)
    yield "|" + "---|" * len(heading)
    yield from map(_row, rows)


def _row(cells: Sequence[str]) -> str:
    # A name may hold a bar, which would begin another cell.
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
