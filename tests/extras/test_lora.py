"""peft's LoRA beside frozen weights in FP8: either order of wrapping, GEMMs, checkpoints, resumes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.core.blocks import blocks_of
from harness.core.errors import CheckpointError
from harness.engines.parts import ModelPart
from harness.models import Task
from harness.precision.api import Precision
from harness.precision.recipe import Recipe, load_recipe
from tests.extras.tiny_models import batch, load, save
from tests.support.matrix import rest_nightly
from tests.support.pairs import assert_same_state, different, figures, ran, state
from tests.support.runs import harness, metrics, train

R = 64  # of a rank that FP8 could take, too


def adapters(model: Any, dropout: float = 0.0) -> Any:
    torch.manual_seed(5)
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=R,
            lora_dropout=dropout,
            target_modules=["q_proj", "v_proj", "c_attn"],
        ),
    )


def trained(model: nn.Module, precision: Precision, steps: int = 4) -> list[float]:
    task, losses = Task(model, "hf"), []
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=3e-2, fused=True
    )
    torch.manual_seed(0)
    for _ in range(steps):
        with precision.context():
            loss = task.loss(model, batch())
        precision.backward(loss)
        precision.step(optimizer, max_grad_norm=1.0)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", ["fp8_hybrid", "fp8_dynamic", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_either_order_of_wrapping_trains_alike(kind: str, recipe: str, tmp_path: Path) -> None:
    save(tmp_path, kind)
    found = []
    for first in ("adapters", "prepare"):
        precision = Precision.from_recipe(recipe)
        model = load(tmp_path)
        if first == "adapters":
            model = adapters(model)
            precision.prepare(model)
        else:
            precision.prepare(model)
            model = adapters(model)
        base = {
            name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad
        }
        losses = trained(model, precision)
        after = dict(model.named_parameters())
        assert all(torch.equal(after[name], value) for name, value in base.items())
        assert losses[-1] < losses[0]
        stats = precision.stats()
        named = (name.replace(".base_layer", "") for name in precision.plan.fp8_layers())
        layers = [name.split("base_model.model.")[-1] for name in named]
        found.append((losses, layers, None if stats is None else list(stats.amax)))
    assert found[0] == found[1]
    if recipe == "fp8_hybrid" or (recipe, kind) == ("fp8_dynamic", "llama"):
        assert len(found[0][1]) == {"llama": 10, "gpt2": 8}[kind]


@pytest.mark.parametrize(
    "recipe", rest_nightly(["fp8_hybrid", "fp8_dynamic", "bf16"], "fp8_hybrid", "bf16")
)
def test_compiled_blocks_train_as_eager_ones(recipe: str, tmp_path: Path) -> None:
    """torch's own kernels run the graphs, so the bits are the same."""
    save(tmp_path, "llama")
    found: dict[str, tuple[list[float], dict[str, Any]]] = {}
    for way in ("eager", "compiled"):
        model = adapters(load(tmp_path))
        precision = Precision.from_recipe(recipe)
        precision.prepare(model)
        if way == "compiled":
            torch._dynamo.reset()
            for block in blocks_of(model):
                block.compile(backend="aot_eager", fullgraph=True)
        found[way] = trained(model, precision), dict(model.named_parameters())

    assert found["compiled"][0] == found["eager"][0]
    for name, weight in found["eager"][1].items():
        assert torch.equal(found["compiled"][1][name], weight), name


def test_the_plan_names_adapters_and_frozen_layers(tmp_path: Path) -> None:
    model = adapters(load(save(tmp_path, "llama")))
    precision = Precision.from_recipe("fp8_hybrid")
    precision.prepare(model)
    rows = {
        row.module.removeprefix("base_model.model.model.layers.0."): row
        for row in precision.plan.layers
    }
    base = rows["self_attn.q_proj.base_layer"]
    assert (base.precision, base.reason) == ("fp8", "converted, frozen: no weight gradient")
    for half in ("lora_A", "lora_B"):
        row = rows[f"self_attn.q_proj.{half}.default"]
        assert row.precision == "bf16"
        assert row.reason == "a low-rank adapter (LoRA): too small to gain, and all that is trained"
    dtypes = []
    adapter = model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"]
    adapter.register_forward_hook(lambda *given: dtypes.append(given[-1].dtype))
    with precision.context():
        Task(model, "hf").loss(model, batch())
    assert dtypes == [torch.bfloat16]
    assert adapter.weight.dtype == torch.float32


@pytest.mark.parametrize(
    "wrapping",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
)
def test_patterns_mean_layers_by_the_names_that_they_had_before_peft(
    wrapping: dict[str, Any], tmp_path: Path
) -> None:
    save(tmp_path, "llama")
    policy = load_recipe("fp8_hybrid").model_dump()
    policy["layers"]["exclude"] = ["*.1.self_attn.q_proj"]
    precision = Precision(Recipe.model_validate(policy))
    model: Any = load(tmp_path)
    precision.prepare(peft.get_peft_model(model, peft.LoraConfig(r=R, **wrapping)))

    converted = precision.plan.fp8_layers()
    assert not [name for name in converted if "lm_head" in name]
    assert not [name for name in converted if "1.self_attn.q_proj" in name]
    assert [name for name in converted if "0.self_attn.q_proj" in name]


def test_amax_of_frozen_weights_is_theirs_and_stays(tmp_path: Path) -> None:
    model = adapters(load(save(tmp_path, "llama")))
    precision = Precision.from_recipe("fp8_hybrid")
    precision.prepare(model)
    trained(model, precision, 3)
    tensors = precision.state_dict()["tensors"]
    stats = precision.stats()
    assert stats is not None
    parameters = {name.removesuffix(".weight"): p for name, p in model.named_parameters()}
    for number, layer in enumerate(precision.plan.fp8_layers()):
        column = tensors["fp8.history"][:, 3 * number + 1]
        amax = parameters[layer].abs().max()
        assert set(column[column > 0].tolist()) == {amax.item()}
        assert (column > 0).sum() == 3
        # Nothing is trained before the first projections: no gradient comes back to them.
        reached = not any(f"layers.0.self_attn.{name}_proj" in layer for name in "qkv")
        gradients = tensors["fp8.history"][:, 3 * number + 2]
        assert (gradients > 0).sum() == (3 if reached else 0)


class Products(TorchDispatchMode):
    """Shapes of what is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.shapes.append(tuple(out.shape))
        return out


@pytest.mark.parametrize("recipe", ["fp8_hybrid", "fp8_dynamic"])
def test_frozen_layers_multiply_no_weight_gradient(recipe: str, tmp_path: Path) -> None:
    save(tmp_path, "llama")
    seen = {}
    for lora in (None, {"r": 4, "targets": ["q_proj"]}):
        model = load(tmp_path, **({"lora": lora} if lora else {}))
        precision = Precision.from_recipe(recipe)
        precision.prepare(model)
        with precision.context():
            loss = Task(model, "hf").loss(model, batch(3))
        with Products() as products:
            precision.backward(loss)
        seen[lora is None] = products.shapes
    gate = {(128, 64), (64, 128)}  # gate_proj's weight, and only weights are of this shape
    assert sum(shape in gate for shape in seen[True]) == 6
    assert sum(shape in gate for shape in seen[False]) == 0


def test_checkpoints_hold_the_adapters_alone(tmp_path: Path) -> None:
    folder = save(tmp_path / "base", "llama")
    model = load(folder, lora={"r": 4})
    tensors, meta = ModelPart(model).state_dict()
    assert tensors
    assert all("lora_" in name for name in tensors)
    assert meta["frozen"]["from"] == str(folder)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.normal_()
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    other = load(folder, lora={"r": 4})
    ModelPart(other).load_state_dict(saved, meta)
    with torch.no_grad():
        assert torch.equal(
            model.eval()(batch()["inputs"]).logits, other.eval()(batch()["inputs"]).logits
        )
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match="are not those that the checkpoint was trained beside"
    ):
        ModelPart(load(folder, lora={"r": 4})).load_state_dict(saved, meta)


def test_adapters_beside_fresh_weights_are_saved_with_them(tmp_path: Path) -> None:
    tensors, meta = ModelPart(
        load(save(tmp_path, "llama"), weights="fresh", lora={"r": 4})
    ).state_dict()
    assert "frozen" not in meta
    assert any("base_layer" in name for name in tensors)


def test_adapters_train_under_fsdp_as_under_ddp(tmp_path: Path) -> None:
    base = save(tmp_path / "base", "llama")
    args = (
        "--recipe",
        "fp8_hybrid",
        f"model.target=hf:{base}",
        "model.args={lora: {r: 8}}",
        "data.context=32",
    )
    ddp, fsdp = (ran(tmp_path / name, name, "r", *args, steps=4) for name in ("ddp", "fsdp"))
    assert different(figures(fsdp), figures(ddp)) == []

    # The frozen weights are sharded, and no part of the checkpoint.
    saved = state(fsdp, 4)
    assert all("lora_" in name for name in saved["model"])
    assert_same_state(saved, state(ddp, 4))


def test_a_run_with_adapters_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    folder = save(tmp_path / "base", "llama")
    args = [
        "--recipe",
        "fp8_hybrid",
        f"model.target=hf:{folder}",
        "model.args={lora: {r: 4, dropout: 0.1}}",
        "train.eval_every=0",
        "checkpoint.every=3",
    ]
    for name, stops in (("whole", [6]), ("parts", [3, 6])):
        for steps in stops:
            done = train(
                tmp_path,
                *args,
                "--name",
                name,
                f"train.steps={steps}",
                "train.min_lr_ratio=1",
                "train.lr=0.01",
            )
            assert done.returncode == 0, done.stdout
    assert metrics(tmp_path / "runs/whole") == metrics(tmp_path / "runs/parts")
    last = [tmp_path / f"runs/{name}/checkpoints/step-00000006" for name in ("whole", "parts")]
    models = [load_file(each / "model.safetensors") for each in last]
    assert models[0].keys() == models[1].keys()
    assert all("lora_" in name for name in models[0])
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    states = load_file(last[0] / "optimizer.safetensors")
    assert all("lora_" in name for name in states.keys() - {"applied"})
    told = " ".join(harness(tmp_path, "inspect", "runs/whole").stdout.split())
    silent = "base_model.model.model.layers.00.self_attn.q_proj.base_layer.grad_output"
    assert (
        f"29 of 30 FP8 slots saw a nonzero amax; no gradient goes back to {silent}: frozen" in told
    )


@pytest.mark.nightly
def test_another_base_is_named_by_the_first_layer_that_shows_it(tmp_path: Path) -> None:
    """The frozen weights are in no checkpoint: the states agree, and the runs do not begin alike."""
    bases = save(tmp_path / "base", "llama"), tmp_path / "other"
    shutil.copytree(*bases)
    weights = load_file(bases[1] / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] += 1.0
    save_file(weights, bases[1] / "model.safetensors", {"format": "pt"})
    for base in bases:
        args = ("--recipe", "bf16", f"model.target=hf:{base}", "model.args={lora: {r: 4}}")
        short = ("train.steps=1", "data.context=16", "data.val_samples=2", "train.eval_every=0")
        done = train(tmp_path, *args, *short, "--name", base.name)
        assert done.returncode == 0, done.stdout
    words = ("compare", "runs/base", "runs/other", "--replay", "--json", "--no-picture")
    found = json.loads(harness(tmp_path, *words).stdout)
    first = found["first_divergence"]
    assert (first["step"], first["phase"]) == (1, "forward")
    assert first["tensor"].endswith("layers.1.mlp.down_proj.base_layer")
    assert found["replay"]["frozen_weights_differ"]
    assert "frozen weights do not" in found["replay"]["meaning"]
