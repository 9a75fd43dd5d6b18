"""`harness doctor`: what this machine can do, and why not more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.capability.cards import GIB, Tier, check_usable, tier_of
from harness.capability.probe import MachineFacts, probe
from harness.core.errors import ExitCode
from harness.core.files import shipped
from harness.core.memory import size_text

if TYPE_CHECKING:
    from rich.console import Console

_LOW_DISK_GIB = 5


def command() -> int:
    from rich.console import Console

    return doctor(Console())


def doctor(console: Console, facts: MachineFacts | None = None) -> int:
    """Print the report for this machine (or for `facts`).

    Returns 0, or 4 if there is a GPU that torch cannot use or no shipped recipe has a rung that runs here.
    """
    facts = probe() if facts is None else facts
    tier, why = tier_of(facts)
    problems = check_usable(facts)
    _machine(console, facts)
    if problems:
        console.print("\n[bold red]Not usable as it is[/]")
        for problem in problems:
            console.print(str(problem), markup=False, highlight=False)
        return int(ExitCode.MACHINE)
    console.print(f"\n[bold]Tier {tier.name}[/]: {why}", highlight=False)
    if not _recipes(console, facts):
        console.print("\n[bold red]No shipped recipe has a rung that runs here.[/]")
        return int(ExitCode.MACHINE)
    console.print("\n[bold]Next[/]")
    console.print(_next_command(facts, tier), markup=False, highlight=False, soft_wrap=True)
    return int(ExitCode.DONE)


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
    rows += [
        (
            f"gpu {index}",
            f"{device.name}, sm_{device.capability[0]}{device.capability[1]}, {size_text(device.memory_bytes)}",
        )
        for index, device in enumerate(facts.devices)
    ] or [("gpu", _no_gpu_text(facts))]
    bf16 = ", ".join(facts.cpu_bf16_isa) or "no bf16 instructions: bf16 is slow here"
    rows.append(("cpu", f"{facts.cpu_cores} cores, {bf16}"))
    disk = size_text(facts.disk_free_bytes) + " free here"
    if facts.disk_free_bytes < _LOW_DISK_GIB * GIB:
        disk += ": little, keep room for three checkpoints (12 bytes per parameter each)"
    rows += [("memory", size_text(facts.memory_bytes)), ("disk", disk)]
    for name, library in facts.libraries.items():
        rows.append(
            (name, f"{library.version or ''} ok".strip() if library.ok else f"no: {library.reason}")
        )
    missing = _deepspeed_needs(facts)
    launcher = "can start" if not missing else f"cannot start: {'; '.join(missing)}"
    return [*rows, ("deepspeed launcher", launcher)]


def _torch_text(facts: MachineFacts) -> str:
    if facts.torch_version is None:
        return f"none: {facts.torch_error or 'not installed'}"
    return f"{facts.torch_version}, " + (
        f"built for CUDA {facts.torch_cuda}" if facts.torch_cuda else "a CPU build"
    )


def _no_gpu_text(facts: MachineFacts) -> str:
    if facts.cpu_on_purpose:
        return f"hidden by CUDA_VISIBLE_DEVICES={facts.cuda_visible_devices!r}"
    smi = facts.nvidia_smi
    if smi.gpus:
        return f"{', '.join(smi.gpus)} (driver {smi.driver}), but torch does not see it"
    return "none" + (f" (nvidia-smi: {smi.error})" if smi.error else "")


def _deepspeed_needs(facts: MachineFacts) -> list[str]:
    library = facts.libraries.get("deepspeed")
    needs = [
        (library is not None and library.ok, "deepspeed is not installed"),
        (facts.has_compiler, "no C++ compiler (apt install g++)"),
        (facts.has_ninja, "no ninja (pip install ninja, and its folder on PATH)"),
    ]
    return [text for fulfilled, text in needs if not fulfilled]


def _recipes(console: Console, facts: MachineFacts) -> bool:
    """Print the rung that every shipped recipe takes; True if any takes one."""
    from rich.markup import escape
    from rich.table import Table

    from harness.precision.plan import resolve
    from harness.precision.recipe import load_recipe

    table = Table(title="Recipes on this machine", title_justify="left", title_style="bold")
    table.add_column("recipe", no_wrap=True)
    table.add_column("rung", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("why", overflow="fold")
    anything = False
    for name in shipped("recipes"):
        taken, verdicts = resolve(load_recipe(name), facts)
        anything = anything or taken is not None
        for index, verdict in enumerate(verdicts):
            mark = "[green]taken[/]" if verdict.taken else "-"
            last = index == len(verdicts) - 1
            table.add_row(
                name if index == 0 else "",
                verdict.rung,
                mark,
                escape(verdict.reason),
                end_section=last,
            )
    console.print()
    console.print(table)
    return anything


def _next_command(facts: MachineFacts, tier: Tier) -> str:
    command = "launch/train.py --recipe fp8_hybrid"
    if not _deepspeed_needs(facts):
        return f"deepspeed {command}"
    cards = len(facts.devices) if tier is not Tier.CPU else 1
    return (
        f"torchrun --standalone --nproc_per_node {cards} -- {command}"
        if cards > 1
        else f"python {command}"
    )
