"""Import Transformer Engine's own Python, unchanged, without CUDA, and let the harness take the machine for a card.

`install(folder)` puts te_extension in the place of the compiled extension and gives TE's modules, and only them, a
`torch` whose "cuda" is the CPU. `as_on_a_card()` makes the harness offer transformer_engine:fp8 on the CPU. Both change
the whole process: tests that use them run in a process of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import sys
import types
import warnings
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import te_extension
import te_norms
import torch
from torch import Tensor

CAPABILITY = (9, 0)
# Parts of TE that need triton or onnxscript when they are imported; no module that runs here uses them.
_LEFT_OUT = ("onnx_extensions", "triton", *(f"triton.{name}" for name in (
    "permutation", "cross_entropy", "pad", "mhc", "grouped_dbias_dscales")))  # fmt: skip
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn")
_FACTORIES += ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")


def install(folder: Path) -> Any:
    """transformer_engine.pytorch from the unpacked wheel in `folder`."""
    if "transformer_engine" in sys.modules:
        return sys.modules["transformer_engine.pytorch"]
    if importlib.util.find_spec("transformer_engine_torch") is not None:
        raise RuntimeError("a real Transformer Engine is installed here: run tests/gpu with it")
    sys.path.insert(0, str(folder))
    te_norms.add_to(te_extension.as_extension())
    _import_common(folder)
    for name in _LEFT_OUT:
        sys.modules[f"transformer_engine.pytorch.{name}"] = _LeftOut(
            f"transformer_engine.pytorch.{name}"
        )
    with warnings.catch_warnings(action="ignore"):  # older versions of TE use what torch deprecates
        pytorch = import_module("transformer_engine.pytorch")
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine.") and getattr(module, "torch", None) is torch:
            module.torch = cpu_torch  # type: ignore[attr-defined]
            if hasattr(module, "_empty_tensor"):
                module._empty_tensor = Tensor  # type: ignore[attr-defined]  # theirs is Tensor().cuda()
    _take_cpu_tensors()
    return pytorch


def _import_common(folder: Path) -> None:
    """transformer_engine.common loads CUDA's libraries when it is imported, but not while TE itself is being built."""
    package = types.ModuleType("transformer_engine")
    package.__path__ = [str(folder / "transformer_engine")]
    sys.modules["transformer_engine"] = package
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    try:
        common = import_module("transformer_engine.common")
    finally:
        del os.environ["NVTE_PROJECT_BUILDING"], sys.modules["transformer_engine"]
    common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]


def _take_cpu_tensors() -> None:
    """The few places where TE's Python asks a tensor or a device, not torch, for CUDA."""
    module = import_module("transformer_engine.pytorch.module")
    base = import_module("transformer_engine.pytorch.module.base").TransformerEngineBaseModule
    prepare = base.prepare_forward

    @functools.wraps(prepare)
    def prepare_forward(self: Any, inp: Any, *args: Any, **kwargs: Any) -> Any:
        made = prepare(self, _SaysCuda(inp) if type(inp) is Tensor else inp, *args, **kwargs)
        return made.tensor.contiguous() if isinstance(made, _SaysCuda) else made

    base.prepare_forward = prepare_forward
    for name in ("Linear", "LayerNormLinear", "LayerNormMLP"):
        _on_cpu_by_default(getattr(module, name))
    distributed = import_module("transformer_engine.pytorch.distributed")
    # The CPU's random state is kept beside the card's already.
    distributed._get_cuda_rng_state = lambda *_, **__: None  # type: ignore[attr-defined]
    distributed._set_cuda_rng_state = lambda *_, **__: None  # type: ignore[attr-defined]


def _on_cpu_by_default(module: Any) -> None:
    init = module.__init__

    @functools.wraps(init)
    def made(self: Any, *args: Any, device: Any = "cuda", **kwargs: Any) -> None:
        init(self, *args, device=_cpu(device), **kwargs)

    module.__init__ = made


class _SaysCuda:
    """A tensor for the one check in `prepare_forward`."""

    is_cuda = True

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    def contiguous(self) -> Any:
        return self


def _cpu(device: Any) -> Any:
    """`device`, the CPU if it is a card."""
    if device is None:
        return None
    return (
        torch.device("cpu")
        if isinstance(device, int) or torch.device(device).type == "cuda"
        else device
    )


class _Facade(types.ModuleType):
    """A module with some names replaced."""

    def __init__(self, real: Any, **own: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(own, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


class _DeviceType(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.device)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _cpu(torch.device(*args, **kwargs))


class _Device(metaclass=_DeviceType):
    """torch.device, whose "cuda" is the CPU."""


class _LeftOut(types.ModuleType):
    """Names may be imported from it, not used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return te_extension.Missing(f"{self.__name__}.{name}")


def _facade() -> Any:
    def on_cpu(factory: Any) -> Any:
        @functools.wraps(factory)
        def made(*args: Any, **kwargs: Any) -> Any:
            return factory(
                *args,
                **{**kwargs, "device": _cpu(kwargs["device"])} if "device" in kwargs else kwargs,
            )

        return made

    def for_cpu(function: Any) -> Any:
        return lambda device="cuda", *args, **kwargs: function(
            "cpu" if device == "cuda" else device, *args, **kwargs
        )

    properties = types.SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, name="CPU", total_memory=0
    )
    cuda = _Facade(
        torch.cuda,
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_capability=lambda device=None: CAPABILITY,
        get_device_properties=lambda device=None: properties,
        is_current_stream_capturing=lambda: False,
        synchronize=lambda device=None: None,
        get_rng_state=torch.get_rng_state,
        nvtx=types.SimpleNamespace(
            range_push=lambda *_: None,
            range_pop=lambda *_: None,
            range=lambda *_, **__: nullcontext(),
        ),
    )
    autocast = for_cpu(torch.autocast)
    return _Facade(
        torch,
        cuda=cuda,
        device=_Device,
        version=types.SimpleNamespace(cuda="13.0", __version__=torch.__version__),
        is_autocast_enabled=for_cpu(torch.is_autocast_enabled),
        get_autocast_dtype=for_cpu(torch.get_autocast_dtype),
        autocast=autocast,
        amp=_Facade(torch.amp, autocast=autocast),
        **{name: on_cpu(getattr(torch, name)) for name in _FACTORIES},
    )


cpu_torch = _facade()


def as_on_a_card() -> None:
    """The harness may take transformer_engine:fp8 on the CPU: its rules say what a card of CAPABILITY could do."""
    from harness.capability.cards import Tier
    from harness.precision.backends.registry import BACKENDS

    declared = BACKENDS["transformer_engine"]

    def rule(facts: Any, tier: Tier, scaling: str) -> tuple[bool, str]:
        if tier is not Tier.CPU:
            return declared.computes["fp8"](facts, tier, scaling)
        return (
            True,
            f"Transformer Engine's own Python, its kernels played on the CPU, {scaling} scaling",
        )

    BACKENDS["transformer_engine"] = dataclasses.replace(declared, computes={"fp8": rule})
