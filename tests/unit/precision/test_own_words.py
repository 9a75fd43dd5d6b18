"""What events, halts and the post-mortem of a loop that is not ours say: of no key, flag or folder that it lacks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_support import EAGER, adamw, prepared, recipe
from typer.testing import CliRunner

from harness import Guard, Telemetry
from harness.cli import app
from harness.core.facts import ROLES, Halt, Limits, SlotStats, StepFacts
from harness.precision.recipe import Recipe
from harness.report.explain import catalogue, described
from harness.tracking.history import RunHistory

SLOTS = tuple(f"{layer}.{role}" for layer in ("00", "02") for role in ROLES)
FOREIGN = re.compile(
    r"runs/|--\w|(?<![\w/])(?:train|data|engine|checkpoint|model)\.[a-z]|=false|journal names"
)
NAMED: dict[str, Any] = {"fp8_slots": ["*.input", "other.*"], "fp8_series": 1}
Fields = Mapping[str, Any]


def slots(scrubbed: int = 0, scale: float = 1.0, **values: float) -> SlotStats:
    """Every slot alike."""
    usual = {
        "amax": 1.0,
        "saturation": 0.9,
        "clipped": 0.0,
        "underflow": 0.0,
        "sqnr_db": 30.0,
        "even_db": 30.0,
    }
    arrays = {
        name: np.full(len(SLOTS), value, np.float32) for name, value in (usual | values).items()
    }
    return SlotStats(
        SLOTS, scale=np.full(len(SLOTS), scale, np.float32), scrubbed=scrubbed, **arrays
    )


def usual(count: int, **fields: Any) -> list[Fields]:
    return [fields] * count


def shaken(count: int, sigma: float = 0.01) -> list[Fields]:
    noise = np.random.default_rng(0).normal(1.0, sigma, (count, 2))
    return [{"loss": 2.0 * loss, "grad_norm": norm} for loss, norm in noise.tolist()]


COURSES: dict[str, tuple[str, Iterable[Fields]]] = {
    "norms in a row": (
        "fp8_hybrid",
        [*shaken(40), *usual(4, grad_norm=20.0), *shaken(60), *usual(9, grad_norm=1e5)],
    ),
    "norms that recur": (
        "fp8_hybrid",
        [*shaken(40), *[{"grad_norm": 1.0 + 7.0 * (n % 4 == 0)} for n in range(80)]],
    ),
    "losses in a row": (
        "bf16",
        [*shaken(24), *usual(1, loss=90.0), *shaken(40), *usual(9, loss=90.0)],
    ),
    "losses that recur": (
        "bf16",
        [*shaken(40), *[{"loss": 2.0 + 3.0 * (n % 4 == 0)} for n in range(80)]],
    ),
    "a loss that rises": (
        "bf16",
        [
            *[{"loss": 5.0 - n / 100} for n in range(300)],
            *[{"loss": 2.0 + n / 60} for n in range(800)],
        ],
    ),
    "a loss that stands still": ("bf16", usual(600)),
    "nothing finite": ("fp8_hybrid", [*shaken(8), *usual(9, loss=math.nan, grad_norm=math.nan)]),
    "gradients that vanish": ("bf16", [*shaken(250), *usual(230, grad_norm=1e-6)]),
    "growth": ("bf16", [*shaken(20), *usual(1, grad_norm=15.0)]),
    "clipping": ("bf16", usual(220, grad_norm=30.0)),
    "weights": (
        "bf16",
        [*usual(3, param_norm=1.0), *usual(1, param_norm=50.0), *usual(1, param_norm=math.inf)],
    ),
    "a rate": ("bf16", [*usual(3), *usual(1, lr=10.0)]),
    "a scale that falls": (
        "fp16_scaler",
        [
            *usual(1, loss_scale=4096.0, grad_norm=math.inf),
            *usual(1, loss_scale=2048.0),
            *usual(1, loss_scale=512.0),
            *[
                {"loss_scale": 512.0, **({"grad_norm": math.inf} if n % 10 == 9 else {})}
                for n in range(300)
            ],
            *usual(1, loss_scale=1.0, grad_norm=math.inf),
        ],
    ),
    "a scale that does not help": (
        "fp16_scaler",
        usual(9, loss_scale=256.0, loss=math.nan, grad_norm=math.inf),
    ),
    "gradients at fp16's ends": (
        "fp16_scaler",
        [
            *usual(10, loss_scale=2048.0, grad_zeros=0.1, grad_near_limit=0.0),
            *usual(9, loss_scale=2048.0, grad_zeros=0.7, grad_near_limit=0.0),
            *usual(1, loss_scale=2048.0, grad_zeros=0.1, grad_near_limit=0.2),
        ],
    ),
    "ranks": (
        "bf16",
        [*usual(60, forward_fastest=1.0, forward_slowest=2.0), *usual(1, diverged=("weight",))],
    ),
    "ranks' calls": ("bf16", [*usual(3), *usual(1, other_calls=True)]),
    "fp8 storms": ("fp8_hybrid", usual(20, slots=slots(saturation=8.0, underflow=0.9))),
    "fp8 scales": (
        "fp8_hybrid",
        [
            *usual(1, slots=slots(scrubbed=1, amax=math.inf)),
            *usual(60, slots=slots(amax=0.0)),
            *usual(70, slots=slots(saturation=0.01)),
        ],
    ),
    "layers": ("eager", usual(20, slots=slots(saturation=9.0))),
    "layers that return": (
        "roomy",
        [
            *usual(9, slots=slots(saturation=9.0)),
            *usual(60, slots=slots(saturation=1e-8), demoted=("00",)),
        ],
    ),
}
FROM_ELSEWHERE = {"loss.first", "loss.unit", "precision.unwatched", "fp8.dropped", "fp8.no_table"}
"""Codes of harness train, or of what befalls files."""


def monitored() -> set[str]:
    """Codes that monitors may give in a loop of one's own."""
    rooms = (
        "gradient",
        "loss",
        "nonfinite",
        "parameters",
        "scaler",
        "fp8",
        "precision",
        "ranks",
        "lr",
        "switch",
    )
    codes = {code for code, *_ in catalogue().ranking if code.partition(".")[0] in rooms}
    return codes - FROM_ELSEWHERE


def policy(name: str) -> Recipe:
    shares = {"eager": 0.5, "roomy": 1.0}
    return (
        recipe(fallback={**EAGER, "max_demoted_share": shares[name]})
        if name in shares
        else recipe(name)
    )


def steps(guard: Guard, course: Iterable[Fields]) -> Iterator[StepFacts]:
    """As the update gives them: one that is not finite or over its limits is not applied."""
    applied = 0
    for number, fields in enumerate(course, 1):
        limits = guard.judge.state.limits.pop(number, Limits())
        facts = StepFacts(
            number, number, 2.0, 1.0, 1e-3, 1.0, True, applied, 16, 0.1, limits=limits
        )
        facts = replace(facts, **fields)
        fit = math.isfinite(facts.loss) and math.isfinite(facts.grad_norm) and not facts.over_limits
        applied += fit
        yield replace(facts, applied=fit, applied_steps=applied)


def said(
    folder: Path, policy: Recipe, course: Iterable[Fields], **settings: Any
) -> dict[str, set[str]]:
    """Texts of the events that a loop's guard gives, and of its halts, by code."""
    precision, model = prepared(policy)
    texts: dict[str, set[str]] = {}
    with Telemetry.for_precision(
        folder, precision, mlflow=False, report=False, **NAMED
    ) as telemetry:
        guard = Guard.for_precision(
            precision,
            adamw(model),
            telemetry=telemetry,
            max_grad_norm=1.0,
            snapshot_every=0,
            **settings,
        )
        for facts in steps(guard, course):
            action = guard.act(guard.observe(facts))
            if isinstance(action, Halt):
                texts.setdefault("guard.halt", set()).add(action.text)
    for event in RunHistory.read(folder).events:
        texts.setdefault(event["code"], set()).add(described(event))
    return texts


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    folder, texts = tmp_path_factory.mktemp("own"), dict[str, set[str]]()
    for name, (chosen, course) in COURSES.items():
        tight = {"max_skips": 12, "max_switches": 1, "max_rollbacks": 1}
        for code, found in said(folder / name, policy(chosen), list(course), **tight).items():
            texts.setdefault(code, set()).update(found)
    return texts


@pytest.mark.slow
def test_every_code_of_a_monitor_is_provoked(everything: dict[str, set[str]]) -> None:
    """So that the next test reads every text that a loop of one's own can get."""
    assert monitored() - everything.keys() == set()


@pytest.mark.slow
def test_no_text_names_what_a_loop_of_ones_own_has_not(everything: dict[str, set[str]]) -> None:
    texts = sorted(text for found in everything.values() for text in found)
    assert [text for text in texts if FOREIGN.search(text)] == []


def test_what_explains_a_loop_of_ones_own_says_how_to_read_keys_of_harness_train(
    tmp_path: Path,
) -> None:
    """The advice on a code is the same for both; a post-mortem names no command that there is not."""
    course = COURSES["nothing finite"][1]
    said(tmp_path / "mine", recipe(), course, max_skips=2)
    (tmp_path / "mine" / "outcome.json").write_text(
        '{"status": "halted", "exit_code": 3, "reason": "x", "step": 9}'
    )
    shown = CliRunner().invoke(app, ["explain", str(tmp_path / "mine")]).output
    note, _, mortem = shown.partition("This run is a loop of your own")[2].partition("Post-mortem")
    assert "What to do about nonfinite.skip" in note
    assert "what happened" in mortem
    assert FOREIGN.search(mortem) is None
