"""NaN and infinity fed to every monitor of a run: of the steps after them it says what it would have said.

The steps without a fault are the same in both series. They carry growth, spikes, clipping, storms and stragglers, so
that most monitors do speak. Windows go through JSON on the way, as through a checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from harness.capability.probe import probe
from harness.core.config import DataConfig, load_config
from harness.core.facts import ROLES, SlotStats, StepFacts
from harness.core.protocols import Monitor
from harness.data.batches import TokenBatches
from harness.data.tokens import prepare
from harness.models.gpt import build
from harness.monitors.base import MonitorContext
from harness.monitors.fallback import FallbackController
from harness.monitors.registry import MonitorsPart, build_monitors
from harness.precision.convert import build_backend
from harness.precision.loss_scale import build_loss_scale
from harness.precision.plan import make_plan, pad_numbers, resolve
from harness.precision.recipe import load_recipe

STEPS = 300
TRIALS = int(os.environ.get("FAULTS_WINDOWS", "100"))
BAD = (math.nan, math.inf, -math.inf)
SLOTS = ("amax", "scale", "saturation", "clipped", "underflow", "sqnr_db")
BuildMonitors = Callable[[], list[Monitor]]


@pytest.fixture(scope="module", params=["fp8_hybrid", "fp16_scaler"])
def build_all(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> BuildMonitors:
    """The monitors of a real run of this recipe, new ones at each call."""
    config, recipe = load_config("tiny", ["guard.spike_window=20"]), load_recipe(request.param)
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("what is usual and what is not\n" * 400)
    tokens = prepare(DataConfig(path=str(folder / "text.txt"), context=32), folder / "run", 4)
    data = TokenBatches(tokens, 0, 32, 4, 2, 4)
    facts, cpu = probe(), torch.device("cpu")
    rung, verdicts = resolve(recipe, facts)
    assert rung is not None
    model = build(**config.model.args)
    plan = make_plan(recipe, facts, rung, verdicts, model)
    loss_scale = build_loss_scale(plan, recipe, cpu)
    backend = build_backend(plan, recipe, model, cpu, loss_scale)
    context = MonitorContext(
        config.guard,
        recipe.fallback,
        max_grad_norm=config.train.max_grad_norm,
        warmup_steps=config.train.warmup_steps,
        data=data,
        bad_data=config.data.bad,
        vocab_size=model.vocab_size,
        layers=tuple(pad_numbers(layer) for layer in backend.layers),
        amax_history=recipe.fp8.amax_history_len,
        margin=recipe.fp8.margin,
        scales_loss=loss_scale is not None,
        fallback_precision=lambda: "bf16",
    )
    return lambda: build_monitors(context)


def eventful(names: tuple[str, ...], scale: float) -> list[StepFacts]:
    """A run without one bad figure, in which much happens all the same. names: of the FP8 slots."""
    noise = np.random.default_rng(3)
    steps = []
    for step in range(1, STEPS + 1):
        loss = (
            2.0
            * step**-0.1
            * float(np.exp(noise.normal(0, 0.01)))
            * (6.0 if step in (60, 200) else 1.0)
        )
        norm = float(np.exp(noise.normal(0, 0.1))) * (12.0 if 120 < step < 140 else 1.2)
        slow = 1.0 + float(noise.random()) + (1.0 if 150 < step < 230 else 0.0)
        steps.append(
            StepFacts(
                step=step,
                window=1000 + step,
                loss=loss,
                grad_norm=norm,
                lr=1e-3,
                loss_scale=scale if step < 250 else 512.0,
                applied=True,
                applied_steps=step,
                tokens=128,
                seconds=0.1,
                slots=slots_of(names, step, noise) if names else None,
                param_norm=20.0 * (15.0 if step > 270 else 1.0),
                grad_zeros=0.01 if step < 160 else 0.2,
                grad_near_limit=0.05 if 180 < step < 190 else 0.0,
                forward_fastest=0.1,
                forward_slowest=0.1 * slow,
            )
        )
    return steps


def slots_of(names: tuple[str, ...], step: int, noise: np.random.Generator) -> SlotStats:
    """FP8 statistics: usual ones, a storm, a dead slot, and one whose scale stands still."""
    count = len(names)
    amax = np.exp(noise.normal(0, 0.1, count)).astype(np.float32)
    saturation = (amax / amax.max()).astype(np.float32)
    if 90 < step < 100:
        saturation[: count // 2 + 1] = 40.0
    amax[-1] = 0.0 if step > 180 else amax[-1]
    moving = np.full(count, 100.0 + step, dtype=np.float32)
    moving[0] = 7.0
    saturation[0] = 0.01
    sampled = step % 10 == 0
    share = np.full(count, 0.001 if sampled else np.nan, dtype=np.float32)
    underflow = share if step % 50 else np.full(count, 0.5, dtype=np.float32)
    return SlotStats(
        names,
        amax,
        moving,
        saturation,
        share,
        underflow,
        share * 0 + 25.0,
        scrubbed=int(step == 77),
    )


def spoiled(facts: StepFacts, scale: float, generator: random.Random) -> StepFacts:
    """The step with every measured figure bad: its update is gated. scale: the loss scale, as it was before."""
    bad = generator.choice(BAD)
    slots = facts.slots
    if slots is not None:
        slots = replace(slots, **{name: np.full_like(slots.amax, bad) for name in SLOTS})
    fields = dict.fromkeys(
        ("loss", "grad_norm", "param_norm", "grad_zeros", "grad_near_limit"), bad
    )
    return replace(
        facts,
        **fields,
        applied=False,
        loss_scale=scale,
        forward_fastest=bad,
        forward_slowest=bad,
        slots=slots,
    )


def with_faults(
    usual: Sequence[StepFacts], hit: set[int], generator: random.Random
) -> list[tuple[StepFacts, bool]]:
    """The series with the steps at the places `hit` spoiled, and whether each is."""
    series, scale = [], usual[0].loss_scale
    for place, facts in enumerate(usual):
        series.append((spoiled(facts, scale, generator), True) if place in hit else (facts, False))
        scale = scale if place in hit else facts.loss_scale
    return series


def said(
    build_all: BuildMonitors, series: Sequence[tuple[StepFacts, bool]], through_json: set[int]
) -> list[str]:
    """Every verdict, limits and evidence too, of the steps that are not marked as bad.

    through_json: steps before which the windows are written, as strictly as a checkpoint, and read by new monitors.
    """
    monitors, told = build_all(), []
    for facts, bad in series:
        if facts.step in through_json:
            meta = json.loads(json.dumps(MonitorsPart(monitors).state_dict()[1], allow_nan=False))
            monitors = build_all()
            MonitorsPart(monitors).load_state_dict({}, meta)
        verdicts = [f"{type(monitor).__name__}: {monitor.observe(facts)!r}" for monitor in monitors]
        told += [] if bad else verdicts
    return told


def events_of(build_all: BuildMonitors) -> list[StepFacts]:
    names = next((m.layers for m in build_all() if isinstance(m, FallbackController)), ())
    return eventful(
        tuple(f"{layer}.{role}" for layer in names for role in ROLES), 1.0 if names else 65536.0
    )


@pytest.mark.faults(12)
def test_the_series_makes_the_monitors_speak(build_all: BuildMonitors) -> None:
    monitors = build_all()
    codes = {m.observe(facts).code for facts in events_of(build_all) for m in monitors}
    expected = {
        "gradient.growth",
        "loss.spike",
        "gradient.clipping",
        "parameters.growth",
        "ranks.straggler",
    }
    if any(isinstance(monitor, FallbackController) for monitor in monitors):
        expected |= {"fp8.scrubbed", "fp8.dead", "fp8.saturation", "fp8.frozen", "precision.demote"}
    else:
        expected |= {"scaler.low", "gradient.underflow", "gradient.overflow"}
    assert expected <= codes, sorted(codes)


@pytest.mark.slow
@pytest.mark.faults(12)
@pytest.mark.parametrize("trials", [5, pytest.param(TRIALS, marks=pytest.mark.nightly)])
def test_after_bad_steps_every_verdict_is_what_it_would_have_been(
    build_all: BuildMonitors, trials: int, figure: Callable[..., None]
) -> None:
    generator, usual, same, fed = random.Random(11), events_of(build_all), 0, 0
    for _ in range(trials):
        # Single steps, and bursts of up to 8; one fault in the first steps, where nothing is armed yet.
        starts = [generator.randrange(3), *generator.sample(range(STEPS), generator.randint(1, 6))]
        hit = {
            place
            for start in starts
            for place in range(start, start + generator.choice((1, 1, 2, 8)))
        }
        series = with_faults(usual, hit, generator)
        without = [(f, False) for n, f in enumerate(usual) if n not in hit]
        through_json = {f.step for f, _ in generator.sample(without, 3)}
        found, expected = (
            said(build_all, series, through_json),
            said(build_all, without, through_json),
        )
        differs = next(
            (pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]), None
        )
        assert differs is None, differs
        same, fed = same + 1, fed + sum(bad for _, bad in series)
    assert fed > 3 * trials
    if trials == TRIALS:
        what = f"series of {STEPS} steps with NaN or infinities in whose other steps no verdict changed"
        figure(12, what, (same, trials), target="all")


@pytest.mark.slow
@pytest.mark.faults(12)
def test_windows_that_went_through_a_checkpoint_are_armed_at_once(build_all: BuildMonitors) -> None:
    """Wall times are the one thing that is of a process and not of the run: stragglers are judged anew."""
    usual = [(facts, False) for facts in events_of(build_all)]
    kept = [line for line in said(build_all, usual, set()) if not line.startswith("RanksMonitor")]
    every = {facts.step for facts, _ in usual}
    assert kept == [
        line for line in said(build_all, usual, every) if not line.startswith("RanksMonitor")
    ]
