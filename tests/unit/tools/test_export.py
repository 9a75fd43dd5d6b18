"""`harness export`: what is written of a run's checkpoints, what the card says of them, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from harness.cli import app
from harness.models.gpt import build
from harness.models.llama import build as build_llama
from harness.tracking.journal import Journal, encode, read_rows
from tests.support.runs import events, metrics, train

# Some slot's amax is over this in the first steps, so that layers leave FP8 while the run is short.
RECIPE = """
name: leaves
ladder: [{backend: native, precision: fp8, tiers: [CPU, ADA, HOPPER, BLACKWELL]}]
fallback: {amax_over: 3.0, hits: 1}
"""
ARGS: dict[str, Any] = {
    "dim": 64,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "ffn": 96,
    "tied": True,
    "rope_base": 5e5,
}
FOREIGN = """
from torch import nn
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(256, 32), nn.Linear(32, 32), nn.Linear(32, 256, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", nn.Parameter(self.mix.bias.detach().clone(), requires_grad=False))
    def forward(self, inputs):
        return self.head(self.mix(self.embed(inputs)).relu())
def build(): return Tied()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of 8 steps, saved after 4 and 8: `gpt`, whose layers leave FP8, and `foreign`."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "leaves.yaml").write_text(RECIPE)
    (folder / "foreign_model.py").write_text(FOREIGN)
    saved = ["train.steps=8", "checkpoint.every=4", "train.eval_every=4"]
    args = json.dumps(ARGS)
    done = train(
        folder,
        "--recipe",
        str(folder / "leaves.yaml"),
        "--name",
        "gpt",
        *saved,
        f"model.args={args}",
    )
    assert done.returncode == 0, done.stdout
    model = ["model.target=foreign_model:build", "model.args={}"]
    done = train(
        folder, "--recipe", "fp32", "--name", "foreign", *saved, *model, PYTHONPATH=str(folder)
    )
    assert done.returncode == 0, done.stdout
    return folder / "runs"


def export(run: Path, out: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["export", str(run), "--out", str(out), *more])


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


@pytest.mark.slow
def test_names_and_shapes_are_llamas(folder: Path, tmp_path: Path) -> None:
    told = export(folder / "gpt", tmp_path / "out")
    assert told.exit_code == 0, told.output
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (
        2,
        1,
        32,
    )
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 5e5}
    assert config["tie_word_embeddings"] is True
    made, own = load_file(tmp_path / "out" / "model.safetensors"), weights(folder / "gpt", 8)
    assert "lm_head.weight" not in made, "tied weights are there once, as transformers writes them"
    assert torch.equal(made["model.embed_tokens.weight"], own["embed.weight"])
    q, k, v = own["blocks.1.attn.qkv.weight"].split([64, 32, 32])
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        assert torch.equal(made[f"model.layers.1.self_attn.{name}_proj.weight"], tensor)
    assert torch.equal(
        made["model.layers.0.mlp.up_proj.weight"], own["blocks.0.mlp.gate_up.weight"][96:]
    )
    assert len(made) == 2 + 2 * 9
    assert stat.S_IMODE((tmp_path / "out" / "model.safetensors").stat().st_mode) & 0o044, (
        "others can read it"
    )


def test_what_is_exported_computes_as_the_run_did(folder: Path, tmp_path: Path) -> None:
    """Through `harness.models.llama:build`, which reads what export wrote: the reverse way, every bit."""
    assert export(folder / "gpt", tmp_path / "out").exit_code == 0
    own = weights(folder / "gpt", 8)
    model = build(**ARGS)
    model.load_state_dict(own | {"lm_head.weight": own["embed.weight"]})
    read = build_llama(str(tmp_path / "out"), loss_chunk=16)
    assert read.lm_head.weight is read.embed.weight
    tokens = torch.arange(64).reshape(2, 32)
    assert torch.equal(read(tokens), model(tokens))
    assert read.settings.loss_chunk == 16
    assert all(parameter.requires_grad for parameter in read.parameters())


def test_a_named_step_and_the_newest(folder: Path, tmp_path: Path) -> None:
    for step, more in ((4, ["--step", "4"]), (8, [])):
        out = tmp_path / str(step)
        assert export(folder / "gpt", out, *more).exit_code == 0
        made = load_file(out / "model.safetensors")
        assert torch.equal(made["model.norm.weight"], weights(folder / "gpt", step)["norm.weight"])
        (loss,) = [value for at, value in metrics(folder / "gpt") if at == step]
        card = (out / "README.md").read_text()
        assert f"{loss:.6f} nats per byte, after step {step}" in card
        context = yaml.safe_load((folder / "gpt" / "config.yaml").read_text())["data"]["context"]
        assert f" samples of {context} tokens a step" in card


def test_the_card_tells_what_ran_and_which_layers_left(folder: Path, tmp_path: Path) -> None:
    run = folder / "gpt"
    switches = events(run, "precision.switched")
    assert switches, "no layer left FP8: the test would show nothing"
    plan = json.loads((run / "plan.json").read_text())
    assert export(run, tmp_path / "end").exit_code == 0
    card = (tmp_path / "end" / "README.md").read_text()
    for module, precision in plan["effective_layers"].items():
        line = next(line for line in card.splitlines() if line.startswith(f"| `{module}` |"))
        assert line.split("|")[3].strip() == precision, module
    assert "bf16" in {
        plan["effective_layers"][row["module"]]
        for row in plan["layers"]
        if row["precision"] == "fp8"
    }
    for switch in switches:
        assert f"- before step {switch['step']}: to BF16: {', '.join(switch['demote'])}" in card
    data = next(
        row["data"]
        for row in read_rows(run / "journal.jsonl")
        if row["kind"] == "run" and row["data"]
    )
    for fact in (
        plan["recipe_sha256"],
        data["sha256"],
        "native:fp8 on CPU",
        "8 of 8",
        torch.__version__,
    ):
        assert fact in card, fact
    assert str(tmp_path.parent) not in card, (
        "the card does not show where files lie on this machine"
    )


def test_the_card_of_an_earlier_step_knows_nothing_of_later_ones(
    folder: Path, tmp_path: Path
) -> None:
    later = [
        event["step"] for event in events(folder / "gpt", "precision.switched") if event["step"] > 4
    ]
    assert export(folder / "gpt", tmp_path / "out", "--step", "4").exit_code == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "after step 8" not in card
    for step in later:
        assert f"before step {step}" not in card
    state = json.loads(
        (folder / "gpt" / "checkpoints" / "step-00000004" / "state.json").read_text()
    )
    ran = [
        line
        for line in card.splitlines()
        if line.startswith("| `blocks.") and "| fp8 | bf16 |" in line
    ]
    assert len(ran) == len(state["parts"]["fp8"]["demoted"])


@pytest.mark.slow
def test_the_weights_that_a_rollback_returned_to_are_of_before_it(
    folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "gpt", run)
    with Journal(run / "journal.jsonl") as journal:
        journal.event(8, "guard.rollback", to_step=4, passed_over=[5, 6])
        journal.attempt = 2
        for step in range(5, 9):
            journal.metrics(step, {"train/loss": 3.0, "train/step_applied": 1.0})
    for step, told in ((4, "none"), (8, "1, 2 windows of the data skipped")):
        out = tmp_path / str(step)
        assert export(run, out, "--step", str(step)).exit_code == 0
        assert f"| rollbacks | {told} |" in (out / "README.md").read_text()


@pytest.mark.slow
def test_the_card_names_what_a_resume_changed_before_its_step(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "gpt", run)
    with Journal(run / "journal.jsonl") as journal:
        changes = [["train.global_batch", 2, 4], ["checkpoint.emergency_path", None, "/mnt/disk"]]
        journal.event(4, "run.changed", text="as below", changes=changes)
    for step, told in ((4, False), (8, True)):
        out = tmp_path / str(step)
        assert export(run, out, "--step", str(step)).exit_code == 0
        row = "| changed after step 4 | train.global_batch from 2 to 4 |"
        assert (row in (out / "README.md").read_text()) is told


@pytest.mark.slow
def test_the_card_names_the_recipe_of_every_stretch(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "gpt", tmp_path / "runs" / "gpt")
    run, args = tmp_path / "runs" / "gpt", f"model.args={json.dumps(ARGS)}"
    first = json.loads((run / "plan.json").read_text())["recipe_sha256"]
    saved = ["train.steps=12", "checkpoint.every=4", "train.eval_every=4"]
    more = ["--accept-changed", "recipe", "--name", "gpt", *saved, args]
    done = train(tmp_path, "--recipe", "bf16", *more)
    assert done.returncode == 0, done.stdout
    second = json.loads((run / "plan.json").read_text())["recipe_sha256"]
    assert export(run, tmp_path / "end").exit_code == 0
    card = (tmp_path / "end" / "README.md").read_text()
    assert f"| trained under | steps 1 to 8: leaves.yaml, SHA-256 `{first}` |" in card
    assert f"| trained under | steps 9 to 12: bf16, SHA-256 `{second}` |" in card
    for switch in events(run, "precision.switched"):
        assert f"- before step {switch['step']}: to BF16: {', '.join(switch['demote'])}" in card
    assert "No layer had left FP8" not in card
    # The plan is now that of bf16, which the checkpoint of step 8 was not trained under.
    assert export(run, tmp_path / "earlier", "--step", "8").exit_code == 0
    card = (tmp_path / "earlier" / "README.md").read_text()
    assert f"| trained under | steps 1 to 8: leaves.yaml, SHA-256 `{first}` |" in card
    layers = [line for line in card.splitlines() if line.startswith("| `blocks.")]
    assert layers
    assert all("not known: the plan is of another recipe" in line for line in layers)


def test_layers_that_another_run_took_out_of_fp8_are_on_the_card(
    folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "begun"
    shutil.copytree(folder / "gpt", run)
    kept = [
        row for row in read_rows(run / "journal.jsonl") if row.get("code") != "precision.switched"
    ]
    (run / "journal.jsonl").write_bytes(b"".join(map(encode, kept)))
    (run / "started_from.json").write_text(
        json.dumps({"path": str(folder / "first" / "checkpoints" / "step-00000003")})
    )
    assert export(run, tmp_path / "out").exit_code == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "No layer had left FP8" not in card
    state = json.loads((run / "checkpoints" / "step-00000008" / "state.json").read_text())
    for layer in state["parts"]["fp8"]["demoted"]:
        assert layer in next(
            line for line in card.splitlines() if line.startswith("- in BF16 at this step")
        )
    assert "| trained under | steps up to 00000003: another run, first |" in card


@pytest.mark.parametrize("name", ["gpt", "foreign"])
def test_own_names_load_strictly_and_ties_are_whole(
    folder: Path, tmp_path: Path, name: str
) -> None:
    out = tmp_path / "out"
    told = export(folder / name, out, "--format", "safetensors")
    assert told.exit_code == 0, told.output
    made = load_file(out / "model.safetensors")
    alias, first = (
        ("lm_head.weight", "embed.weight") if name == "gpt" else ("head.weight", "embed.weight")
    )
    assert torch.equal(made[alias], made[first])
    own = weights(folder / name, 8)
    assert made.keys() == own.keys() | {alias}
    if name == "gpt":
        build(**ARGS).load_state_dict(made, strict=True)
    assert yaml.safe_load((out / "config.yaml").read_text())["train"]["steps"] == 8


def test_a_foreign_model_has_no_hugging_face_format(folder: Path, tmp_path: Path) -> None:
    told = export(folder / "foreign", tmp_path / "out")
    assert told.exit_code == 2
    assert "'foreign_model:build' has no Hugging Face format" in told.output
    assert "--format safetensors" in told.output
    assert not (tmp_path / "out").exists()


def test_a_folder_in_use_is_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    told = export(folder / "gpt", tmp_path / "out")
    assert told.exit_code == 2
    assert "not empty" in told.output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    (tmp_path / "file").write_text("mine")
    assert "no folder" in export(folder / "gpt", tmp_path / "file").output
    (tmp_path / "empty").mkdir()
    assert export(folder / "gpt", tmp_path / "empty").exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"out", "file", "empty"}, (
        "nothing half done lies about"
    )


@pytest.fixture
def damaged(folder: Path, tmp_path: Path) -> Path:
    """A copy of the run with one bit flipped in the newest weights."""
    run = tmp_path / "damaged"
    shutil.copytree(folder / "gpt", run)
    path = run / "checkpoints" / "step-00000008" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    return run


def test_damaged_weights_are_never_exported(damaged: Path, tmp_path: Path) -> None:
    told = export(damaged, tmp_path / "out", "--step", "8")
    assert told.exit_code == 2
    assert "differs from its SHA-256" in told.output
    assert not (tmp_path / "out").exists()
    told = export(damaged, tmp_path / "out")
    assert told.exit_code == 0
    assert "do not verify: steps 8" in told.output
    assert torch.equal(
        load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"],
        weights(damaged, 4)["norm.weight"],
    )
    (damaged / "checkpoints" / "step-00000004" / "state.json").unlink()
    assert export(damaged, tmp_path / "none").exit_code == 2


def test_a_step_that_is_not_there_is_answered_with_those_that_are(
    folder: Path, tmp_path: Path
) -> None:
    told = export(folder / "gpt", tmp_path / "out", "--step", "5")
    assert told.exit_code == 2
    assert "no checkpoint of step 5" in told.output
    assert "4, 8" in told.output


def test_a_config_of_another_model_is_noticed(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "other"
    shutil.copytree(folder / "gpt", run)
    path = run / "config.yaml"
    text = path.read_text()
    for change in ("dim: 32", "layers: 3", "layers: 1", "qk_norm: true"):
        key = change.partition(":")[0]
        found = re.sub(rf"(?m)^(    ){key}: .*$", rf"\g<1>{change}", text)
        path.write_text(
            found if found != text else text.replace("    dim: 64", f"    dim: 64\n    {change}")
        )
        told = export(run, tmp_path / "out")
        assert told.exit_code == 2, change
        assert "not those of the model that config.yaml describes" in told.output, change


def test_a_run_of_another_loop_and_no_run_are_refused(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "own"
    shutil.copytree(folder / "gpt", run)
    (run / "config.yaml").unlink()
    assert "no config.yaml" in export(run, tmp_path / "out").output
    assert "not a run" in export(tmp_path, tmp_path / "out").output
