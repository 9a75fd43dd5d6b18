"""Names of Llama and Qwen3 without transformers: both ways, from a folder, and what a folder may lack.

That the same weights compute the same there is shown in tests/extras/test_llama_parity.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from harness.core.config import ModelConfig, load_config
from harness.core.errors import ConfigError
from harness.models import build_model
from harness.models.gpt import GPT, build
from harness.models.llama import config_of, from_llama, settings_of, to_llama

SMALL: dict[str, Any] = {"vocab": 64, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 48}
LLAMA_31 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def small(**args: Any) -> GPT:
    torch.manual_seed(0)
    return build(**SMALL | args)


def written(folder: Path, model: GPT) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(to_llama(model.state_dict(), model.settings), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(model.settings, 64)))
    return folder


def loaded(folder: Path, **args: Any) -> Any:
    return build_model(
        ModelConfig(target="harness.models.llama:build", args={"folder": str(folder), **args})
    )


@pytest.mark.parametrize("args", [{}, {"tied": True}, {"qk_norm": True}])
def test_names_there_and_back(args: dict[str, Any]) -> None:
    model = small(**args)
    state = model.state_dict()
    theirs = to_llama(state, model.settings)
    assert sum(t.numel() for t in theirs.values()) == sum(p.numel() for p in model.parameters())
    back = from_llama(theirs, model.settings)
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"tied": True, "rope_base": 5e5},
        {"qk_norm": True, "norm_eps": 1e-6},
        {"rope_scaling": LLAMA_31},
    ],
)
def test_config_there_and_back(args: dict[str, Any]) -> None:
    model = small(**args)
    again = build(**settings_of(config_of(model.settings, 64), "config.json"))
    assert again.settings == model.settings


def test_a_folder_as_model_target(tmp_path: Path) -> None:
    model = small(tied=True)
    read = loaded(written(tmp_path / "llama", model), recompute="block", recompute_every=2)
    for name, tensor in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name
    assert read.lm_head.weight is read.embed.weight
    assert (read.settings.recompute, read.settings.recompute_every) == ("block", 2)


def test_what_a_folder_lacks_is_named_together(tmp_path: Path) -> None:
    folder = written(tmp_path / "llama", small())
    state = to_llama(small().state_dict(), small().settings)
    del state["model.layers.1.self_attn.k_proj.weight"]
    state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    state["model.norm.weight"] = torch.ones(16)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        loaded(folder)
    told = str(caught.value)
    assert len(caught.value.problems) == 3
    for part in ("k_proj.weight", "q_proj.bias", "model.norm.weight is [16]"):
        assert part in told


def test_the_single_file_counts_beside_an_index_as_in_transformers(tmp_path: Path) -> None:
    folder = written(tmp_path / "llama", small())
    state = to_llama(small().state_dict(), small().settings)
    other = {name: torch.zeros_like(each) for name, each in state.items()}
    save_file(other, folder / "older.safetensors")
    index = {"weight_map": dict.fromkeys(other, "older.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert any(bool(each.abs().sum() > 0) for each in loaded(folder).parameters())


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        loaded(tmp_path)
    folder = written(tmp_path / "llama", small())
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        loaded(folder)
    # As in transformers, an index counts where there is no single file.
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="names a file outside of the folder"):
        loaded(folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "neither llama nor qwen3"),
        ({"attention_bias": True, "hidden_act": "gelu"}, "has hidden_act gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "has rope_type yarn"),
        ({"use_sliding_window": True}, "sliding windows"),
        ({"head_dim": 16}, "has head_dim 16 in a width of 32 with 4 heads"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised weights"),
        ({"num_hidden_layers": None}, "layers"),
    ],
)
def test_what_the_gpt_does_not_compute_is_refused(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = written(tmp_path / "llama", small())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=named):
        loaded(folder)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("quickstart", 3.3),
        ("gpt_25m", 25.6),
        ("gpt_125m", 123.6),
        ("gpt_1b", 1235.8),
        ("llama3_8b_8layers", 1747.0),
        ("llama3_8b", 8030.3),
    ],
)
def test_shipped_configs_have_the_size_that_their_names_say(name: str, millions: float) -> None:
    """Llama-3.2-1B has 1,235,814,400 parameters and Llama-3-8B 8,030,261,248."""
    config = load_config(name, [])
    with torch.device("meta"):
        model = build_model(config.model)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.051)
