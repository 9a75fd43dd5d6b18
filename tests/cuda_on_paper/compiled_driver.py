"""Run in a process of its own: inductor's code for a block of a GPT on an H100 that is not there, as a line of JSON.

    python tests/cuda_on_paper/compiled_driver.py RUNG [CASTS]

CASTS: "without" our cast kernel, as where it does not compile (an estimate assumes that it does); "fused" by
`layers.fuse`.

The code is generated, never run: a Triton driver that knows its target and no more, and compiled modules that stop.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
logging.disable(logging.ERROR)

from harness.estimate import device  # noqa: E402

device.load()

import torch  # noqa: E402
import torch._functorch.config as functorch  # noqa: E402
import torch._inductor.config as inductor  # noqa: E402
import triton  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._dynamo.device_interface import CudaInterface  # noqa: E402
from torch._inductor.graph import GraphLowering  # noqa: E402
from torch._inductor.ir import NoneAsConstantBuffer  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from harness.capability.cards import Card  # noqa: E402
from harness.capability.probe import probe  # noqa: E402
from harness.estimate.roofline import find_card  # noqa: E402
from harness.estimate.trace import fake_card  # noqa: E402
from harness.models.gpt import Scores, build, rotary  # noqa: E402
from harness.precision.backends import native_triton  # noqa: E402
from harness.precision.convert import build_backend  # noqa: E402
from harness.precision.plan import make_plan  # noqa: E402
from harness.precision.recipe import Recipe  # noqa: E402

DIM, HEADS, FFN, TOKENS = 1024, 8, 2816, 2048


class Stop(Exception):
    """Instead of running what was compiled."""


class Driver:
    """Of Triton, for a fake card."""

    def __init__(self, card: Card) -> None:
        self._target = GPUTarget("cuda", 10 * card.capability[0] + card.capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_current_stream(self, *_: Any) -> int:
        return 0

    def is_active(self) -> bool:
        return True


@contextmanager
def compiler_on_paper(card: Card) -> Iterator[None]:
    """What dynamo and inductor ask of CUDA, answered for `card`; nothing is cached on disk."""
    triton.runtime.driver.set_active(cast("Any", Driver(card)))
    major, minor = card.capability
    facts = SimpleNamespace(
        name=card.name,
        major=major,
        minor=minor,
        total_memory=card.memory,
        multi_processor_count=card.processors,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        L2_cache_size=50 * 2**20,
        gcnArchName="",
    )
    stream = SimpleNamespace(
        cuda_stream=0, device=torch.device("cuda", 0), stream_id=0, device_index=0, device_type=1
    )
    answers: list[tuple[Any, str, Any]] = [
        (torch._C, "_cuda_getDevice", lambda: 0),
        (torch._C, "_cuda_setDevice", lambda _: None),
        (torch._C, "_cuda_exchangeDevice", lambda _: 0),
        (torch._C, "_cuda_maybeExchangeDevice", lambda _: 0),
        (torch._C, "_cuda_getDeviceCount", lambda: 1),
        (torch._C, "_cuda_getCurrentRawStream", lambda _: 0),
        (torch._C, "_cuda_getCurrentStream", lambda _: (0, 0, 1)),
        (torch._C, "_cuda_isCurrentStreamCapturing", lambda: False),
        (torch._C, "_cuda_getArchFlags", lambda: f"sm_{major}{minor}"),
        (torch.cuda, "_exchange_device", lambda _: 0),
        (torch.cuda, "_maybe_exchange_device", lambda _: 0),
        (torch.cuda, "get_device_properties", lambda *_: facts),
        (torch.cuda, "get_rng_state", lambda *_: torch.zeros(1)),
        (torch.cuda, "set_rng_state", lambda *_: None),
        (torch.cuda, "current_stream", lambda *_: stream),
        (torch.cuda, "default_stream", lambda *_: stream),
        (CudaInterface, "get_device_properties", staticmethod(lambda *_: facts)),
        (CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: facts)),
        (CudaInterface, "get_raw_stream", staticmethod(lambda *_: 0)),
        (CudaInterface, "get_compute_capability", staticmethod(lambda *_: 10 * major + minor)),
    ]
    options: dict[str, Any] = {
        "fx_graph_cache": False,
        "compile_threads": 1,
        "joint_graph_constant_folding": False,
    }
    both: dict[str, Any] = {
        "enable_autograd_cache": False,
        "force_non_lazy_backward_lowering": True,
    }
    with ExitStack() as stack, inductor.patch(**options), functorch.patch(**both):
        for owner, name, answer in answers:
            stack.enter_context(mock.patch.object(owner, name, answer, create=True))
        yield


def codes_of(block: Callable[..., Tensor], *inputs: Any) -> list[tuple[str, int, int]]:
    """Generated code of the forward and the backward graph, in this order; what each moves, and gives out (`given`).

    Raises if there is a graph break.
    """
    codes: list[tuple[str, int, int]] = []

    def compile_to_module(graph: GraphLowering) -> Any:
        code = graph.codegen()[0].value
        codes.append((code, moved(graph, code), given(graph)))

        def call(_: Any) -> Any:
            raise Stop

        nothing = {
            "__file__": __file__,
            "key": "none",
            "runner": None,
            "recursively_apply_fns": lambda *_: None,
        }
        return SimpleNamespace(call=call, **nothing)

    torch._dynamo.reset()
    with mock.patch.object(GraphLowering, "compile_to_module", compile_to_module):
        try:
            torch.compile(block, fullgraph=True)(*inputs)
        except Stop:
            return codes
    raise RuntimeError("nothing was compiled")


def flash_attention(scores: Scores, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What a card would choose for `Scores`. torch without CUDA would decompose it."""
    half = (q.bfloat16(), k.bfloat16(), v.bfloat16())
    attend: Any = torch.ops.aten._scaled_dot_product_flash_attention
    return attend(*half, dropout_p=0.0, is_causal=True)[0]


def launches(code: str) -> list[str]:
    """What `call` launches, in order."""
    patterns = (
        r"^\s+(?:\w+ = )?(triton_\w+)\.run\(",
        r"^\s+(?:\w+ = )?((?:extern_kernels|torch\.ops|aten)\.[\w.]+)\(",
    )
    body = code[code.index("def call(") :]
    found = [
        (m.start(), m[1]) for pattern in patterns for m in re.finditer(pattern, body, re.MULTILINE)
    ]
    return [name for _, name in sorted(found)]


def moved(graph: GraphLowering, code: str) -> int:
    """Bytes that the compiler's kernels and our casts read and write: each tensor that a kernel is given, once.

    Not those of GEMMs, which are the same however casts are fused.
    """

    def size(name: str) -> int:
        """Bytes of a tensor of the graph; 0 if `name` is of anything else."""
        if name not in graph.graph_inputs and graph.try_get_buffer(name) is None:
            return 0
        return int(graph.get_numel(name)) * graph.get_dtype(name).itemsize

    total = 0
    body = code[code.index("def call(") :]
    for arguments in re.findall(r"triton_\w+\.run\((.*), stream=", body):
        total += sum(map(size, set(re.findall(r"[a-z]\w*", arguments))))
    # A cast reads bfloat16 and writes FP8 twice.
    for given in re.findall(r"fp8_cast_slot\.default\((?:reinterpret_tensor\()?(\w+)", body):
        total += 2 * size(given)
    # A backward without a transpose reads and writes the FP8 bytes of both operands.
    backward = r"fp8_backward\.default\((\w+), None, (?:reinterpret_tensor\(.*?\)|\w+), \w+, (\w+)"
    for grad, kept in re.findall(backward, body):
        total += 2 * (size(grad) + size(kept))
    return total


def given(graph: GraphLowering) -> int:
    """Bytes of the memory that the graph makes and gives out: forward gives its result, and what backward needs."""
    names: set[str] = set()
    for output in graph.graph_outputs:
        if not isinstance(output, NoneAsConstantBuffer):
            names.add(output.get_name())
    return sum(
        int(graph.get_numel(name)) * graph.get_dtype(name).itemsize
        for name in names - graph.graph_inputs.keys()
    )


def noted_in_place(code: str) -> int:
    """Calls of torchao's note whose first argument is what a GEMM wrote, and not a copy of it."""
    products = set(re.findall(r"extern_kernels\._scaled_mm\(.*out=(\w+)\)", code))
    noted = re.findall(
        r"torchao_note\.default\((?:reinterpret_tensor\()?(\w+)", code[code.index("def call(") :]
    )
    return sum(name in products for name in noted)


def main(rung: str, casts: str = "") -> dict[str, Any]:
    if casts == "without":
        native_triton._unusable = lambda device, checked: "left out"
    card = find_card("H100")
    backend_name, _, precision = rung.partition(":")
    recipe = Recipe.model_validate(
        {
            "name": "paper",
            "layers": {"fuse": casts == "fused"},
            "ladder": [{"backend": backend_name, "precision": precision, "tiers": ["HOPPER"]}],
        }
    )
    attention = mock.patch.object(Scores, "forward", flash_attention)
    with fake_card(card), compiler_on_paper(card), attention:
        gpu = torch.device("cuda", 0)
        with gpu:
            model = build(vocab=256, dim=DIM, layers=1, heads=HEADS, ffn=FFN)
        backend = build_backend(
            make_plan(recipe, probe(), recipe.ladder[0], [], model), recipe, model, gpu
        )
        backend.begin_window(sample=False)
        inputs = (
            torch.empty(1, TOKENS, DIM, device=gpu, requires_grad=True),
            rotary(TOKENS, DIM // HEADS, gpu),
        )
        with backend.context():
            (forward, in_forward, kept), (backward, in_backward, _) = codes_of(
                next(iter(model.blocks)), *inputs
            )
    return {
        "layers": len(backend.layers),
        "forward": launches(forward),
        "backward": launches(backward),
        "moved": {"forward": in_forward, "backward": in_backward},
        "kept": kept,
        "noted in place": noted_in_place(forward) + noted_in_place(backward),
        "fp8 in forward": sorted(set(re.findall(r"tl\.float8e\w+", forward))),
        "fp8 in backward": sorted(set(re.findall(r"tl\.float8e\w+", backward))),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
