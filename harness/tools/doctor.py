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
    _machine(console, facts)

    # A GPU that torch cannot use is an error, and not a machine without one.
    if problems := check_usable(facts):
        console.print("\n[bold red]Not usable as it is[/]")
        for problem in problems:
            console.print(str(problem), markup=False, highlight=False)
        return int(ExitCode.MACHINE)

    tier, why = tier_of(facts)
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

    for index, device in enumerate(facts.devices):
        major, minor = device.capability
        text = f"{device.name}, sm_{major}{minor}, {size_text(device.memory_bytes)}"
        rows.append((f"gpu {index}", text))
    if not facts.devices:
        rows.append(("gpu", _no_gpu_text(facts)))

    bf16 = ", ".join(facts.cpu_bf16_isa) or "no bf16 instructions: bf16 is slow here"
    rows.append(("cpu", f"{facts.cpu_cores} cores, {bf16}"))
    rows.append(("memory", size_text(facts.memory_bytes)))
    disk = size_text(facts.disk_free_bytes) + " free here"
    if facts.disk_free_bytes < _LOW_DISK_GIB * GIB:
        disk += ": little, keep room for three checkpoints (12 bytes per parameter each)"
    rows.append(("disk", disk))

    for name, library in facts.libraries.items():
        text = f"no: {library.reason}"
        if library.ok:
            text = f"{library.version or ''} ok".strip()
        rows.append((name, text))

    # DeepSpeed compiles operators when it starts, so the library alone is not enough.
    missing = "; ".join(_deepspeed_needs(facts))
    rows.append(("deepspeed launcher", f"cannot start: {missing}" if missing else "can start"))
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
    return f"none (nvidia-smi: {smi.error})" if smi.error else "none"


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
        # The recipe's name stands in its first row only.
        for index, verdict in enumerate(verdicts):
            heading = "" if index else name
            mark = "[green]taken[/]" if verdict.taken else "-"
            reason = escape(verdict.reason)
            last = index == len(verdicts) - 1
            table.add_row(heading, verdict.rung, mark, reason, end_section=last)
    console.print()
    console.print(table)
    return anything


def _next_command(facts: MachineFacts, tier: Tier) -> str:
    command = "launch/train.py --recipe fp8_hybrid"
    if not _deepspeed_needs(facts):
        return f"deepspeed {command}"
    cards = 1 if tier is Tier.CPU else len(facts.devices)
    if cards > 1:
        return f"torchrun --standalone --nproc_per_node {cards} -- {command}"
    return f"python {command}"
