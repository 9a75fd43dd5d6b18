"""The training loops that take turns, each set up as its own documentation says.

A setup gets a `Job` and returns what trains one step. Its source is what a user would write, and its lines are counted.
So each setup says all that it does, even where several say the same.
"""

from __future__ import annotations

import inspect
import io
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from benchmarks.peers.shapes import MAX_NORM
from harness import Precision
from harness.core.protocols import Batch
from harness.precision.recipe import load_recipe

Step = Callable[[Batch], Tensor]


@dataclass(frozen=True, slots=True)
class Job:
    """What every loop is given.

    model: float32, on its device, with the initial weights that all loops begin with.
    loss: the mean loss of a model on a batch, 0-d.
    adamw: arguments of the optimizer. `harness train` has the same in its config.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Batch], Tensor]
    adamw: dict[str, Any]
    device: torch.device


@dataclass(frozen=True, slots=True)
class Loop:
    """One contender.

    precision: "bf16" or "fp8", of its GEMMs.
    what: how it is set up, in one sentence.
    guide: the page of its documentation that the setup follows.
    setup: from a job to the function that trains one step and returns its loss; None: `harness train`.
    recipe: that of `harness train`.
    packages: distributions that it needs beside torch.
    cuda: whether it needs an NVIDIA GPU.
    units: whether a GPU must have FP8 units for it.
    """

    name: str
    precision: str
    what: str
    guide: str
    setup: Callable[[Job], Step] | None
    packages: tuple[str, ...] = ()
    cuda: bool = False
    units: bool = False
    recipe: str = "fp8_hybrid"

    def lacks(self) -> str:
        """Why it cannot run here; empty if it can."""
        for package in self.packages:
            try:
                version(package)
            except PackageNotFoundError:
                return f"{package} is not installed"
        if self.cuda and not torch.cuda.is_available():
            return "it needs an NVIDIA GPU"
        on_gpu = torch.cuda.is_available()
        if self.units and on_gpu and torch.cuda.get_device_capability() < (8, 9):
            return "this GPU has no FP8 units"
        return ""


def code_lines(function: Callable[..., Any]) -> int:
    """Lines with code on them in the body of a function whose signature takes one line."""
    source = inspect.getsource(function)
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*skipped, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    docstring = len((function.__doc__ or "").splitlines())
    return len(lines) - 1 - docstring


def plain(job: Job) -> Step:
    model = job.model
    model.compile()
    optimizer = AdamW(model.parameters(), **job.adamw)

    def step(batch: Batch) -> Tensor:
        with torch.autocast(job.device.type, dtype=torch.bfloat16):
            loss = job.loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def transformer_engine(job: Job) -> Step:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format

    model = job.model
    for name, module in list(model.named_modules()):
        made: nn.Module | None = None
        if isinstance(module, nn.Linear) and not name.endswith("head"):
            made = te.Linear(module.in_features, module.out_features, bias=module.bias is not None)
        elif isinstance(module, nn.LayerNorm):
            made = te.LayerNorm(module.normalized_shape[0], eps=module.eps)
        elif isinstance(module, nn.RMSNorm):
            made = te.RMSNorm(module.normalized_shape[0], eps=module.eps)
        if made is not None:
            made.load_state_dict(module.state_dict(), strict=False)
            model.set_submodule(name, made)
    optimizer = AdamW(model.parameters(), **job.adamw)
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")

    def step(batch: Batch) -> Tensor:
        with (
            torch.autocast(job.device.type, dtype=torch.bfloat16),
            te.autocast(enabled=True, recipe=recipe),
        ):
            loss = job.loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def accelerate(job: Job) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=job.device.type == "cpu")
    optimizer = AdamW(job.model.parameters(), **job.adamw)
    model, optimizer = accelerator.prepare(job.model, optimizer)

    def step(batch: Batch) -> Tensor:
        loss = job.loss(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def accelerate_te(job: Job) -> Step:
    from accelerate import Accelerator
    from accelerate.utils import TERecipeKwargs

    recipe = TERecipeKwargs(fp8_format="HYBRID", amax_history_len=16, amax_compute_algo="max")
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    optimizer = AdamW(job.model.parameters(), **job.adamw)
    model, optimizer = accelerator.prepare(job.model, optimizer)

    def step(batch: Batch) -> Tensor:
        loss = job.loss(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def torchao(job: Job) -> Step:
    from torch._inductor import config as inductor
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Where there are no FP8 units, torchtitan takes this emulation, and does not compile it.
    emulated = job.device.type == "cpu"
    if emulated:
        config = Float8LinearConfig(emulate=True)
    else:
        config = Float8LinearConfig.from_recipe_name("rowwise")
        inductor.emulate_precision_casts = True

    def converts(linear: Any, name: str) -> bool:
        fits = linear.in_features % 16 == 0 and linear.out_features % 16 == 0
        return fits and not name.endswith("head")

    model = convert_to_float8_training(job.model, config=config, module_filter_fn=converts)
    for blocks in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for block in blocks:
            if not emulated:
                block.compile(fullgraph=True)
    optimizer = AdamW(model.parameters(), **job.adamw)

    def step(batch: Batch) -> Tensor:
        with torch.autocast(job.device.type, dtype=torch.bfloat16):
            loss = job.loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def fabric(job: Job) -> Step:
    from lightning.fabric import Fabric

    fabric: Any = Fabric(accelerator=job.device.type, devices=1, precision="bf16-mixed")
    optimizer = AdamW(job.model.parameters(), **job.adamw)
    model, optimizer = fabric.setup(job.model, optimizer)

    def step(batch: Batch) -> Tensor:
        loss = job.loss(model, batch)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def fabric_te(job: Job) -> Step:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import TransformerEnginePrecision

    # precision="transformer-engine" would train bf16 weights, unlike every other loop here.
    precision = TransformerEnginePrecision(
        weights_dtype=torch.float32,
        fallback_compute_dtype=torch.bfloat16,
        recipe={"fp8_format": "HYBRID", "amax_history_len": 16, "amax_compute_algo": "max"},
    )
    fabric: Any = Fabric(accelerator=job.device.type, devices=1, plugins=precision)
    # Layers are replaced here, so the optimizer comes after.
    model = fabric.setup_module(job.model)
    optimizer = fabric.setup_optimizers(AdamW(model.parameters(), **job.adamw))

    def step(batch: Batch) -> Tensor:
        loss = job.loss(model, batch)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def bare(job: Job) -> Step:
    precision = Precision.from_recipe("fp8_hybrid")
    model = precision.prepare(job.model)
    optimizer = precision.wrap(AdamW(model.parameters(), **job.adamw), max_grad_norm=MAX_NORM)

    def step(batch: Batch) -> Tensor:
        loss = job.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def bare_compiled(job: Job) -> Step:
    recipe = load_recipe("fp8_hybrid")
    # Transformer Engine's layers run eager in compiled blocks. Without its rung the recipe takes the native one.
    ladder = [rung for rung in recipe.ladder if rung.backend != "transformer_engine"]
    precision = Precision(recipe.model_copy(update={"ladder": ladder}))
    model = precision.prepare(job.model)
    for blocks in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for block in blocks:
            block.compile()
    optimizer = precision.wrap(AdamW(model.parameters(), **job.adamw), max_grad_norm=MAX_NORM)

    def step(batch: Batch) -> Tensor:
        loss = job.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _page(repository: str, commit: str, path: str) -> str:
    return f"https://github.com/{repository}/blob/{commit}/{path}"


# Not written together with the names of pages: a test looks for pages of docs/ in this project.
_ACCELERATE = "huggingface/accelerate"
_FABRIC = "Lightning-AI/pytorch-lightning"
_SOURCE = "docs/source"
PLAIN = "plain PyTorch"
SHIPPED = "harness train"
LOOPS = {
    loop.name: loop
    for loop in (
        Loop(
            PLAIN,
            "bf16",
            "autocast, and the model compiled as a whole",
            "https://docs.pytorch.org/tutorials/intermediate/torch_compile_tutorial.html",
            plain,
        ),
        Loop(
            "accelerate",
            "bf16",
            "mixed_precision=bf16",
            _page(
                _ACCELERATE,
                "00fb01c378b7c3b0b4f8c1023388db275379c24d",
                f"{_SOURCE}/basic_tutorials/migration.md",
            ),
            accelerate,
            ("accelerate",),
        ),
        Loop(
            "Lightning Fabric",
            "bf16",
            "precision=bf16-mixed",
            _page(
                _FABRIC,
                "17c3d0bc8af7179d187457bd9f3ba34d57240fbb",
                f"{_SOURCE}-fabric/fundamentals/convert.rst",
            ),
            fabric,
            ("lightning",),
        ),
        Loop(
            "Transformer Engine",
            "fp8",
            "its Linears and norms in place of torch's, delayed scaling",
            _page(
                "NVIDIA/TransformerEngine",
                "148fe40a91665090bbc51a441279ba102ed5fd31",
                "docs/getting_started/index.rst",
            ),
            transformer_engine,
            ("transformer-engine",),
            cuda=True,
            units=True,
        ),
        Loop(
            "accelerate with TE",
            "fp8",
            "mixed_precision=fp8 with TERecipeKwargs",
            _page(
                _ACCELERATE,
                "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
                f"{_SOURCE}/usage_guides/low_precision_training.md",
            ),
            accelerate_te,
            ("accelerate", "transformer-engine"),
            cuda=True,
            units=True,
        ),
        Loop(
            "torchao float8",
            "fp8",
            "as torchtitan sets it up: rowwise and compiled blocks; on a CPU emulated and eager",
            _page(
                "pytorch/torchtitan",
                "026c75f23fd0b1c0404e17853edef58ab0a7bbd0",
                "torchtitan/components/quantization/float8.md",
            ),
            torchao,
            ("torchao",),
            units=True,
        ),
        Loop(
            "Lightning Fabric with TE",
            "fp8",
            "TransformerEnginePrecision, with float32 weights as in the other loops",
            _page(
                _FABRIC,
                "003e3070e7b6ed6e80ad449c88ebcbde0894c010",
                f"{_SOURCE}-fabric/fundamentals/precision.rst",
            ),
            fabric_te,
            ("lightning", "transformer-engine"),
            cuda=True,
            units=True,
        ),
        Loop(
            SHIPPED,
            "fp8",
            "recipe fp8_hybrid, with guard, journal and snapshots",
            "docs/guide/training.md",
            None,
        ),
        Loop(
            "harness train, fp8_native",
            "fp8",
            "recipe fp8_native, with guard, journal and snapshots",
            "docs/guide/training.md",
            None,
            recipe="fp8_native",
        ),
        Loop("harness.Precision", "fp8", "recipe fp8_hybrid alone", "docs/guide/api.md", bare),
        Loop(
            "harness.Precision, compiled",
            "fp8",
            "recipe fp8_hybrid without Transformer Engine's rung, blocks compiled",
            "docs/guide/api.md#torchcompile",
            bare_compiled,
        ),
    )
}
