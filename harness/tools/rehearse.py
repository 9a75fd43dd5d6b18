"""`harness rehearse`: the same steps in every precision: what each would do to a run, and what made a run go bad."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.core.errors import ConfigError, ExitCode, Problem, near_match, number_of
from harness.core.screen import say
from harness.report import short, tool, typed
from harness.tools.restored import check_recipe, read_run
from harness.tools.start import read_policies

if TYPE_CHECKING:
    from harness.build import Worker
    from harness.core.config import RunConfig
    from harness.core.state import RunLedger
    from harness.precision.recipe import PrecisionName, Recipe
    from harness.rehearse.begin import Beginning
    from harness.rehearse.rehearsal import Rehearsed
    from harness.rehearse.verdict import Verdict
    from harness.replay.investigate import Rerun

_ALONE = ["engine.name=auto"]
"""One process plays all ranks, whatever engine the run had."""


def command(
    subject: Annotated[
        list[str] | None,
        typer.Argument(help="run folder, runs/<run>; with --config: overrides, key.path=value"),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="rehearse a run that does not exist: config, name or path"),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="recipe to rehearse as FP8, name or path [default: the run's, or fp8_hybrid]"
        ),
    ] = None,
    precisions: Annotated[
        str, typer.Option(help="what to rehearse; fp32, the reference, always runs")
    ] = "fp32,bf16,fp16,fp8",
    steps: Annotated[int, typer.Option(min=1, help="steps of each branch")] = 200,
    from_step: Annotated[
        int | None,
        typer.Option(min=0, help="begin with this checkpoint of the run; 0: initial weights"),
    ] = None,
    before: Annotated[
        int | None,
        typer.Option(
            min=1, help="begin just before this step [default: its first rollback or halt]"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for rehearsed.yaml and rehearsal.png")] = Path(),
    no_picture: Annotated[bool, typer.Option("--no-picture", help="draw no rehearsal.png")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> int:
    """The exit code is 0 whatever the verdict is. Raises HarnessError for what cannot be rehearsed."""
    from harness.rehearse.recommended import FILE, require_free

    # Report everything that is wrong with the input before torch is loaded, which takes seconds.
    wanted = _precisions(precisions)
    request = _request(subject or [], config, recipe, from_step, before)
    if "fp8" in wanted:
        require_free(out / FILE)
    if "fp8" in wanted or not no_picture:
        _require_writable(out)
    return _rehearse(request, wanted, steps, from_step, before, out, not no_picture, as_json)


def _require_writable(out: Path) -> None:
    """Raise ConfigError if nothing can be written into `out`, which need not be there yet: branches take long."""
    above = next(folder for folder in (out, *out.parents, Path()) if folder.exists())
    if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
        return
    why = "it cannot be written" if above.is_dir() else f"{above} is a file"
    fix = "name another folder with --out"
    raise ConfigError(Problem("results have no place here", str(out), why, fix))


def _precisions(given: str) -> list[PrecisionName]:
    """The named precisions in a fixed order, fp32 first. Raises ConfigError for names that are no precision."""
    known: tuple[PrecisionName, ...] = ("fp32", "bf16", "fp16", "fp8")
    names: list[str] = []
    for part in given.split(","):
        name = part.strip()
        if name:
            names.append(name)
    problems: list[Problem] = []
    for name in names:
        if name not in known:
            fix = near_match(name, known)
            problems.append(Problem(f"{name!r} is no precision", "--precisions", fix=fix))
    if not names:
        fix = f"known: {', '.join(known)}"
        problems.append(Problem("names none", "--precisions", fix=fix))
    if problems:
        raise ConfigError(problems)
    return [name for name in known if name in names or name == "fp32"]


@dataclass(frozen=True)
class _Request:
    """What to rehearse.

    folder: the run's; None for a config. name: for people.
    own: the run's recipe. fp8: the recipe given by --recipe for the FP8 branch; None: the run's own, or the default.
    """

    folder: Path | None
    name: str
    config: RunConfig
    own: Recipe
    fp8: Recipe | None


def _request(
    words: Sequence[str],
    config: str | None,
    recipe: str | None,
    from_step: int | None,
    before: int | None,
) -> _Request:
    """Read the run or the config. Raises ConfigError."""
    from harness.precision.recipe import load_recipe

    # A config with overrides.
    if config is not None:
        for value, option in ((from_step, "--from-step"), (before, "--before")):
            if value is not None:
                what = "a config has no checkpoints and no steps yet"
                fix = "name a run, or leave it out"
                raise ConfigError(Problem(what, option, fix=fix))
        run_config, own = read_policies(config, [*words, *_ALONE], None)
        fp8 = load_recipe(recipe) if recipe else None
        _require_fp8(fp8)
        return _Request(None, f"config {config}", run_config, own, fp8)

    # A run's folder.
    if from_step is not None and before is not None:
        what = "a rehearsal begins at one place"
        fix = "give one of them"
        raise ConfigError(Problem(what, "--from-step and --before", fix=fix))
    if len(words) != 1:
        what = "name one run" if not words else f"{len(words)} words are not one run"
        fix = "harness rehearse runs/<run>, or harness rehearse --config NAME [key.path=value ...]"
        raise ConfigError(Problem(what, "harness rehearse", fix=fix))
    folder, run_config = read_run(Path(words[0]), _ALONE)
    check_recipe(folder, run_config.recipe)
    fp8 = load_recipe(recipe) if recipe else None
    _require_fp8(fp8)
    own = load_recipe(run_config.recipe)
    return _Request(folder, short(folder), run_config, own, fp8)


def _require_fp8(recipe: Recipe | None) -> None:
    if recipe is None or any(rung.precision == "fp8" for rung in recipe.ladder):
        return
    fix = "name a recipe with an FP8 rung, such as fp8_hybrid"
    raise ConfigError(Problem("has no FP8 rung", f"--recipe {recipe.name}", fix=fix))


def _rehearse(
    request: _Request,
    wanted: Sequence[PrecisionName],
    steps: int,
    from_step: int | None,
    before: int | None,
    out: Path,
    picture: bool,
    as_json: bool,
) -> int:
    """Rehearse, write recipe and picture, and print what was found."""
    from harness.build import join_worker
    from harness.rehearse.begin import of_config, of_run
    from harness.rehearse.rehearsal import Rehearsal, recipes_for, whole_fp8
    from harness.rehearse.verdict import decide

    # Progress goes to stderr: a script may read stdout.
    progress = partial(say, file=sys.stderr)
    worker = join_worker(request.config, "python")
    with tempfile.TemporaryDirectory(prefix="harness-rehearse-") as made:
        scratch = Path(made)
        data, request = _with_data(request, scratch, worker)

        # Where the branches begin.
        if request.folder is None:
            begin = of_config(request.config, steps)
        else:
            begin = of_run(request.folder, request.config, steps, from_step, before)
        begin, notes = _watched(begin, worker)

        # Two reasons why no branch can repeat the run figure by figure.
        foreign = _has_foreign_scale(begin)
        if foreign:
            notes.append(
                "the run's loss scale was DeepSpeed's: the fp16 branch has one of its own, and does not repeat the run"
            )
        was = begin.config.recipe
        now = request.config.recipe
        if was != now:
            notes.append(
                f"a resume changed the run's recipe since, from {was} to {now}: "
                f"the branches have {now}, and none repeats the run"
            )
        repeated = "" if foreign or was != now else _repeated(request)

        # The branches.
        recipes = recipes_for(request.own, request.fp8)
        build = partial(_build, request, data, scratch, worker, begin.ranks)
        rehearsal = Rehearsal(
            begin,
            own=_own_precisions(request, worker),
            repeated=repeated,
            recipes={name: recipes[name] for name in wanted},
            fp8=whole_fp8(request.own, request.fp8),
            build=build,
            say=progress,
        )
        found = rehearsal.run()

    found = replace(found, notes=(*notes, *found.notes, *_notes(found, worker)))
    verdict = decide(found.branches, _replay_command(request, found))
    return _show(request, found, verdict, worker, out, picture, as_json)


def _with_data(request: _Request, scratch: Path, worker: Worker) -> tuple[Path, _Request]:
    """Make the data of all branches. Returns the folder that has them, and the request with their vocabulary.

    For a run they are its own copy, as data.path may have changed since. For a config they are prepared in `scratch`.
    """
    from harness.build import build_data
    from harness.run_folder import fit_vocab
    from harness.tools.rebuilt import require_data
    from harness.tools.train import with_own_tokenizer

    if request.folder is not None:
        require_data(request.folder, request.config)
        return request.folder, request
    config = with_own_tokenizer(request.config)
    folder = scratch / "data-of-all"
    folder.mkdir()
    data = build_data(config, folder, worker)
    return folder, replace(request, config=fit_vocab(config, data.ids, data.vocab))


def _watched(begin: Beginning, worker: Worker) -> tuple[Beginning, list[str]]:
    """`begin` with the guard on and blocks that run eager, and a note on each of the two that this changes.

    The guard finds what goes wrong, and hooks see eager code only.
    """
    guard = begin.config.guard
    engine = begin.config.engine
    update: dict[str, Any] = {}
    notes: list[str] = []
    if not guard.enabled:
        update["guard"] = guard.model_copy(update={"enabled": True})
        notes.append(
            "guard.enabled is false in this config; the branches are judged with the guard on"
        )
    if engine.compile == "auto" and engine.may_compile(worker.device.type == "cuda"):
        update["engine"] = engine.model_copy(update={"compile": "none"})
        notes.append("blocks run eager here; engine.compile=auto compiles them in training")
    config = begin.config.model_copy(update=update)
    return replace(begin, config=config), notes


def _build(
    request: _Request,
    data: Path,
    scratch: Path,
    worker: Worker,
    ranks: int,
    config: RunConfig,
    recipe: Recipe,
    ledger: RunLedger,
) -> Rerun:
    """A run in its initial state, beside the one that is rehearsed. Raises HarnessError as a start does."""
    from harness.run_folder import read_plan
    from harness.tools.rebuilt import assemble

    earlier = None if request.folder is None else read_plan(request.folder)
    return assemble(config, recipe, worker, data, scratch, ledger, ranks, earlier)


def _own_precisions(request: _Request, worker: Worker) -> list[str]:
    """The precisions that the run computes in: the one in its plan; for a config all that this machine can take."""
    from harness.precision.plan import judge

    if request.folder is not None:
        return [_resolved(request.folder)]
    judged = judge(request.own, worker.facts)
    able: list[str] = []
    for rung, judgement in zip(request.own.ladder, judged, strict=True):
        if judgement.takes:
            able.append(rung.precision)
    return able


def _repeated(request: _Request) -> str:
    """The precision whose branch repeats the run; empty if none does.

    None does for a config, and for an FP8 run if --recipe gives the FP8 branch another recipe than the run's.
    """
    if request.folder is None:
        return ""
    precision = _resolved(request.folder)
    has_another_recipe = request.fp8 is not None and request.fp8 != request.own
    if precision == "fp8" and has_another_recipe:
        return ""
    return precision


def _has_foreign_scale(begin: Beginning) -> bool:
    """Whether the run computed in fp16 under DeepSpeed, whose loss scale no other engine can continue."""
    from harness.tools.replay import has_foreign_scale

    if begin.history is None:
        return False
    try:
        return has_foreign_scale(begin.history, begin.incident or begin.step or 1)
    except ConfigError:
        # The journal does not have the step: the run may have been built and never trained.
        return False


def _resolved(folder: Path) -> str:
    """The precision that the run's plan resolved to; empty if it has no plan."""
    from harness.run_folder import read_plan

    resolved = str(read_plan(folder).get("resolved", ""))
    _, _, precision = resolved.partition(":")
    return precision


def _notes(found: Rehearsed, worker: Worker) -> list[str]:
    """Caveats for a reader of speed, memory and losses."""
    notes: list[str] = []
    ran = {branch.precision for branch in (found.branches.reference, *found.branches.others)}

    # Times on a CPU are those of emulation.
    if worker.device.type == "cpu":
        if "fp8" in ran:
            notes.append(
                "FP8 is emulated on this CPU: its speed and memory say nothing about a card"
            )
        if "bf16" in ran and not worker.facts.cpu_bf16_isa:
            notes.append("this CPU has no instructions for bf16: torch emulates it, slowly")
        if "fp16" in ran:
            notes.append("fp16 is slow on a CPU: its speed says nothing about a card")
    # What the run's journal says of the same steps, and what fell back.
    for branch in found.branches.others:
        if branch.difference is not None:
            each = branch.difference
            notes.append(
                f"{branch.name} repeats the run, and differs from its journal from step {each.step} on "
                f"({each.metric}): other ranks, threads, machine or version, or a resume changed its config"
            )
        if branch.fell_back_to:
            notes.append(f"{branch.name} was downgraded to {branch.fell_back_to} as a whole")
    if found.begin.ranks > 1:
        notes.append(
            f"the run had {found.begin.ranks} ranks; here their micro-batches run one after the other"
        )
    return notes


def _replay_command(request: _Request, found: Rehearsed) -> str:
    """The command that examines the step at which the run went bad; empty if there is no such step."""
    if request.folder is None or found.begin.incident is None:
        return ""
    command = f"{tool('harness')} replay {typed(request.folder)}"
    return f"{command} --step {found.begin.incident}"


def _show(
    request: _Request,
    found: Rehearsed,
    verdict: Verdict,
    worker: Worker,
    out: Path,
    picture: bool,
    as_json: bool,
) -> int:
    """Write recipe and picture, and print the rehearsal. Raises ConfigError if they cannot be written."""
    from harness.rehearse import picture as pictures
    from harness.rehearse import recommended, text
    from harness.rehearse.rehearsal import whole_fp8

    machine = _machine(worker)
    content: dict[str, Any] = text.as_json(found, verdict, request.name, machine)
    # What is written is part of both answers, so files come before the printing.
    lines = text.lines(found, verdict, request.name, machine)

    if found.recommended is not None:
        path = out / recommended.FILE
        what = f"{request.name}, {number_of(found.begin.steps, 'step')}"
        recommended.write(path, found.recommended, what)
        content["recipe"]["path"] = str(path)
        lines += ["", *text.recipe_lines(content["recipe"])]

    content["picture"] = None
    if picture:
        policy = whole_fp8(request.own, request.fp8).fallback
        path = out / pictures.FILE
        try:
            pictures.draw(text.every_branch(found), found.fp8, policy, path)
        except OSError as error:
            what = f"the picture cannot be written: {error.strerror}"
            fix = "name another folder with --out, or leave it out: --no-picture"
            raise ConfigError(Problem(what, str(path), fix=fix)) from error
        content["picture"] = str(path)
        lines += ["", f"picture: {path}"]

    if as_json:
        print(json.dumps(content, indent=1, allow_nan=False))
        return int(ExitCode.DONE)
    for line in lines:
        say(line)
    return int(ExitCode.DONE)


def _machine(worker: Worker) -> str:
    """This machine, in a few words."""
    if worker.device.type == "cuda":
        return worker.facts.card(worker.device.index)
    import torch

    return f"this CPU, {number_of(torch.get_num_threads(), 'thread')}"
