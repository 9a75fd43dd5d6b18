"""`harness doctor`: what this machine can do, and why not more; with a config, what in it costs speed or ends in NaN.

Findings come from the lints of each room: `capability/checks.py` and `versions.py` look at the machine,
`precision/lints` at the model, `data/lints.py` at samples, `optim/lints.py` at the optimizer. Here they are printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.capability.cards import GIB, Tier, check_usable, tier_of
from harness.capability.checks import LOW_DISK_GIB, machine_findings, read_clocks
from harness.capability.probe import MachineFacts, probe
from harness.capability.versions import Setup, bad_pairs, installed_versions
from harness.core.errors import ConfigError, ExitCode, Problem
from harness.core.files import shipped
from harness.core.findings import Finding, exit_code, refused
from harness.core.memory import size_text
from harness.measure.effort import MINUTES, Effort, check_effort
from harness.tools.start import Overrides, RecipeName, read_policies
from harness.tracking.journal import tracking_uri
from harness.tracking.reach import unanswered

if TYPE_CHECKING:
    from rich.console import Console

    from harness.core.config import RunConfig
    from harness.measure.card_check import CardReport
    from harness.measure.speed import SpeedReport
    from harness.precision.decision import Question
    from harness.precision.recipe import Recipe

_DEFAULT_RECIPE = "fp8_hybrid"


def command(
    overrides: Overrides = None,
    config: Annotated[
        str | None, typer.Option(help="also look at a run's data and model: a config, name or path")
    ] = None,
    recipe: RecipeName = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    card: Annotated[
        bool,
        typer.Option("--card", help="check products and memory of each GPU, or of the processor"),
    ] = False,
    memory_share: Annotated[
        float | None,
        typer.Option(
            help="for --card: share of the free memory [default: 0.5 of a GPU's, 0.002 without one]"
        ),
    ] = None,
    soak: Annotated[
        float | None,
        typer.Option(
            help="for --card: seconds of repeated products [default: 20; 5 without a GPU]"
        ),
    ] = None,
    speed: Annotated[
        bool,
        typer.Option("--speed", help="time the config's step in every precision and compile mode"),
    ] = False,
    minutes: Annotated[
        float, typer.Option(help="for --speed: minutes, without building")
    ] = MINUTES,
    picture: Annotated[
        Path | None, typer.Option(help="for --speed: draw the times into this PNG file")
    ] = None,
) -> int:
    from rich.console import Console

    try:
        # All that can be wrong with the arguments is checked before anything is measured.
        run, policy = _policies(config, overrides, recipe)
        _check_card_options(card, memory_share, soak)
        _check_speed_options(speed, config, minutes, picture)
    except ConfigError as error:
        if not as_json:
            raise
        findings = [asdict(finding) for finding in refused("config.refused", error.problems)]
        exit_code = int(error.exit_code)
        print(json.dumps({"exit_code": exit_code, "findings": findings}, indent=2))
        return exit_code

    # What takes long is done only where it is asked for.
    diagnosis = diagnose(policy, run)
    if card:
        diagnosis = _with_cards(diagnosis, memory_share, soak)
    if speed and run is not None:
        diagnosis = _with_speed(diagnosis, run, minutes, picture)
    if as_json:
        print(json.dumps(diagnosis.as_dict(), indent=2, allow_nan=False))
    else:
        show(diagnosis, Console())
    return int(diagnosis.exit_code)


def _policies(
    config: str | None, overrides: list[str] | None, recipe: str | None
) -> tuple[RunConfig | None, Recipe]:
    """The config, if one is named, and the recipe whose tree is shown. Raises ConfigError."""
    from harness.precision.recipe import load_recipe

    if config is not None:
        return read_policies(config, overrides, recipe)
    if overrides:
        what = f"{overrides[0]} belongs to a config"
        raise ConfigError(Problem(what, "harness doctor", fix="name the config: --config NAME"))
    return None, load_recipe(recipe or _DEFAULT_RECIPE)


def _check_card_options(card: bool, memory_share: float | None, soak: float | None) -> None:
    """Raise ConfigError for options that cannot be meant. Torch is not loaded yet."""
    if not card and (memory_share is not None or soak is not None):
        name = "--soak" if memory_share is None else "--memory-share"
        what = f"{name} belongs to --card"
        raise ConfigError(Problem(what, "harness doctor", fix="add --card"))
    check_effort(Effort(memory_share, soak))


def _check_speed_options(
    speed: bool, config: str | None, minutes: float, picture: Path | None
) -> None:
    """As `_check_card_options`."""
    if not speed and (minutes != MINUTES or picture is not None):
        name = "--minutes" if picture is None else "--picture"
        what = f"{name} belongs to --speed"
        raise ConfigError(Problem(what, "harness doctor", fix="add --speed"))
    if speed and config is None:
        what = "--speed times the step of a config"
        raise ConfigError(Problem(what, "harness doctor", fix="name the config: --config NAME"))
    check_effort(Effort(), minutes)
    if picture is not None and not picture.absolute().parent.is_dir():
        what = "its folder is not there"
        raise ConfigError(Problem(what, f"--picture {picture}", fix="make the folder first"))


def _with_speed(
    diagnosis: Diagnosis, run: RunConfig, minutes: float, picture: Path | None
) -> Diagnosis:
    """`diagnosis`, with the times of the run's step; as it is if a start of the run would be refused."""
    if diagnosis.exit_code is not ExitCode.DONE:
        print("nothing was timed: the run could not start", file=sys.stderr, flush=True)
        return diagnosis
    from harness.measure.speed import measure_speed
    from harness.measure.speed_picture import draw

    with redirect_stdout(sys.stderr):
        report = measure_speed(run, diagnosis.recipe, diagnosis.facts, minutes)
    if picture is not None:
        try:
            draw(report, picture)
        except OSError as error:
            what = f"cannot be written: {error.strerror or error}"
            problem = Problem(what, f"--picture {picture}", fix="name another place")
            findings = [*diagnosis.findings, *refused("config.picture", [problem])]
            # The times are kept: only the picture is lost.
            return replace(diagnosis, speed=report, findings=findings)
    return replace(diagnosis, speed=report)


def _with_cards(diagnosis: Diagnosis, share: float | None, seconds: float | None) -> Diagnosis:
    """`diagnosis`, with what was found on every device."""
    from harness.measure.card_check import check_card
    from harness.measure.card_device import devices_here

    reports: list[CardReport] = []
    findings = list(diagnosis.findings)
    for device in devices_here(diagnosis.facts):
        print(f"checking {device.name} ...", file=sys.stderr, flush=True)
        report = check_card(device, Effort(share, seconds))
        reports.append(report)
        findings += report.findings
    return replace(diagnosis, cards=reports, findings=findings)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What doctor found.

    facts: of the machine.
    recipe: whose tree is shown.
    rungs: by shipped recipe, the rung that this machine takes; None if it takes none.
    questions: the decision tree with this machine's answers; empty if it is not usable.
    findings: of machine, versions and, with a config, of the run.
    config: whether a config was examined.
    resolved: the precision that the config's model takes; empty without one.
    resolved_why: why it is not the one that the tree takes; empty if it is.
    cards: what --card checked on each device; None if it was not asked for.
    speed: what --speed timed; None if it was not asked for, or an error came first.
    """

    facts: MachineFacts
    recipe: Recipe
    rungs: dict[str, str | None]
    questions: list[Question]
    findings: list[Finding]
    config: bool = False
    resolved: str = ""
    resolved_why: str = ""
    cards: list[CardReport] | None = None
    speed: SpeedReport | None = None

    @property
    def exit_code(self) -> ExitCode:
        """0 if nothing is worse than a warning, 2 for the config, model or data, 4 for the machine."""
        return exit_code(self.findings)

    def as_dict(self) -> dict[str, Any]:
        """What --json prints."""
        tier, why = tier_of(self.facts)
        # Sections that were not asked for are left out.
        asked: dict[str, Any] = {}
        if self.cards is not None:
            asked["card"] = [report.as_dict() for report in self.cards]
        if self.speed is not None:
            asked["speed"] = self.speed.as_dict()
        return {
            "exit_code": int(self.exit_code),
            "findings": [asdict(finding) for finding in self.findings],
            "tier": tier.name,
            "tier_why": why,
            "recipe": self.recipe.name,
            "resolved": self.resolved,
            "resolved_why": self.resolved_why,
            "decision": [question._asdict() for question in self.questions],
            "recipes": self.rungs,
            "machine": {**asdict(self.facts), "libraries": _libraries(self.facts)},
            **asked,
        }


def _libraries(facts: MachineFacts) -> dict[str, Any]:
    return {name: library._asdict() for name, library in facts.libraries.items()}


def diagnose(
    recipe: Recipe, config: RunConfig | None = None, facts: MachineFacts | None = None
) -> Diagnosis:
    """Look at this machine (or at `facts` of another one), and at the run of `config` and `recipe`, if there is one."""
    from harness.precision.decision import decide
    from harness.precision.plan import resolve
    from harness.precision.recipe import load_recipe
    from harness.run_folder import place_of_runs

    # The machine itself. What depends on a config is looked at below, if there is one.
    place = place_of_runs()
    facts = probe(place) if facts is None else facts
    findings = machine_findings(facts, read_clocks(place))
    delivers = config is None or config.tracking.mlflow
    if delivers and (silent := unanswered(tracking_uri())):
        findings.append(silent)
    if config is None:
        findings += bad_pairs(Setup(installed_versions(), facts.torch_cuda))
    if check_usable(facts):
        return Diagnosis(facts, recipe, {}, [], findings, config is not None)

    # What the shipped recipes would take here, and the questions by which `recipe` decides.
    rungs: dict[str, str | None] = {}
    for name in shipped("recipes"):
        rung, _ = resolve(load_recipe(name), facts)
        rungs[name] = rung.name if rung else None
    findings += _without_a_rung(rungs, recipe, facts, config is not None)
    questions = decide(recipe, facts)
    if config is None:
        return Diagnosis(facts, recipe, rungs, questions, findings)

    from harness.tools.examine import examine

    # What the model prints as it is built and run is not part of the answer.
    with redirect_stdout(sys.stderr):
        examined = examine(config, recipe, facts)
    findings += examined.findings
    return Diagnosis(
        facts,
        recipe,
        rungs,
        questions,
        findings,
        True,
        examined.resolved,
        examined.resolved_why,
    )


def _without_a_rung(
    rungs: dict[str, str | None], recipe: Recipe, facts: MachineFacts, needed: bool
) -> list[Finding]:
    """An error if no shipped recipe runs here, or if `recipe` does not and is `needed`."""
    from harness.precision.plan import resolve

    taken, verdicts = resolve(recipe, facts)
    any_runs = any(rungs.values())
    # Without a config any recipe will do.
    if any_runs and (taken is not None or not needed):
        return []
    where = f"recipe {recipe.name}"
    what = "no rung of it runs here"
    if not any_runs:
        where = "recipes"
        what = "No shipped recipe has a rung that runs here."
    reasons = [f"{verdict.rung}: {verdict.reason}" for verdict in verdicts]
    why = "; ".join(reasons)
    fix = "take the recipe auto, or another machine"
    return [Finding("machine.no_rung", "error", where, what, why, fix)]


def doctor(console: Console, facts: MachineFacts | None = None) -> int:
    """Print the report for this machine (or for `facts`), without a config. Returns the exit code."""
    from harness.precision.recipe import load_recipe

    diagnosis = diagnose(load_recipe(_DEFAULT_RECIPE), facts=facts)
    show(diagnosis, console)
    return int(diagnosis.exit_code)


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print the report: machine, tier, recipes, tree, findings and the command to start with."""
    facts = diagnosis.facts
    _machine(console, facts)

    # A GPU that torch cannot use is an error, and not a machine without one.
    if not diagnosis.questions:
        _cards(console, diagnosis)
        console.print("\n[bold red]Not usable as it is[/]")
        _findings(console, diagnosis.findings)
        return

    # What this machine is, and what it would take.
    tier, why = tier_of(facts)
    console.print(f"\n[bold]Tier {tier.name}[/]: {why}", highlight=False)
    if not diagnosis.config:
        _recipes(console, facts)
    _tree(console, diagnosis)
    _cards(console, diagnosis)
    _speed(console, diagnosis)
    title = "Findings" if diagnosis.findings else "No findings"
    console.print(f"\n[bold]{title}[/]")
    _findings(console, diagnosis.findings)
    if diagnosis.exit_code is ExitCode.DONE and not diagnosis.config:
        console.print("\n[bold]Next[/]")
        _print_line(console, _next_command(facts, tier))


def _cards(console: Console, diagnosis: Diagnosis) -> None:
    """What --card checked; what it found is among the findings."""
    if diagnosis.cards is None:
        return
    from harness.measure.card_check import lines

    console.print("\n[bold]Answers, bit for bit[/]")
    if not diagnosis.facts.cuda_available:
        reason = _no_gpu_reason(diagnosis.facts)
        _print_line(console, f"{reason}: only the processor was checked")
    for report in diagnosis.cards:
        for line in lines(report):
            _print_line(console, line)


def _speed(console: Console, diagnosis: Diagnosis) -> None:
    """What --speed timed."""
    if diagnosis.speed is None:
        return
    from harness.measure.speed import lines

    console.print("\n[bold]Speed[/]")
    for line in lines(diagnosis.speed):
        _print_line(console, line)


def _no_gpu_reason(facts: MachineFacts) -> str:
    if facts.cpu_on_purpose:
        return _no_gpu_text(facts)
    here = facts.nvidia_on_pci or facts.nvidia_smi.gpus
    if here:
        return "torch cannot use the NVIDIA GPU that is here"
    return "no NVIDIA GPU"


def _print_line(console: Console, text: str) -> None:
    """Print a line as it is: without rich's markup, colours and line breaks."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _findings(console: Console, findings: Sequence[Finding]) -> None:
    # Errors first: they end the start.
    for finding in sorted(findings, key=lambda each: each.severity != "error"):
        _print_line(console, f"{finding.severity} {finding}")


_MARKS = {"taken": ">", "no": " ", "not asked": " "}


def _tree(console: Console, diagnosis: Diagnosis) -> None:
    """The decision tree; the answer that this machine gives is marked."""
    from harness.precision.decision import FORMATS

    console.print(f"\n[bold]Range, mantissa and card, by recipe {diagnosis.recipe.name}[/]")
    for depth, question in enumerate(diagnosis.questions):
        form = FORMATS[question.precision]
        indent = "  " * depth
        line = f"{_MARKS[question.answer]} {indent}{question.precision}? {question.answer}"
        about = (
            f"mantissa {form.bits} bits, largest {form.largest}: {form.means}; needs {form.needs}"
        )
        _print_line(console, line)
        _print_line(console, f"      {indent}{about}")
        _print_line(console, f"      {indent}{question.why}")
    if diagnosis.resolved:
        why = f" ({diagnosis.resolved_why})" if diagnosis.resolved_why else ""
        _print_line(console, f"the model runs on {diagnosis.resolved}{why}")


def _machine(console: Console, facts: MachineFacts) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(facts):
        table.add_row(name, escape(text))
    console.print(table)


def _rows(facts: MachineFacts) -> list[tuple[str, str]]:
    rows = [("python", facts.python), ("torch", _torch_text(facts))]

    if facts.nvidia_smi.driver:
        rows.append(("driver", facts.nvidia_smi.driver))
    if facts.devices:
        rows.append(("nccl", facts.nccl or "none"))
    for index, device in enumerate(facts.devices):
        major, minor = device.capability
        text = f"{device.name}, sm_{major}{minor}, {size_text(device.memory_bytes)}"
        rows.append((f"gpu {index}", text))
    if not facts.devices:
        rows.append(("gpu", _no_gpu_text(facts)))

    # A CPU without bf16 instructions emulates them.
    bf16 = ", ".join(facts.cpu_bf16_isa) or "no bf16 instructions: bf16 is slow here"
    rows.append(("cpu", f"{facts.cpu_cores} cores, {bf16}"))
    rows.append(("memory", size_text(facts.memory_bytes)))
    disk = size_text(facts.disk_free_bytes) + " free for runs"
    if facts.disk_free_bytes < LOW_DISK_GIB * GIB:
        disk += ": little, keep room for three checkpoints (12 bytes per parameter each)"
    rows.append(("disk", disk))

    for name, library in facts.libraries.items():
        text = f"no: {library.reason}"
        if library.ok:
            text = f"{library.version or ''} ok".strip()
        rows.append((name, text))

    # DeepSpeed compiles operators when it starts, so the library alone is not enough.
    missing = "; ".join(_deepspeed_needs(facts))
    launcher = "can start"
    if missing:
        launcher = f"cannot start: {missing}"
    rows.append(("deepspeed launcher", launcher))
    return rows


def _torch_text(facts: MachineFacts) -> str:
    if facts.torch_version is None:
        return f"none: {facts.torch_error or 'not installed'}"
    build = f"built for CUDA {facts.torch_cuda}" if facts.torch_cuda else "a CPU build"
    return f"{facts.torch_version}, {build}"


def _no_gpu_text(facts: MachineFacts) -> str:
    if facts.cpu_on_purpose:
        return f"hidden by CUDA_VISIBLE_DEVICES={facts.cuda_visible_devices!r}"
    smi = facts.nvidia_smi
    if smi.gpus:
        return f"{', '.join(smi.gpus)} (driver {smi.driver}), but torch does not see it"
    if smi.error:
        return f"none (nvidia-smi: {smi.error})"
    return "none"


def _deepspeed_needs(facts: MachineFacts) -> list[str]:
    """What the deepspeed launcher lacks here; empty if it can start."""
    missing: list[str] = []
    library = facts.libraries.get("deepspeed")
    if library is None or not library.ok:
        missing.append("deepspeed is not installed")
    if not facts.has_compiler:
        missing.append("no C++ compiler (apt install g++)")
    if not facts.has_ninja:
        missing.append("no ninja (pip install ninja, and its folder on PATH)")
    return missing


def _recipes(console: Console, facts: MachineFacts) -> None:
    """Print the rung that every shipped recipe takes."""
    from rich.markup import escape
    from rich.table import Table

    from harness.precision.plan import resolve
    from harness.precision.recipe import load_recipe

    table = Table(title="Recipes on this machine", title_justify="left", title_style="bold")
    table.add_column("recipe", no_wrap=True)
    table.add_column("rung", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("why", overflow="fold")
    for name in shipped("recipes"):
        _, verdicts = resolve(load_recipe(name), facts)
        # The recipe's name stands in its first row only.
        for index, verdict in enumerate(verdicts):
            heading = "" if index else name
            mark = "[green]taken[/]" if verdict.taken else "-"
            reason = escape(verdict.reason)
            last = index == len(verdicts) - 1
            table.add_row(heading, verdict.rung, mark, reason, end_section=last)
    console.print()
    console.print(table)


def _next_command(facts: MachineFacts, tier: Tier) -> str:
    command = "launch/train.py --recipe fp8_hybrid"
    if not _deepspeed_needs(facts):
        return f"deepspeed {command}"
    # One process for each card.
    cards = 1 if tier is Tier.CPU else len(facts.devices)
    if cards > 1:
        return f"torchrun --standalone --nproc_per_node {cards} -- {command}"
    return f"python {command}"
