"""The pages of the studies have the figures of the results files, to the digit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from statistics import correlation, mean
from typing import Any

import pytest

from benchmarks.evidence import GRID
from benchmarks.held_out import HARMFUL
from benchmarks.held_out_pictures import summary
from benchmarks.intervals import binomial_upper, samples_needed, t_interval
from benchmarks.norms import predicted
from benchmarks.zero_init import CONTROL
from harness.capability.cards import CARDS
from harness.core.files import read_json
from harness.monitors.evidence import FallbackConfig

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results"
FALLBACK = " ".join((ROOT / "docs" / "studies" / "fallback.md").read_text().split())
COST = (ROOT / "docs" / "studies" / "fp8_cost.md").read_text()
COST_STAGES = {"1.4M": "screen", "3M": "quickstart", "10M": "confirm"}
CONTROLS = ("bf16", "ulp_1", "ulp_2", "ulp_3")
"""Variants of the cost study without FP8."""


def percent(figures: dict[str, float]) -> str:
    """As the page has an interval."""
    mean, low, high = (f"{100 * figures[key]:+.2f}" for key in ("mean", "low", "high"))
    return re.sub(r"[+-]0\.00", "0.00", f"{mean} ({low} to {high})")


def span(values: Sequence[float], digits: int = 0) -> str:
    """As the tables have it."""
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def percents(values: Sequence[float]) -> str:
    """A span of differences to bf16."""
    return f"{min(values):+.2%} to {max(values):+.2%}"


def test_three_faults_with_and_without_the_fallback() -> None:
    rows = read_json(RESULTS / "fallback_cpu.json")["rows"]
    assert len(rows) == 9
    for scenario, group in groupby(rows, key=lambda row: row["scenario"]):
        alike = list(group)
        assert [row["seed"] for row in alike] == [0, 1, 2]
        plain, ours, control = (
            percents([row["difference"][name] for row in alike])
            for name in ("plain", "fallback", "control")
        )
        ((layer,),) = {tuple(row["demoted"]) for row in alike}
        steps = span([row["first_demotion"] for row in alike])
        cells = [scenario, plain, ours, f"{control}, 0 switches", f"`{layer}`, {steps}"]
        assert f"| {' | '.join(cells)} |" in FALLBACK
    for row in rows:
        assert (row["promoted"], row["control_switches"]) == ([], 0)
        assert "saturation" not in str(row["evidence"])
    ours = [row["difference"]["fallback"] for row in rows]
    plain = [row["difference"]["plain"] for row in rows]
    assert f"plain FP8 ends {min(plain):.0%} to {max(plain):.0%} above bf16" in FALLBACK
    assert f"between {-min(ours):.2%} under and {max(ours):.2%} over it" in FALLBACK


def test_first_faults() -> None:
    families = read_json(RESULTS / "evidence_faults_cpu.json")["families"]
    assert len(families) == 14
    slowest = 0
    others: list[int] = []
    at_once: dict[str, list[int]] = {"input": [], "weight": [], "gradient": []}
    for name, found in families.items():
        assert list(found["steps"]) == ["1", "2", "4", "10"]
        # Strengths from which on the layer leaves after 5 or 6 steps, however often the fault comes.
        soon = [
            strength
            for number, strength in enumerate(found["strengths"])
            if all(set(steps[number:]) <= {5, 6} for steps in found["steps"].values())
        ]
        took = [step for steps in found["steps"].values() for step in steps if step]
        if soon:
            at_once[name.partition(",")[0]].append(soon[0])
            slowest = max(slowest, *took)
        else:
            others += took
    assert sum(map(len, at_once.values())) == 9
    assert "Nine leave after 5 or 6 steps" in FALLBACK
    assert f"They leave after {min(others)} to {max(others)} steps" in FALLBACK
    assert f"Weaker ones take up to {slowest} steps" in FALLBACK
    assert at_once["gradient"] == [32], "a row"
    weights, inputs = (span(at_once[role]) for role in ("weight", "input"))
    assert f"2^{weights} for weights, 2^{inputs.replace(' to ', ' to 2^')} for inputs" in FALLBACK
    runs = sum(len(found["strengths"]) * len(found["steps"]) for found in families.values())
    assert not any(any(each) for found in families.values() for each in found["others"].values())
    assert f"No other layer left in any of the {runs} runs" in FALLBACK


def test_held_out_faults() -> None:
    faults = read_json(RESULTS / "evidence_held_out_cpu.json")["faults"]
    lines = [line for line in summary(faults).splitlines() if line.startswith("| ") and "(" in line]
    assert len(lines) > 12
    needless: list[int] = []
    for line in lines[1:]:
        _, _, bad, found, stayed, left = line.strip("| ").split(" | ")
        latest = int(re.findall(r"\d+", f"0 {found}")[-1])
        if stayed == "-" and latest <= 7:
            # A family that is not in the table: all of its harmful faults were seen, and soon.
            assert line not in FALLBACK
            assert found.split()[0] == bad
            needless.append(int(left.replace("-", "0")))
        else:
            assert line in FALLBACK
            assert left == "-"
    assert f"Layers left without harm in {sum(needless)} of their runs" in FALLBACK
    second, most = sorted(needless)[-2:]
    assert f"heavy tails of weights ({most}) and of inputs ({second})" in FALLBACK
    harmful = [row for row in faults if row["harm"] >= HARMFUL]
    seen = sum(bool(row["left"]) for row in harmful)
    assert f"Of {len(harmful)} harmful faults {seen} were seen" in FALLBACK
    still = [
        row
        for row in harmful
        if row["duty"] == "every step" and row["family"] != "input, a drifting channel"
    ]
    late = sorted(row["left"] for row in still if row["left"] > 8)
    missed = sum(not row["left"] for row in still)
    soon = len(still) - len(late) - missed
    told = (
        f"Of {len(still)} harmful faults at every step that do not drift {soon} left within 8 steps"
    )
    assert told in FALLBACK
    assert f"{len(late)} after {late[0]} to {late[-1]}, and {missed} not at all" in FALLBACK


def test_healthy_runs() -> None:
    record = read_json(RESULTS / "evidence_healthy_cpu.json")
    runs = record["runs"]
    healthy = [row for row in runs if row["healthy"]]
    assert [(row["dim"], row["lr"], row["warmup"]) for row in runs] == [
        each for each in GRID for _ in range(2)
    ]
    assert (record["healthy"], record["with a demotion"]) == (len(healthy), 0)
    assert not any(row["demotions"] for row in runs)
    assert len(healthy) >= 24
    tighter, lost = record["octaves tighter"], record["healthy runs that lose a layer"]
    at = {statistic: dict(zip(tighter, counts, strict=True)) for statistic, counts in lost.items()}
    assert {each[octaves] for each in at.values() for octaves in (0.0, 0.25)} == {0}
    half, one = (
        {name: each[octaves] for name, each in at.items() if each[octaves]}
        for octaves in (0.5, 1.0)
    )
    assert (half, one) == (
        {"saturation": len(healthy), "even_db": 1},
        {"saturation": len(healthy), "clipped": 1, "even_db": 1},
    ), "as the page says"
    lowest = [row["lowest even_db of a gradient"] for row in runs]
    assert f"gradient in a run is {min(lowest):.1f} to {max(lowest):.1f} dB" in FALLBACK
    assert min(lowest) > record["policy"]["even_db_grad_output"]
    upper = binomial_upper(0, len(healthy))
    assert record["upper bound"] == pytest.approx(upper)
    assert (
        f"No layer left FP8 in any of the {len(runs)} runs; in {len(healthy)} of them" in FALLBACK
    )
    assert f"(95% upper bound of the chance of a demotion: {upper:.0%})" in FALLBACK


def cost_stages() -> dict[str, dict[str, Any]]:
    return {size: read_json(RESULTS / f"cost_{stage}.json") for size, stage in COST_STAGES.items()}


def cost_rows(start: str) -> dict[str, list[str]]:
    """First cell, without its markup -> the others, of all lines that begin so."""
    lines = [
        line.strip("| ").replace("*", "").replace("`", "")
        for line in COST.splitlines()
        if line.startswith(start)
    ]
    return {cells[0]: cells[1:] for cells in (re.split(r" *\| *", line) for line in lines)}


def pairs_of(record: dict[str, Any], variant: str) -> list[float]:
    """The mean over both corpora of every seed, from the losses of the runs."""
    losses = {(name, corpus, seed): loss for name, corpus, seed, loss, *_ in record["losses"]}
    seeds = sorted({seed for name, _, seed in losses if name == variant})
    each = [
        [
            losses[variant, corpus, seed] / mean(losses[name, corpus, seed] for name in CONTROLS)
            - 1
            for seed in seeds
        ]
        for corpus in ("python", "licences")
    ]
    return [mean(both) for both in zip(*each, strict=True)]


def test_cost_of_fp8_answer() -> None:
    rows = cost_rows("| 1") | cost_rows("| 3M")
    for size, record in cost_stages().items():
        result = record["variants"]["fp8"]["result"]
        pooled, corpora = result["pooled"], result["by_corpus"]
        row = rows[f"{size}, {record['size']['steps']}"]
        assert row[:4] == [
            str(pooled["n"]),
            percent(pooled),
            percent(corpora["python"]),
            percent(corpora["licences"]),
        ]
        assert row[4].startswith("yes" if pooled["high"] <= record["target"] else "no"), size
        assert f"{100 * pooled['high']:+.2f}% at" in COST.replace("\n", " "), size
        assert f"{record['runs']} runs" in COST
        assert record["failed"] == 0
        assert not any(row["result"]["lost"] for row in record["variants"].values())
        assert all(figures["low"] < 0 < figures["high"] for figures in (pooled, *corpora.values()))
        over = [figures["high"] > record["target"] for figures in (pooled, *corpora.values())]
        assert all(over) or size == "1.4M"


def test_cost_of_fp8_screen() -> None:
    variants = read_json(RESULTS / "cost_screen.json")["variants"]
    screen = COST[COST.index("### 1.4M") : COST.index("### 3M")]
    cell = r"[-+]?\d\.\d\d \([-+]?\d\.\d\d to [-+]?\d\.\d\d\)"
    shown: dict[str, str] = {}
    for names, cells in re.findall(rf"\| \**([^|]*`)[^|`]*\| \**((?:{cell},? ?)+)", screen):
        shown |= dict(zip(re.findall(r"`(\w+)`", names), re.findall(cell, cells), strict=True))
    assert len(shown) > 8
    pooled = {
        name: row["result"]["pooled"] for name, row in variants.items() if name not in CONTROLS
    }
    assert {name: percent(pooled[name]) for name in shown} == shown
    assert [name for name, row in pooled.items() if not row["low"] < 0 < row["high"]] == [
        "stochastic"
    ]
    means = [row["mean"] for name, row in pooled.items() if name not in shown]
    low, high = (
        percent({"mean": mean, "low": 0, "high": 0}).split()[0] for mean in (min(means), max(means))
    )
    assert f"The other {len(means)} variants have means of {low} to {high}, and" in screen


def test_cost_of_fp8_larger_sizes() -> None:
    for size, record in cost_stages().items():
        if size == "1.4M":
            continue
        rest = {
            name: row["result"]
            for name, row in record["variants"].items()
            if name not in (*CONTROLS, "fp8")
        }
        told = {
            f"{size} {name}": [percent(row["pooled"]), percent(row["to_fp8"])]
            for name, row in rest.items()
        }
        assert cost_rows(f"| {size} `") == told
    record = cost_stages()["10M"]
    pairs = pairs_of(record, "fp8")
    assert asdict(t_interval(pairs)) == pytest.approx(record["variants"]["fp8"]["result"]["pooled"])
    text = " ".join(COST.split())
    eight = percent(asdict(t_interval(pairs[:8])))
    assert f"8 seeds on both corpora and {eight}, an upper end as wanted" in text
    assert f"one of them with {100 * max(pairs[8:]):+.2f}" in text
    for recipe in ("most_recent", "block_e4m3"):
        assert f"{correlation(pairs, pairs_of(record, recipe)):.2f})" in text


def test_cost_of_fp8_spread() -> None:
    farthest: list[str] = []
    seeds: list[str] = []
    for record in cost_stages().values():
        losses = {(name, corpus, seed): loss for name, corpus, seed, loss, *_ in record["losses"]}
        groups = [
            [losses[name, corpus, seed] for name in CONTROLS if (name, corpus, seed) in losses]
            for corpus, seed in sorted({(corpus, seed) for _, corpus, seed in losses})
        ]
        apart = [max(group) / min(group) - 1 for group in groups if len(group) == len(CONTROLS)]
        farthest.append(f"{100 * max(apart):.2f}")
        deviation = record["variants"]["fp8"]["result"]["pooled"]["sd"]
        seeds.append(str(samples_needed(deviation, record["target"])))
    text = " ".join(COST.split())
    assert "up to {}, {} and {} apart at 1.4M, 3M and 10M".format(*farthest) in text
    assert "would take {}, {} and {} seeds".format(*seeds) in text


def test_limits_of_common_parts_and_small_groups() -> None:
    results = read_json(RESULTS / "common_mode_cpu.json")["results"]
    parts = {(row["role"], row["part"], row["size"]): row for row in results["parts"]}
    groups = {(row["role"], row["bits"], row["rows"]): row for row in results["groups"]}

    def loss_over_bf16(part: str) -> str:
        rows = [
            row
            for row in results["training"]
            if (row["role"], row["part"], row["size"]) == ("input", part, 16)
        ]
        assert not any(row["left"] for row in rows)
        ratios = sorted(row["fallback"] / row["bf16"] for row in rows)
        return f"ends at {ratios[0]:.1f} to {ratios[-1]:.1f} times that of bf16"

    policy = FallbackConfig()
    offset = parts["input", "offset", 16]
    assert f"an input N(0, 1) + 16 keeps {offset['left_db']} dB of its signal" in FALLBACK
    assert offset["centred_db"] > policy.centred_db == 5
    assert f"and the loss {loss_over_bf16('offset')} ([figures]" in FALLBACK

    near, far = (parts["input", "direction", size] for size in (16, 32))
    told = f"beside one 16 times as large keeps {near['left_db']} dB, beside one 32 times as large {far['left_db']} dB"
    assert told in FALLBACK
    figures = [row[name] for row in (near, far) for name in ("sqnr_db", "even_db", "centred_db")]
    assert f"all figures say {int(min(figures))} dB or more" in FALLBACK
    assert f"at 16 the loss {loss_over_bf16('direction')}" in FALLBACK

    shares = (0.062, 0.143, 0.167)
    near = min(groups["input", -16, share]["even_db"] for share in shares)
    seventh, sixth = (groups["input", -24, share]["even_db"] for share in shares[1:])
    assert sixth < policy.even_db_input < min(near, seventh)
    assert f"{near} dB or more then (limit: {policy.even_db_input:.0f} dB)" in FALLBACK
    assert f"a sixth is seen ({sixth} dB), a seventh is not ({seventh} dB)" in FALLBACK
    lost = [groups["gradient", -34, share]["even_db"] for share in shares[1:]]
    assert min(lost) > policy.even_db_grad_output
    assert f"at 2^-34: {lost[0]} dB with a seventh, {lost[1]} dB with a sixth" in FALLBACK


def test_starts_from_zero() -> None:
    record = read_json(RESULTS / "zero_init_cpu.json")
    starts = [row for row in record["runs"] if row["model"] != CONTROL]
    kept = sum(not row["left"] for row in starts)
    lost = [(row["model"], row["rate"], row["warmup"]) for row in record["runs"] if row["left"]]
    assert f"in {kept} of these {len(starts)} starts no layer leaves FP8" in FALLBACK
    assert {rate for _, rate, _ in lost} == {3e-2}
    assert [(row["model"], row["rate"], row["warmup"]) for row in record["harm"]] == lost
    eight = [
        run for row in record["harm"] for run in row["losses"]["fallback"] if len(run["left"]) == 8
    ]
    assert len(eight) == 2
    assert "Two of the six runs of the ConvNet from zero go to BF16 for good" in FALLBACK
    for row in record["harm"]:
        assert len(row["losses"]["bf16"]) == 6
        # No start in which FP8 could be shown to be worse than bf16.
        assert row["over bf16"]["FP8 without the fallback"]["late"][1] < 1


def test_what_centred_db_costs() -> None:
    rows = read_json(RESULTS / "centred_cpu.json")["results"]
    ratios = {
        (row["size"], row["casts"]): f"{row['ratio']:.3f}"
        for row in rows
        if row["steps"] == "sampled"
    }
    kernel = f"{ratios['tiny', 'kernel']} / {ratios['12M', 'kernel']}"
    benchmarks = (ROOT / "docs" / "studies" / "benchmarks.md").read_text()
    assert f"| {kernel}; {ratios['tiny', 'torch']} |" in benchmarks


def test_an_fp8_head() -> None:
    record = read_json(RESULTS / "head_cpu.json")
    rows = record["results"]["rows"]
    assert f"| | difference, {len(rows)} seeds |" in COST
    assert f"`{record['command']}`" in COST
    names = {"an ulp apart": "weights an ulp apart, head in BF16", "FP8 head": "FP8 head"}
    for kind, name in names.items():
        shares = [row["loss"][kind] / row["loss"]["BF16 head"] - 1 for row in rows]
        found = t_interval(shares)
        line = f"| {name} | {found.mean:+.2%} ({found.low:+.2%} to {found.high:+.2%}) |"
        assert line in COST
    assert not any(row["left"]["FP8 head"] for row in rows)


def test_norms_in_float64() -> None:
    page = " ".join((ROOT / "docs" / "studies" / "guard.md").read_text().split())
    record = read_json(RESULTS / "norms_cpu.json")
    assert f"`{record['command']}`" in page
    row, ms = record["measured"], record["measured"]["milliseconds"]
    ratio, update, step = (
        [row[name][key] for key in ("ratio", "ratio_min", "ratio_max")]
        for name in ("float64 over float32", "added, of norm and AdamW", "added, of a step")
    )
    millions = f"{row['parameters'] / 1e6:.1f}M"
    times = f"{ms['norm in float64']:.0f} ms over {ms['norm in float32']:.0f} ms"
    for figure in (
        f"norm of {millions} gradients in float64, over float32 | {{:.2f}} ({{:.2f}} to {{:.2f}}), {times} |".format(
            *ratio
        ),
        "norm and fused AdamW | {:.0%} ({:.0%} to {:.0%}) |".format(*update),
        f"a step of {row['tokens']} tokens; less with more tokens | {{:.1%}} ({{:.1%}} to {{:.1%}}) |".format(
            *step
        ),
        f"error of the float32 norm | {row['error of float32']:.1e} |",
    ):
        assert figure in page

    # The prediction is the datasheets'.
    found = {name: predicted(card, row["parameters"], 4) for name, card in CARDS.items()}
    assert record["predicted"] == {
        name: {"float32": each, "16 bits": predicted(CARDS[name], row["parameters"], 2)}
        for name, each in found.items()
    }
    limited = {name: each for name, each in found.items() if each["ratio"] > 1}
    assert set(limited) == {"T4", "A10"}
    ratios = " and ".join(f"{limited[name]['ratio']:.2f}" for name in ("T4", "A10"))
    more = " and ".join(
        f"{limited[name]['float64 ms'] - limited[name]['float32 ms']:.2f}" for name in ("T4", "A10")
    )
    assert f"{ratios} times the read, {more} ms more for {millions} parameters" in page
    narrow = {name: each["16 bits"]["ratio"] for name, each in record["predicted"].items()}
    assert {name for name, each in narrow.items() if each > 1} == {
        "T4",
        "A10",
        "RTX4090",
        "L4",
        "L40S",
    }
    assert (
        "it is {T4:.2f} on T4, {A10:.2f} on A10, {RTX4090:.2f} on RTX 4090, {L4:.2f} on L4 and {L40S:.2f} on L40S"
    ).format(**narrow) in page
