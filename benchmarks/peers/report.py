"""From turns to figures, and from figures to a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.agreement import disagreement, worst
from benchmarks.peers.loops import LOOPS, PLAIN
from harness.core.timing import spread

GIB = 2**30
FORMULA = (
    "model TFLOP/s = FLOPs of a step / its median seconds / 1e12; FLOPs = 3 x those of forward, which are "
    "6 N + 12 L H Q T a token of a Transformer (PaLM, arXiv 2204.02311, appendix B), whatever a loop computes again"
)
Turn = Mapping[str, Any]


def figures(turns: Mapping[str, Sequence[Turn | str]]) -> dict[str, dict[str, Any]]:
    """Figures of every loop, or {"error": why it has none}.

    turns: loop -> what each round gave, or the error that it ended with. The loop `PLAIN` is the reference: without it
    no loop has figures.
    """
    broken = next((turn for turn in turns[PLAIN] if isinstance(turn, str)), None)
    if broken is not None:
        return {name: {"error": f"{PLAIN}: {broken}"} for name in turns}
    reference: list[Turn] = [turn for turn in turns[PLAIN] if not isinstance(turn, str)]
    return {name: _figures(name, mine, reference) for name, mine in turns.items()}


def _figures(name: str, turns: Sequence[Turn | str], reference: Sequence[Turn]) -> dict[str, Any]:
    precision = LOOPS[name].precision
    good: list[Turn] = []
    for turn, other in zip(turns, reference, strict=True):
        error = turn if isinstance(turn, str) else disagreement(precision, turn, other)
        if error or isinstance(turn, str):
            return {"error": error}
        good.append(turn)
    seconds = spread([turn["seconds"] for turn in good])
    ratios = [
        mine["seconds"] / other["seconds"] for mine, other in zip(good, reference, strict=True)
    ]
    differences = [
        worst(mine["losses"], other["losses"]) for mine, other in zip(good, reference, strict=True)
    ]
    return {
        "precision": precision,
        "seconds": seconds,
        "ratio": spread(ratios),
        "tokens_per_second": good[0]["tokens"] / seconds["median"],
        "model_tflops": reference[0]["flops"] / seconds["median"] / 1e12,
        "peak_gib": max(turn["peak_bytes"] for turn in good) / GIB,
        "first_loss": good[0]["losses"][0],
        "loss": good[0]["losses"][-1],
        "loss_difference": max(differences),
        "lines": good[0]["lines"],
    }


HEAD = (
    "loop",
    "precision",
    "tokens/s",
    "time of a step over plain PyTorch",
    "peak GiB",
    "model TFLOP/s",
    "loss",
    "largest difference",
    "lines",
)


def cells(name: str, row: Mapping[str, Any]) -> list[str]:
    """A line of the table, by the columns of `HEAD`; of a loop without figures, its name and why."""
    if reason := row.get("error") or row.get("absent"):
        return [name, LOOPS[name].precision, reason]
    ratio = row["ratio"]
    return [
        name,
        row["precision"],
        f"{row['tokens_per_second']:,.0f}",
        f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})",
        f"{row['peak_gib']:.2f}",
        f"{row['model_tflops']:.3g}",
        f"{row['loss']:.4f}",
        f"{row['loss_difference']:.3%}",
        str(row["lines"]),
    ]


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures of one shape as a Markdown table."""
    return _markdown(HEAD, [cells(name, row) for name, row in rows.items()])


def losses(shapes: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """A CPU's record as a Markdown table without times: last loss, its largest difference, lines of user code.

    shapes: shape -> loop -> figures, of which each loop has them for all shapes or for none.
    """
    head = ("loop", "precision", *(f"`{shape}`" for shape in shapes), "lines")
    lines: list[list[str]] = []
    for name in next(iter(shapes.values())):
        rows = [loops[name] for loops in shapes.values()]
        if any("loss" not in row for row in rows):
            continue
        found = [f"{row['loss']:.4f} ({row['loss_difference']:.3%})" for row in rows]
        counts = ", ".join(dict.fromkeys(str(row["lines"]) for row in rows))
        lines.append([name, rows[0]["precision"], *found, counts])
    return _markdown(head, lines)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, *rows]
    text = [f"| {' | '.join(line)} |" for line in lines]
    text.insert(1, "|" + "---|" * len(head))
    return "\n".join(text)
