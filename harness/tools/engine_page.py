"""The page of what runs on which engine: `python -m harness.tools.engine_page > docs/reference/engines.md`.

No cell is written by hand. `build.refusals` answers here what it answers when a run starts. Limits are the attributes
that the engines' classes declare (`core.protocols.Engine`), and rungs are those of `precision/backends/registry.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from harness.build import ENGINES, refusals
from harness.capability.cards import Tier
from harness.capability.probe import LibraryFacts, MachineFacts
from harness.core import key_table
from harness.core.config import EngineConfig, RunConfig
from harness.optim.optimizers import OPTIMIZERS
from harness.precision.backends.registry import BACKENDS
from harness.precision.recipe import Recipe, Rung

DEVICES = ("cuda", "cpu")
# The key of the section `engine` that one engine alone reads: each of its values has a column.
_OWN_KEYS = {"fsdp": "gradient_sync", "deepspeed": "zero_stage"}
_OWN_CLASS = "torch.optim:RMSprop"


@dataclass(frozen=True, slots=True)
class Variant:
    """An engine with settings of its own: a column of the page.

    engine: its key in ENGINES.
    settings: keys of the section `engine`.
    """

    engine: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        """Such as `fsdp, gradient_sync=window`."""
        words = [self.engine]
        for key, value in self.settings.items():
            words.append(f"{key}={value}")
        return ", ".join(words)

    def config(self, optimizer: str = "adamw") -> RunConfig:
        """A run with this engine, and defaults otherwise."""
        return RunConfig.model_validate(
            {
                "train": {"optimizer": optimizer},
                "engine": {"name": self.engine, **self.settings},
            }
        )


def variants() -> list[Variant]:
    """Every engine, with every value of its own key."""
    found: list[Variant] = []
    for engine in ENGINES:
        if engine not in _OWN_KEYS:
            found.append(Variant(engine))
            continue
        key = _OWN_KEYS[engine]
        values = get_args(EngineConfig.model_fields[key].annotation)
        found += [Variant(engine, {key: value}) for value in values]
    return found


def rungs(device: str) -> list[Rung]:
    """Every rung that such a device can run with all libraries: on "cuda" all, on "cpu" what the backends declare."""
    # A machine that has every library: the page must not depend on the one that makes it.
    installed = LibraryFacts(None, True, "for the page")
    needed = [each.library for each in BACKENDS.values() if each.library]
    facts = MachineFacts(libraries=dict.fromkeys(needed, installed))
    found: list[Rung] = []
    for backend, declared in BACKENDS.items():
        for precision, rule in declared.computes.items():
            on_cpu, _ = rule(facts, Tier.CPU, "delayed")
            if device == "cuda" or on_cpu:
                found.append(rung_of(backend, precision))
    return found


def rung_of(backend: str, precision: str) -> Rung:
    """A rung for every machine."""
    tiers = [tier.name for tier in Tier]
    return Rung.model_validate({"backend": backend, "precision": precision, "tiers": tiers})


def recipe_of(rung: Rung) -> Recipe:
    """A recipe with this rung alone, and defaults otherwise."""
    return Recipe.model_validate({"name": "page", "ladder": [rung.model_dump()]})


def works(variant: Variant, rung: Rung, device: str, optimizer: str = "adamw") -> bool:
    """Whether a run would start."""
    config = variant.config(optimizer)
    return not refusals(variant.engine, config, recipe_of(rung), rung, device)


def nearest(
    variant: Variant,
    rung: Rung,
    device: str,
    optimizer: str = "adamw",
) -> Variant:
    """The variant to take where `variant` is refused: of the same engine with the nearest value, else ddp."""
    # Values of a key are declared in order, such as ZeRO's stages: neighbours differ least.
    own = [each for each in variants() if each.engine == variant.engine]
    place = own.index(variant)

    def distance(other: Variant) -> int:
        return abs(own.index(other) - place)

    for each in sorted(own, key=distance):
        if works(each, rung, device, optimizer):
            return each
    ddp = Variant("ddp")
    assert works(ddp, rung, device, optimizer), "DDP runs everything"
    return ddp


# What an engine's class declares, as a limit of the runs that it works for. Each has a number on the page.
_OPTIMIZERS = "`train.optimizer` is `adamw` or `sgd`"
_SNAPSHOTS = "No snapshots in memory: a rollback goes back to a checkpoint"
_COMPARISON = "`guard.compare_ranks_every` has nothing to compare"
_LOSS_SCALE = (
    "Weights in half precision: the recipe's `loss_scale` and `layers.keep_fp32` are refused, and a run cannot leave "
    "fp16"
)
_LIMITS = (_OPTIMIZERS, _SNAPSHOTS, _COMPARISON, _LOSS_SCALE)


def limits(variant: Variant, rung: Rung) -> list[str]:
    """What a run of this rung cannot do on this engine, and could on others."""
    engine = ENGINES[variant.engine]
    found: list[str] = []
    if not engine.any_optimizer:
        found.append(_OPTIMIZERS)
    if not engine.snapshots:
        found.append(_SNAPSHOTS)
    if engine.sharded:
        found.append(_COMPARISON)
    if engine.owns_loss_scale and rung.precision == "fp16":
        found.append(_LOSS_SCALE)
    return found


def cell(variant: Variant, rung: Rung, device: str) -> str:
    """`works`, with the numbers of its limits; or `refused`, and what to take."""
    if not works(variant, rung, device):
        return _refused(variant, nearest(variant, rung, device))
    numbers = [str(_LIMITS.index(each) + 1) for each in limits(variant, rung)]
    if not numbers:
        return "works"
    return f"works ({', '.join(numbers)})"


def _refused(variant: Variant, other: Variant) -> str:
    """other: of another engine, or of the same one with other settings."""
    if other.engine != variant.engine:
        return f"refused: take `{other.engine}`"
    settings = [f"{key}={value}" for key, value in other.settings.items()]
    return f"refused: take `{', '.join(settings)}`"


def _compiled(rung: Rung) -> str:
    """Whether engine.compile=blocks works on this rung."""
    declared = BACKENDS[rung.backend]
    if not declared.not_compiled:
        return "works, not by default" if declared.not_by_default else "works"
    for name, declared in BACKENDS.items():
        if rung.precision in declared.computes and not declared.not_compiled:
            return f"refused: take `{name}`"
    raise AssertionError("every precision has a backend that compiles")


def _rung_rows(device: str) -> Iterator[list[str]]:
    for rung in rungs(device):
        row = [f"`{rung.name}`"]
        row += [cell(variant, rung, device) for variant in variants()]
        yield [*row, _compiled(rung)]


def _optimizer_rows() -> Iterator[list[str]]:
    bf16 = rung_of("autocast", "bf16")
    for optimizer in (*OPTIMIZERS, _OWN_CLASS):
        name = "a class of your own" if optimizer == _OWN_CLASS else f"`{optimizer}`"
        row = [name]
        for engine in ENGINES:
            # The engine's first variant that works at all: what is refused now is refused for the optimizer.
            own = [each for each in variants() if each.engine == engine]
            variant = next(each for each in own if works(each, bf16, "cuda"))
            answer = "works"
            if not works(variant, bf16, "cuda", optimizer):
                answer = _refused(variant, nearest(variant, bf16, "cuda", optimizer))
            row.append(answer)
        yield row


def page() -> str:
    """The whole page."""
    names = [f"`{variant.name}`" for variant in variants()]
    heading = ["rung", *names, "`engine.compile=blocks`"]
    lines = [*_HEAD]
    for device, title in zip(DEVICES, ("## On GPUs", "## On a CPU"), strict=True):
        lines += [title, key_table.table(heading, _rung_rows(device)), ""]
    lines += ["## Limits", "The numbers in the cells:", ""]
    for number, limit in enumerate(_LIMITS, start=1):
        lines.append(f"{number}. {limit}.")
    engines = [f"`{engine}`" for engine in ENGINES]
    lines += [
        "",
        "## Optimizers",
        "Where the model needs `fsdp` or DeepSpeed, take `adamw` or `sgd`.",
        "",
        key_table.table(["`train.optimizer`", *engines], _optimizer_rows()),
    ]
    return "\n".join(lines) + "\n"


_HEAD = (
    "# What runs on which engine",
    "",
    "<!-- Made from declarations: python -m harness.tools.engine_page > docs/reference/engines.md -->",
    "Every rung of a recipe under every engine, for whoever chooses one ([how](../guide/engines.md)).",
    "",
    "Which rungs this machine can run at all:",
    "",
    "```bash",
    "harness doctor",
    "```",
    "",
    "A run that is refused ends before its model is built.",
    "",
    "Tests run every combination that works on a CPU, on two ranks. Those of Transformer Engine, and of fp16 under",
    'DeepSpeed, need GPUs. No engine has run on several GPUs yet: "works" is what is declared.',
    "",
)


if __name__ == "__main__":
    print(page(), end="")
