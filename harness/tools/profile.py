"""`harness profile`: the tables of a run's profiled steps, beside what `harness estimate` predicts for the same run."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.capability.cards import Card, card_named
from harness.core.errors import ConfigError, HarnessError, Problem
from harness.core.files import write_json
from harness.core.plan_text import aligned
from harness.core.screen import say
from harness.profiling.report import Profile, headings, notes, profiles, rows, title, write_text
from harness.report import RunFolder, short
from harness.tools.start import Calibration
from harness.tracking.history import RunHistory

if TYPE_CHECKING:
    from harness.estimate.prediction import Prediction

_TAG = "card"


def command(
    run: RunFolder,
    card: Annotated[
        str, typer.Option(help="card to predict for [default: the one that the run had]")
    ] = "",
    calibration: Calibration = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> int:
    history = RunHistory.read(run)
    found = profiles(history.run_dir)
    if not found:
        what = "the run has no profile"
        fix = "train with train.profile_steps=[50,55]; a resume may set it"
        raise ConfigError(Problem(what, str(run / "profile"), fix=fix))

    # What a step of this run would take on that card. A run that cannot be estimated still has its tables.
    chosen = _card(card, history)
    predicted: dict[str, float] = {}
    why = "no prediction: estimate has no datasheet of the card that the run had; name another with --card"
    if chosen is None and all(made.device == "cpu" for _, made in found):
        why = "no prediction: estimate knows cards, and these steps ran on a CPU; name a card with --card"
    if chosen is not None:
        try:
            predicted = _by_kind(history, chosen, calibration)
        except HarnessError as error:
            what = "; ".join(problem.what for problem in error.problems)
            why = f"no prediction for {chosen.name}: {what}"

    # The prediction, or why there is none, is kept beside the measured times.
    tables: list[dict[str, Any]] = []
    for path, made in found:
        if chosen is not None and predicted:
            made = made.with_prediction(chosen.name, predicted)
        else:
            made = made.without_prediction(why)
        write_json(path, made.as_dict())
        text = write_text(made, path)
        tables.append({"path": str(text), **made.as_dict()})
        if not as_json:
            _show(made, text)
    if as_json:
        print(json.dumps({"profiles": tables}, indent=2, allow_nan=False))
    return 0


def _card(name: str, history: RunHistory) -> Card | None:
    """The card to predict for; None if the run had none that is known. Raises ConfigError for an unknown name."""
    from harness.estimate.roofline import find_card

    if name:
        return find_card(name)
    return card_named(history.run["tags"].get(_TAG, ""))


def _by_kind(history: RunHistory, card: Card, calibration: Path | None) -> dict[str, float]:
    """Predicted seconds of a step by kind. Raises HarnessError for a run that cannot be estimated."""
    from harness.estimate import device

    device.load()  # before anything imports torch
    from harness.estimate.kinds import by_kind

    # What the model prints as it is built and run is not part of the answer.
    with redirect_stdout(sys.stderr):
        return by_kind(_predicted(history, card, calibration))


def _predicted(history: RunHistory, card: Card, calibration: Path | None) -> Prediction:
    from harness.core.config import load_config
    from harness.estimate.prediction import predict
    from harness.estimate.roofline import read_calibration, uncalibrated
    from harness.precision.recipe import load_recipe
    from harness.tools.restored import check_recipe

    path = history.run_dir / "config.yaml"
    if not path.is_file():
        what = "a loop of one's own has no config.yaml to estimate"
        raise ConfigError(Problem(what, str(history.run_dir)))
    # One process plays every rank, whatever launcher the run had.
    engine = history.run["tags"].get("engine", "")
    overrides = [] if engine == "deepspeed" else ["engine.name=auto"]
    if engine == "fsdp":
        overrides = ["engine.name=fsdp"]
    config = load_config(str(path), overrides)
    check_recipe(history.run_dir, config.recipe)
    rates = uncalibrated(card) if calibration is None else read_calibration(calibration, card)
    # The tag is a text of the run's journal, so it is believed only if it is a number of a sensible size.
    ranks = history.run["tags"].get("ranks", "1")
    count = 1
    if ranks.isdecimal() and 0 < len(ranks) < 7:
        count = int(ranks)
    say(f"profile: predicting a step on {card.name}", sys.stderr)
    return predict(config, load_recipe(config.recipe), card, rates, max(1, count))


def _show(made: Profile, text: Path) -> None:
    """Print one table. No figure is cut off, however narrow the terminal is."""
    say(title(made))
    for line in aligned([headings(made), *rows(made)]):
        say(line)
    for note in notes(made):
        say(note)
    say(f"written: {short(text)}")
