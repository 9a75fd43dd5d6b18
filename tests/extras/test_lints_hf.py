"""The lints on models of transformers: clean ones have no finding, and what FP8 does not take is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from torch import nn

from harness.capability.probe import MachineFacts
from harness.core.findings import Finding
from harness.models import Task
from harness.precision.lints.model import lint_model
from harness.precision.plan import make_plan, resolve
from harness.precision.recipe import load_recipe


def findings(model: nn.Module, recipe: str) -> list[Finding]:
    policy = load_recipe(recipe)
    facts = MachineFacts(torch_version=str(torch.__version__))
    rung, verdicts = resolve(policy, facts)
    assert rung is not None
    plan = make_plan(policy, facts, rung, verdicts, model)
    task = Task(model, "hf:model")
    return lint_model(model, task.loss, tiny_models.batch(), policy, rung, plan)[0]


@pytest.mark.parametrize("recipe", ["fp8_hybrid", "fp16_scaler"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_a_clean_model_has_no_finding(tmp_path: Path, kind: str, recipe: str) -> None:
    assert findings(tiny_models.load(tiny_models.save(tmp_path, kind)), recipe) == []


@pytest.mark.parametrize("recipe", ["fp8_hybrid", "fp16_scaler"])
def test_a_loss_in_chunks_is_clean(tmp_path: Path, recipe: str) -> None:
    model = tiny_models.load(tiny_models.save(tmp_path, "llama"), loss_chunk=8)
    assert findings(model, recipe) == []


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_both_kinds_of_attention_are_clean(tmp_path: Path, attention: str) -> None:
    folder = tiny_models.save(tmp_path, "llama", tie_word_embeddings=True)
    model: Any = tiny_models.load(folder)
    model.set_attn_implementation(attention)
    assert findings(model, "fp16_scaler") == []


def test_experts_outside_linears_are_named(tmp_path: Path) -> None:
    model = tiny_models.load(tiny_models.save(tmp_path, "mixtral"))
    found = findings(model, "fp8_hybrid")
    assert {finding.code for finding in found} == {"model.fp8_outside"}
    assert all("experts" in finding.where for finding in found)


@pytest.mark.parametrize("chunk", [0, 8])
def test_an_odd_vocabulary_gets_the_padded_size(tmp_path: Path, chunk: int) -> None:
    folder = tiny_models.save(tmp_path, "gpt2", vocab_size=257)
    model = tiny_models.load(folder, loss_chunk=chunk)
    (finding,) = findings(model, "bf16")
    assert finding.code == "model.vocabulary"
    assert "320" in finding.fix
