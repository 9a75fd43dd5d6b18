"""`harness doctor --config` on folders of Hugging Face models: no weight is read."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, save

from harness.tools.doctor import command

CONFIG = """
recipe: bf16
train: {steps: 4, global_batch: 4, micro_batch: 2}
data: {context: 32}
tracking: {mlflow: false}
"""


def diagnosed(
    folder: Path, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, dict[str, Any]]:
    """Exit code of `harness doctor --json`, and its findings by code."""
    config = folder / "mine.yaml"
    config.write_text(CONFIG + f'model: {{target: "hf:{folder}"}}\n')
    capsys.readouterr()
    code = command(list(words), str(config), None, True)
    found = json.loads(capsys.readouterr().out)
    assert found["resolved"] == "autocast:bf16" or code == 2
    return code, {finding["code"]: finding for finding in found["findings"]}


def hollow(folder: Path, kind: str, **sizes: Any) -> None:
    """A folder of a model as large as you like: each weight has a file with a header, and a hole for its values."""
    config = CONFIGS[kind](**sizes)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    files: dict[str, str] = {}
    for name, tensor in model.named_parameters():
        files[name] = f"{name}.safetensors"
        about = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [0, tensor.nbytes]}
        text = json.dumps({"__metadata__": {"format": "pt"}, name: about}).encode()
        with (folder / files[name]).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + tensor.nbytes)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_model_beyond_all_memory_is_looked_at_without_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # 56 GiB of weights, of which none has more than 8 GiB.
    sizes = {"hidden_size": 2**14, "intermediate_size": 2**17, "num_attention_heads": 2**7,
             "num_key_value_heads": 2**7}  # fmt: skip
    hollow(tmp_path, "llama", **sizes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, found = diagnosed(tmp_path, capsys)
    # In KiB: the largest weight alone would be 8 GiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 4 * 2**20
    # Of machines that do not hold it, nor its checkpoints.
    assert set(found) <= {"machine.memory", "machine.disk"}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("{}", set()),
        ("{weights: fresh}", set()),
        # peft casts what its adapters take to float32.
        ("{lora: {r: 4}}", {"casts.useless"}),
    ],
)
def test_a_folder_is_looked_at_as_its_run_builds_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: str,
    expected: set[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, found = diagnosed(save(tmp_path, "llama"), capsys, f"model.args={args}")
    assert (code, set(found)) == (0, expected)


def test_weights_that_are_not_the_models_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    weights = load_file(save(tmp_path, "llama") / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    code, found = diagnosed(tmp_path, capsys)
    assert code == 2
    assert "model.norm.weight" in found["model.refused"]["what"]
