"""`harness train`: what a start is asked for, every problem of it found before torch is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from harness.core.errors import ConfigError, Problem
from harness.stop import stop_while_starting

if TYPE_CHECKING:
    from harness.core.config import RunConfig
    from harness.precision.recipe import Recipe

Overrides = Annotated[list[str] | None, typer.Argument(help="config overrides, key.path=value")]
RecipeName = Annotated[str | None, typer.Option(help="precision recipe, name or path [default: the config's]")]
ConfigName = Annotated[str, typer.Option(help="run config, name or path")]


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for, validated. resume: "auto", "never" or the path of a checkpoint. accepted: keys
    that a resume may change.
    """

    config: RunConfig
    recipe: Recipe
    config_name: str
    name: str | None
    resume: str
    strict: bool
    launcher: str
    accepted: tuple[str, ...] = ()


def command(
    overrides: Overrides = None,
    recipe: RecipeName = None,
    config: ConfigName = "quickstart",
    name: Annotated[str | None, typer.Option(help="run name [default: <config>-<recipe>]")] = None,
    resume: Annotated[str, typer.Option(help="auto, never, or the path of a checkpoint to start from")] = "auto",
    strict: Annotated[bool, typer.Option("--strict", help="fail unless the recipe's first rung can run")] = False,
    accept_changed: Annotated[
        str,
        typer.Option(
            metavar="KEY,...",
            help="what may differ in this resume: config keys, recipe; checkpoint: the newest is gone",
        ),
    ] = "",
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
) -> int:
    """Train on this rank; its exit code."""
    stop_while_starting()
    resolved, policy = read_policies(config, overrides, recipe)
    accepted = tuple(key.strip() for key in accept_changed.split(",") if key.strip())
    if accepted:
        from harness.run_folder import check_accepted

        check_accepted(accepted, resolved.model_dump(mode="json"))
    from harness.tools.train import train

    launcher = _launcher(local_rank is not None)
    return train(Request(resolved, policy, config, name, resume, strict, launcher, accepted))


def read_policies(config: str, overrides: list[str] | None, recipe: str | None) -> tuple[RunConfig, Recipe]:
    """The resolved config, and the recipe given or the one that it names. Raises ConfigError with every problem of
    both.
    """
    from harness.core.config import load_config
    from harness.precision.recipe import load_recipe

    problems: list[Problem] = []
    resolved = policy = None
    try:
        resolved = load_config(config, overrides or [], recipe)
    except ConfigError as error:
        problems += error.problems
    try:
        name = recipe or (resolved.recipe if resolved else None)
        policy = load_recipe(name) if name else None
    except ConfigError as error:
        problems += error.problems
    if resolved is None or policy is None:
        raise ConfigError(problems)
    return resolved, policy


def _launcher(has_local_rank: bool) -> str:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    return "deepspeed" if has_local_rank or "CROSS_RANK" in os.environ else "python"
