"""FP8 delayed scaling by Transformer Engine: te.Linear on shared Parameters, one outer autocast, own FP8 state.

Tested against no GPU yet; written from TE 2.20's sources. What it leans on inside TE is looked up once at start and
missing pieces are an error that names the version this was written for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from harness.core.errors import CheckpointError, MachineError, Problem
from harness.core.protocols import Meta, TensorDict
from harness.precision import scaling
from harness.precision.plan import Plan, pad_numbers
from harness.precision.recipe import Recipe
from harness.precision.swap import swap_linears

WRITTEN_FOR = "2.20"
ROLES = ("input", "weight", "grad_output")
# Where te.Linear keeps each role: (fp8_meta key, column of its amax_history and scale).
_PLACES = (("scaling_fwd", 0), ("scaling_fwd", 1), ("scaling_bwd", 0))


class TransformerEngineBackend:
    """One outer te.autocast with one recipe object for the whole run; demoted layers disable it for themselves.

    TE rolls its histories itself, once per micro-batch, and reduces amax over ranks. A demoted layer keeps a shadow
    amax by hooks and gets its history and scale updated by the same rule, so that it returns with a warm scale.
    """

    def __init__(self, plan: Plan, recipe: Recipe, model: nn.Module, device: torch.device) -> None:
        self._te, te_recipe = _import_te()
        formats = {"hybrid": te_recipe.Format.HYBRID, "e4m3": te_recipe.Format.E4M3}
        fp8 = recipe.fp8
        self._recipe = te_recipe.DelayedScaling(
            margin=fp8.margin,
            fp8_format=formats[fp8.format],
            amax_history_len=fp8.amax_history_len,
            amax_compute_algo=fp8.amax_compute_algo,
        )
        self.config, self.device = fp8, device
        self.layers = plan.fp8_layers()
        self.slot_names = tuple(f"{pad_numbers(layer)}.{role}" for layer in self.layers for role in ROLES)
        self.note = f"transformer_engine {self._te.__version__}, rolls once per micro-batch"
        self.modules = {
            pad_numbers(name): module for name, module in swap_linears(model, self.layers, self._convert).items()
        }
        grad_max = scaling.E5M2.max if fp8.format == "hybrid" else scaling.E4M3.max
        self._fp8_max = torch.tensor([scaling.E4M3.max, scaling.E4M3.max, grad_max] * len(self.layers), device=device)
        self._shadow = torch.zeros(len(self.slot_names), device=device)
        self._demoted: set[str] = set()
        self._entry = self._state()
        self._scrubbed = torch.zeros((), device=device)
        for index, (name, module) in enumerate(self.modules.items()):
            self._wrap(name, module, 3 * index)

    def _convert(self, linear: nn.Linear) -> nn.Module:
        module = self._te.Linear(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            params_dtype=linear.weight.dtype,
            device=linear.weight.device,
        )
        module.weight = linear.weight
        if linear.bias is not None:
            module.bias = linear.bias
        return module.train(linear.training)

    def _wrap(self, name: str, module: nn.Module, slot: int) -> None:
        fp8_forward = module.forward

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if name not in self._demoted:
                return fp8_forward(x, *args, **kwargs)
            with self._te.autocast(enabled=False):
                out = fp8_forward(x, *args, **kwargs)
            if torch.is_grad_enabled() and out.requires_grad:
                self._observe(slot, x)
                self._observe(slot + 1, module.get_parameter("weight"))
                out.register_hook(lambda grad: self._observe(slot + 2, grad))
            return out

        module.forward = forward

    def _observe(self, slot: int, x: Tensor) -> None:
        self._shadow[slot] = torch.maximum(self._shadow[slot], scaling.amax(x))

    @property
    def demoted(self) -> tuple[str, ...]:
        """Layers that run in BF16 now (padded names)."""
        return tuple(name for name in self.modules if name in self._demoted)

    @contextmanager
    def context(self) -> Iterator[None]:
        """te.autocast inside bf16 autocast. With gradients off, what TE notes in its history is taken back."""
        kept = None if torch.is_grad_enabled() else self._state()
        with torch.autocast(self.device.type, dtype=torch.bfloat16), self._te.autocast(True, recipe=self._recipe):
            yield
        if kept is not None:
            self._write(*kept)

    def backward_context(self) -> AbstractContextManager[None]:
        """Nothing to hold: recomputation under TE goes through te.checkpoint."""
        return nullcontext()

    def begin_window(self, sample: bool) -> None:
        """Remember what a skipped step must restore. `sample` changes nothing: TE hands out no quantised tensors."""
        self._shadow.zero_()
        self._entry = self._state()

    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """TE rolled its own histories on the way."""

    def amax(self) -> Tensor:
        """Shadow amax of demoted layers, float32 [slots]; TE reduces the others itself."""
        return self._shadow.clone()

    def end_window(self, amax: Tensor, skip: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
        """Roll demoted layers by the shared rule, scrub, or restore everything after a skipped step."""
        history, scale = self._state()
        rolls = history.clone()
        rolls[0] = amax
        shadow_history, shadow_scale = scaling.update(
            rolls, scale, self._fp8_max, self.config.margin, self.config.amax_compute_algo
        )
        is_demoted = amax > 0
        history = torch.where(is_demoted, shadow_history, history)
        scale = torch.where(is_demoted, shadow_scale, scale)
        if self.config.scrub_inf:
            history, self._scrubbed = scaling.scrub(history)
        old_history, old_scale = self._entry
        skipped = skip > 0
        self._write(torch.where(skipped, old_history, history), torch.where(skipped, old_scale, scale))
        newest = history[-1]
        unknown = torch.full_like(newest, torch.nan)
        return torch.stack([newest, old_scale, newest * old_scale / self._fp8_max, unknown, unknown, unknown])

    def scrubbed(self) -> Tensor:
        """Infinite amaxes dropped in this window."""
        return self._scrubbed.float()

    def switch(self, demote: Sequence[str], promote: Sequence[str]) -> None:
        """Move layers (padded names) to BF16 and back, between two steps."""
        self._demoted = (self._demoted | set(demote)) - set(promote)

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """history float32 [L, slots], scale float32 [slots], and the demoted set; TE's own pickle is never used."""
        history, scale = self._state()
        return {"history": history, "scale": scale}, {"slots": list(self.slot_names), "demoted": list(self.demoted)}

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore in place. Raises CheckpointError if the slots differ."""
        if list(meta["slots"]) != list(self.slot_names):
            fix = "resume with the recipe and model that wrote the checkpoint"
            raise CheckpointError(Problem("FP8 slots differ from this run's", "fp8 state", fix=fix))
        for module in self.modules.values():
            if "scaling_fwd" not in module.fp8_meta:  # pyright: ignore[reportOperatorIssue]
                module.init_fp8_metadata()  # pyright: ignore[reportCallIssue]
        self._write(tensors["history"].to(self.device), tensors["scale"].to(self.device))
        self._demoted = set(meta["demoted"])

    def _state(self) -> tuple[Tensor, Tensor]:
        """Copies: history [L, slots], scale [slots]; the initial state for modules that have not run yet."""
        histories, scales = [], []
        for module in self.modules.values():
            for key, column in _PLACES:
                state = module.fp8_meta.get(key)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
                if state is None:
                    histories.append(torch.zeros(self.config.amax_history_len, device=self.device))
                    scales.append(torch.ones((), device=self.device))
                else:
                    histories.append(state.amax_history[:, column])
                    scales.append(state.scale[column])
        return torch.stack(histories, dim=1), torch.stack(scales)

    def _write(self, history: Tensor, scale: Tensor) -> None:
        """Into TE's own buffers, in place: their identity is what TE's fused update relies on."""
        for index, module in enumerate(self.modules.values()):
            for role, (key, column) in enumerate(_PLACES):
                state = module.fp8_meta.get(key)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
                if state is not None:
                    state.amax_history[:, column].copy_(history[:, 3 * index + role])
                    state.scale[column].copy_(scale[3 * index + role])


def _import_te() -> tuple[Any, Any]:
    """(transformer_engine.pytorch, its recipe module). Raises MachineError if it is not what this was written for."""
    try:
        te_recipe = import_module("transformer_engine.common.recipe")
        te = import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        raise MachineError(
            Problem(f"Transformer Engine does not import: {error}", "backend transformer_engine", fix="make setup")
        ) from error
    missing = [name for name in ("autocast", "Linear") if not hasattr(te, name)]
    missing += [name for name in ("DelayedScaling", "Format") if not hasattr(te_recipe, name)]
    if missing:
        version = getattr(te, "__version__", "unknown")
        raise MachineError(
            Problem(
                f"Transformer Engine {version} has no {', '.join(missing)}",
                "backend transformer_engine",
                fix=f"install {WRITTEN_FOR}, which this was written for",
            )
        )
    return te, te_recipe
