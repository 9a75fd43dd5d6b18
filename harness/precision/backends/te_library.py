"""Transformer Engine as this project needs it: imported, checked for what it leans on, and its recipe object built."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from harness.core.errors import MachineError, Problem
from harness.precision.recipe import Fp8Config

WRITTEN_FOR = "2.20"
WHERE = "backend transformer_engine"
_RECIPES = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "block": "Float8BlockScaling"}
# Read by TE itself: they change how values are rounded or when histories roll, and no recipe key or plan would say so.
_OVERRIDES = (
    "NVTE_BACKWARD_OVERRIDE",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
    "NVTE_UNFUSED_FP8_UPDATE",
)


class Library(NamedTuple):
    """pytorch: the module transformer_engine.pytorch. recipes: transformer_engine.common.recipe. recomputing: whether
    te.checkpoint runs a forward again. checkpointing: whether it runs one at all. manager: TE's global FP8 state."""

    pytorch: Any
    recipes: Any
    recomputing: Callable[[], bool]
    checkpointing: Callable[[], bool]
    manager: Any
    version: str


def load() -> Library:
    """Import it. Raises MachineError if it does not import, lacks what this was written for, or is overridden."""
    overridden = [name for name in _OVERRIDES if os.environ.get(name, "0") not in ("", "0")]
    if overridden:
        why = "it changes what Transformer Engine computes, against the recipe and the plan"
        raise MachineError(
            [Problem(f"{name} is set in the environment", WHERE, why, f"unset {name}") for name in overridden]
        )
    try:
        package = import_module("transformer_engine")
        recipes = import_module("transformer_engine.common.recipe")
        pytorch = import_module("transformer_engine.pytorch")
        distributed = import_module("transformer_engine.pytorch.distributed")
        quantization = import_module("transformer_engine.pytorch.quantization")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        fix = "make setup builds it; or take a recipe without it, e.g. --recipe bf16"
        raise MachineError(Problem(f"Transformer Engine does not import: {error}", WHERE, fix=fix)) from error
    version = str(getattr(package, "__version__", "of unknown version"))
    needed = [(pytorch, name) for name in ("autocast", "Linear", "LayerNormLinear", "LayerNormMLP")]
    needed += [(distributed, "in_fp8_activation_recompute_phase")]
    needed += [(distributed, "is_fp8_activation_recompute_enabled")]
    needed += [(recipes, name) for name in ("Format", *_RECIPES.values())]
    needed += [(getattr(pytorch, "Linear", None), "init_fp8_metadata"), (quantization, "FP8GlobalStateManager")]
    manager = getattr(quantization, "FP8GlobalStateManager", None)
    needed += [
        (manager, name) for name in ("quantization_state", "get_buffer_info", "add_fp8_tensors_to_global_buffer")
    ]
    missing = [name for owner, name in needed if not hasattr(owner, name)]
    if missing:
        raise unexpected(version, f"has no {', '.join(missing)}")
    phases = (distributed.in_fp8_activation_recompute_phase, distributed.is_fp8_activation_recompute_enabled)
    return Library(pytorch, recipes, *phases, manager, version)


def make_recipe(library: Library, fp8: Fp8Config) -> Any:
    """TE's recipe object for `fp8`. Raises MachineError if TE does not take over every argument.

    Its recipe classes drop arguments that they do not know, without a word.
    """
    formats = library.recipes.Format
    wanted: dict[str, Any] = {"fp8_format": formats.HYBRID if fp8.format == "hybrid" else formats.E4M3}
    if fp8.scaling == "delayed":
        wanted |= {
            "margin": fp8.margin,
            "amax_history_len": fp8.amax_history_len,
            "amax_compute_algo": fp8.amax_compute_algo,
            "reduce_amax": True,
        }
    recipe = getattr(library.recipes, _RECIPES[fp8.scaling])(**wanted)
    dropped = [name for name, value in wanted.items() if getattr(recipe, name, None) != value]
    if dropped:
        raise unexpected(library.version, f"ignores {', '.join(dropped)} of {_RECIPES[fp8.scaling]}")
    return recipe


def keep_out_of_global_state(library: Library, fp8_meta: dict[str, Any]) -> None:
    """TE neither reduces nor rolls this module's amaxes. Raises MachineError if it would all the same."""
    manager = library.manager
    fp8_meta[manager.get_buffer_info()] = []
    held = _held_by_te(manager)
    manager.add_fp8_tensors_to_global_buffer(fp8_meta)
    if _held_by_te(manager) != held:
        raise unexpected(library.version, "rolls amax histories of modules that it was told to leave alone")


def _held_by_te(manager: Any) -> int:
    return sum(map(len, manager.quantization_state.global_amax_buffer.values()))


def unexpected(version: str, what: str) -> MachineError:
    """The error of a TE that is not as this was written for."""
    fix = f"install {WRITTEN_FOR}, which this was written for"
    return MachineError(Problem(f"Transformer Engine {version} {what}", WHERE, fix=fix))
