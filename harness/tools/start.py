"""`harness train`: its arguments. Every problem in them, the config and the recipe is found before torch is loaded.

The job itself is in train.py, which loads torch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.core.errors import ConfigError, Problem
from harness.stop import stop_while_starting

if TYPE_CHECKING:
    from harness.core.config import RunConfig
    from harness.precision.recipe import Recipe

Overrides = Annotated[list[str] | None, typer.Argument(help="config overrides, key.path=value")]
RecipeName = Annotated[
    str | None, typer.Option(help="precision recipe, name or path [default: the config's]")
]
ConfigName = Annotated[str, typer.Option(help="run config, name or path")]
Calibration = Annotated[
    Path | None,
    typer.Option(help="measurements of a card that `make proof` wrote [default: datasheet peaks]"),
]


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for, validated.

    config: of the run, overrides applied.
    recipe: the precision recipe.
    config_name: name or path of the config, part of the name of a run that is given none.
    name: of the run; None: <config>-<recipe>.
    resume: "auto", "never" or the path of a checkpoint.
    strict: fail unless the recipe's first rung can run.
    launcher: "python", "torchrun" or "deepspeed".
    accepted: keys that this resume may change.
    dry: check everything, and train nothing.
    """

    config: RunConfig
    recipe: Recipe
    config_name: str
    name: str | None
    resume: str
    strict: bool
    launcher: str
    accepted: tuple[str, ...] = ()
    dry: bool = False


def command(
    overrides: Overrides = None,
    recipe: RecipeName = None,
    config: ConfigName = "quickstart",
    name: Annotated[str | None, typer.Option(help="run name [default: <config>-<recipe>]")] = None,
    resume: Annotated[
        str, typer.Option(help="auto, never, or the path of a checkpoint to start from")
    ] = "auto",
    strict: Annotated[
        bool, typer.Option("--strict", help="fail unless the recipe's first rung can run")
    ] = False,
    accept_changed: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY,...",
            help="what may differ in this resume: config keys, recipe",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="check data, plan, memory and the first sample; train nothing"
        ),
    ] = False,
    local_rank: Annotated[
        int | None, typer.Option("--local_rank", "--local-rank", hidden=True)
    ] = None,
) -> int:
    """Train on this rank; returns its exit code."""
    # Until the run can save, a signal ends this process and leaves nothing behind.
    stop_while_starting()

    # Complain about the input at once. The imports that load torch come after that.
    run_config, precision_recipe = read_policies(config, overrides, recipe)
    named = [key.strip() for key in ",".join(accept_changed or ()).split(",")]
    accepted = tuple(key for key in named if key)
    if accepted:
        from harness.run_folder import check_accepted

        check_accepted(accepted, run_config.model_dump(mode="json"))
    launcher = _launcher(local_rank is not None)

    request = Request(
        run_config,
        precision_recipe,
        config,
        name,
        resume,
        strict,
        launcher,
        accepted,
        dry_run,
    )
    if request.dry:
        from harness.tools.dry_run import check

        return check(request)
    from harness.tools.train import train

    return train(request)


def read_policies(
    config: str, overrides: list[str] | None, recipe: str | None
) -> tuple[RunConfig, Recipe]:
    """The config, overrides applied, and the recipe: `recipe`, or the one that the config names.

    Raises ConfigError with every problem of both.
    """
    from harness.core.config import load_config
    from harness.precision.recipe import load_recipe

    problems: list[Problem] = []
    of_config: list[str] = []
    for word in overrides or []:
        if section := _recipe_section(word):
            what = f"{word}: {section} is a section of the recipe, not of the config"
            fix = "set it in a copy of the recipe's file, and give its path with --recipe"
            problems.append(Problem(what, "command line", fix=fix))
        else:
            of_config.append(word)

    run_config = precision_recipe = None
    try:
        run_config = load_config(config, of_config, recipe)
    except ConfigError as error:
        problems += error.problems

    # A config that cannot be read names no recipe, but one that was given can be checked all the same.
    recipe_name = recipe
    if not recipe_name and run_config is not None:
        recipe_name = run_config.recipe
    try:
        if recipe_name:
            precision_recipe = load_recipe(recipe_name)
    except ConfigError as error:
        problems += error.problems

    if problems or run_config is None or precision_recipe is None:
        raise ConfigError(problems)
    return run_config, precision_recipe


def _recipe_section(override: str) -> str:
    """The section that an override names, if only recipes have it; else empty.

    The command line changes no recipe: a run's recipe is one file, and is known by its hash.
    """
    from harness.core.config import RunConfig
    from harness.precision.recipe import Recipe

    section = re.split("[.=]", override, maxsplit=1)[0]
    # Not its name: `name=...` means the run's, which --name sets.
    sections = Recipe.model_fields.keys() - {"name", "description"}
    return section if section in sections - RunConfig.model_fields.keys() else ""


def _launcher(has_local_rank: bool) -> str:
    """Which launcher started this process. DeepSpeed's passes --local_rank, or sets CROSS_RANK."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    return "deepspeed" if has_local_rank or "CROSS_RANK" in os.environ else "python"
