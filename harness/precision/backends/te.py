"""FP8 delayed scaling by Transformer Engine: te.Linear on shared Parameters, one outer autocast, FP8 state of our own.

It has not run on a GPU yet (tests/gpu holds the checks). Every name and behaviour it leans on was read in the Python
sources of TE 2.20.2 (quantization.py, module/base.py, module/linear.py) and in recipe/delayed_scaling.cu:

- `te.autocast(enabled, recipe=...)` updates forward slots when the outermost enabled one exits with gradients on;
  backward slots update at the end of the backward of the forward's first FP8 module. After backward both have rolled.
- Entering an autocast with `enabled=False` inside an enabled one runs that module in BF16 and touches no FP8 state.
- `fp8_meta["scaling_fwd" | "scaling_bwd"]` exists once `init_fp8_metadata` ran inside an enabled autocast (outside of
  one it does nothing) and keeps its tensors for life: quantizers and the global buffers hold views of them, so they
  are written in place. Writing between two steps is safe: everything is on one stream.
- A slot with a staging amax of 0 does not roll; amaxes are all-reduced only if torch.distributed is initialised.
- Weights are quantised at every forward unless `is_first_microbatch` is passed, so no stale FP8 copy outlives a switch.
- With gradients off nothing rolls, but amaxes still land in row 0 of the history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.core.errors import CheckpointError, MachineError, Problem
from harness.core.protocols import Meta, TensorDict
from harness.precision import scaling
from harness.precision.plan import Plan, pad_numbers
from harness.precision.recipe import Recipe
from harness.precision.swap import swap_linears

WRITTEN_FOR = "2.20"
ROLES = ("input", "weight", "grad_output")
# te.Linear's columns: scaling_fwd has input, weight, output; scaling_bwd has grad_output, grad_input. The last one of
# each is never quantised here and stays at history 0, scale 1.
_FORWARD, _BACKWARD = ("scaling_fwd", slice(0, 2)), ("scaling_bwd", slice(2, 3))


class TransformerEngineBackend:
    """One outer te.autocast with one recipe object for the whole run; demoted layers disable it for themselves.

    TE rolls its histories itself, once per micro-batch, and reduces amax over ranks. A demoted layer keeps a shadow
    amax and gets its history and scale updated by the same rule, once per step, so that it returns with a warm scale.
    Raises MachineError if TE cannot be imported or lacks what this was written for.
    """

    def __init__(self, plan: Plan, recipe: Recipe, model: nn.Module, device: torch.device) -> None:
        self._te, te_recipe, version = _import_te()
        fp8 = recipe.fp8
        hybrid = fp8.format == "hybrid"
        self._recipe = te_recipe.DelayedScaling(
            margin=fp8.margin,
            fp8_format=te_recipe.Format.HYBRID if hybrid else te_recipe.Format.E4M3,
            amax_history_len=fp8.amax_history_len,
            amax_compute_algo=fp8.amax_compute_algo,
        )
        self.config, self.device = fp8, device
        self.layers = plan.fp8_layers()
        self.slot_names = tuple(f"{pad_numbers(layer)}.{role}" for layer in self.layers for role in ROLES)
        self.formats = ["e4m3", "e4m3", "e5m2" if hybrid else "e4m3"] * len(self.layers)
        self.note = f"transformer_engine {version}, rolls once per micro-batch"
        linear_class = _linear_class(self._te, self._recipe)
        swapped = swap_linears(model, self.layers, lambda linear: _convert(linear, linear_class))
        self.modules: dict[str, Any] = {pad_numbers(name): module for name, module in swapped.items()}
        self._fp8_max = torch.tensor([scaling.FORMATS[fmt].max for fmt in self.formats], device=device)
        self._shadow, self._peak, self._saturation = torch.zeros(3, len(self.slot_names), device=device)
        self._scrubbed = torch.zeros((), device=device)
        for index, module in enumerate(self.modules.values()):
            module.shadow = self._shadow[3 * index : 3 * index + 3]
        with torch.no_grad(), self._te.autocast(True, recipe=self._recipe):
            for module in self.modules.values():
                module.init_fp8_metadata()
        self._entry = self._state()
        self._scale = self._entry[1]
        self.lowered = ""
        self.switch((), ())

    @property
    def demoted(self) -> tuple[str, ...]:
        """Layers that run in BF16 now (padded names)."""
        return tuple(name for name, module in self.modules.items() if module.demoted)

    @contextmanager
    def context(self) -> Iterator[None]:
        """te.autocast inside bf16 autocast. With gradients off, what TE notes in its history is taken back."""
        kept = None if torch.is_grad_enabled() else self._state()
        try:
            with torch.autocast(self.device.type, dtype=torch.bfloat16), self._te.autocast(True, recipe=self._recipe):
                yield
        finally:
            if kept is not None:
                self._write(*kept)

    def backward_context(self) -> AbstractContextManager[None]:
        """Nothing to hold: recomputation under TE goes through te.checkpoint."""
        return nullcontext()

    @torch.no_grad()
    def begin_window(self, sample: bool) -> None:
        """Remember what a skipped step must restore. `sample` changes nothing: TE hands out no quantised tensors."""
        self._shadow.zero_()
        self._peak.zero_()
        self._saturation.zero_()
        self._entry = self._state()
        self._scale = self._entry[1]

    @torch.no_grad()
    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """TE has rolled: note the amaxes that it saw, and their saturation under the scale that was in use."""
        history, scale = self._state()
        self._note(torch.where(self._is_demoted, 0.0, history[-1]), self._scale)
        self._scale = scale

    def _note(self, amax: Tensor, scale: Tensor) -> None:
        torch.maximum(self._peak, amax, out=self._peak)
        torch.maximum(self._saturation, amax * scale / self._fp8_max, out=self._saturation)

    def amax(self) -> Tensor:
        """Shadow amax of demoted layers, float32 [slots], 0 for the others: TE reduces those itself."""
        return self._shadow.clone()

    @torch.no_grad()
    def end_window(self, amax: Tensor, skip: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
        """Roll demoted layers by the shared rule, scrub, or restore everything after a skipped step.

        float32 [6, slots] as the protocol says. A slot that TE did not roll (its tensor was all zero) shows the amax of
        its last roll.
        """
        old_history, old_scale = self._entry
        self._note(amax, old_scale)
        history, scale = self._state()
        history[0] = amax  # 0 where TE rolled, and `update` leaves such slots alone
        if self.config.scrub_inf:
            history, self._scrubbed = scaling.scrub(history)
        history, scale = scaling.update(
            history, scale, self._fp8_max, self.config.margin, self.config.amax_compute_algo
        )
        skipped = skip > 0
        self._write(torch.where(skipped, old_history, history), torch.where(skipped, old_scale, scale))
        unknown = torch.full_like(amax, torch.nan)
        return torch.stack([self._peak, old_scale, self._saturation, unknown, unknown, unknown])

    def scrubbed(self) -> Tensor:
        """Infinite amaxes dropped in this window."""
        return self._scrubbed.float()

    def switch(self, demote: Sequence[str], promote: Sequence[str]) -> None:
        """Move layers (padded names) to BF16 and back, between two steps and alike on every rank."""
        for name in demote:
            self.modules[name].demoted = True
        for name in promote:
            self.modules[name].demoted = False
        flags = [module.demoted for module in self.modules.values() for _ in ROLES]
        self._is_demoted = torch.tensor(flags, dtype=torch.bool, device=self.device)

    def lower(self, precision: str) -> None:
        """Every layer to BF16 for good: what FP8 layers have to fall to, whatever is asked for."""
        self.lowered = precision
        self.switch(list(self.modules), ())

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """history float32 [L, slots], scale float32 [slots]; the same layout as the native backend's.

        TE's own extra state is a pickle, and empty after a BF16 forward: never used.
        """
        history, scale = self._state()
        meta: Meta = {"slots": list(self.slot_names), "formats": list(self.formats), "demoted": list(self.demoted)}
        meta["lowered"] = self.lowered
        return {"history": history, "scale": scale}, meta

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore in place. Raises CheckpointError if slots or history length differ."""
        mine = (list(self.slot_names), [self.config.amax_history_len, len(self.slot_names)])
        if mine != (list(meta["slots"]), list(tensors["history"].shape)):
            fix = "resume with the recipe and model that wrote the checkpoint"
            raise CheckpointError(Problem("slots or history length differ from this run's", "fp8 state", fix=fix))
        self._write(tensors["history"].to(self.device), tensors["scale"].to(self.device))
        self.lowered = meta["lowered"]
        self.switch(meta["demoted"], [name for name in self.modules if name not in meta["demoted"]])

    def _buffers(self, key: str, attribute: str) -> list[Tensor]:
        return [getattr(module.fp8_meta[key], attribute) for module in self.modules.values()]

    @torch.no_grad()
    def _state(self) -> tuple[Tensor, Tensor]:
        """Copies in the layout of `scaling.update`: history [L, slots], scale [slots]. A handful of kernels."""
        histories = [torch.stack(self._buffers(key, "amax_history")) for key, _ in (_FORWARD, _BACKWARD)]
        scales = [torch.stack(self._buffers(key, "scale")) for key, _ in (_FORWARD, _BACKWARD)]
        history = torch.cat([histories[0][..., :2], histories[1][..., :1]], dim=-1)  # [layers, L, 3]
        scale = torch.cat([scales[0][..., :2], scales[1][..., :1]], dim=-1)  # [layers, 3]
        return history.transpose(0, 1).flatten(1), scale.flatten()

    @torch.no_grad()
    def _write(self, history: Tensor, scale: Tensor) -> None:
        """Into TE's own tensors, in place; the inverse of `_state`."""
        layers = len(self.modules)
        histories, scales = history.reshape(-1, layers, 3).transpose(0, 1), scale.reshape(layers, 3)
        for key, roles in (_FORWARD, _BACKWARD):
            torch._foreach_copy_(self._buffers(key, "amax_history"), list(F.pad(histories[..., roles], (0, 1))))
            torch._foreach_copy_(self._buffers(key, "scale"), list(F.pad(scales[..., roles], (0, 1), value=1.0)))


def _convert(linear: nn.Linear, linear_class: type[Any]) -> nn.Module:
    # On "meta" TE neither allocates nor draws random numbers for weights that are about to be replaced.
    bias = linear.bias is not None
    module = linear_class(
        linear.in_features, linear.out_features, bias=bias, params_dtype=linear.weight.dtype, device="meta"
    )
    module.weight = linear.weight
    if bias:
        module.bias = linear.bias
    return module.train(linear.training)


def _linear_class(te: Any, recipe: Any) -> type[Any]:
    """te.Linear that can leave FP8 for BF16, and keeps TE's pickled extra state out of the model's state_dict."""

    class Linear(te.Linear):
        demoted = False
        shadow: Tensor  # float32 [3], running amax of input, weight, grad_output
        get_extra_state = nn.Module.get_extra_state
        set_extra_state = nn.Module.set_extra_state

        def forward(self, inp: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not self.demoted:
                return super().forward(inp, *args, **kwargs)
            with te.autocast(False, recipe=recipe):
                out = super().forward(inp, *args, **kwargs)
            if torch.is_grad_enabled() and out.requires_grad:
                # What TE would have quantised: the input after its cast to bf16, the weight as it is.
                self._observe(0, inp.detach().to(out.dtype))
                self._observe(1, self.weight)
                out.register_hook(lambda grad: self._observe(2, grad))
            return out

        def _observe(self, role: int, x: Tensor) -> None:
            self.shadow[role] = torch.maximum(self.shadow[role], scaling.amax(x))

    return Linear


def _import_te() -> tuple[Any, Any, str]:
    """(transformer_engine.pytorch, its recipe module, version). Raises MachineError on anything else than expected."""
    try:
        package = import_module("transformer_engine")
        te_recipe = import_module("transformer_engine.common.recipe")
        te = import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        fix = "make setup builds it; or take a recipe without it, e.g. --recipe bf16"
        raise MachineError(
            Problem(f"Transformer Engine does not import: {error}", "backend transformer_engine", fix=fix)
        ) from error
    version = getattr(package, "__version__", "of unknown version")
    missing = [name for name in ("autocast", "Linear") if not hasattr(te, name)]
    missing += [name for name in ("DelayedScaling", "Format") if not hasattr(te_recipe, name)]
    missing += [name for name in ("init_fp8_metadata",) if not missing and not hasattr(te.Linear, name)]
    if missing:
        raise MachineError(
            Problem(
                f"Transformer Engine {version} has no {', '.join(missing)}",
                "backend transformer_engine",
                fix=f"install {WRITTEN_FOR}, which this was written for",
            )
        )
    return te, te_recipe, version
