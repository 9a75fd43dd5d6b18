"""A Hugging Face model from a local folder, fine-tuned under fp8_hybrid and loaded back.

Run: python examples/with_huggingface.py [FOLDER [TEXT]]; without a folder it makes a tiny model and a tokenizer first.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import harness as _  # noqa: F401 (silences torchao's log lines about kernels for other machines)

try:
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: in the project's folder: pip install -e '.[hf]'")


def tiny(folder: Path, text: Path) -> Path:
    """A model folder as fetched from the hub: config.json, model.safetensors, tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(path) for path in text.glob("*.py")], trainer)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = transformers.Qwen3Config(vocab_size=512, **sizes, **heads)
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def harness(*words: str, work: Path) -> str:
    """Run `harness <words>` as in a shell; its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", *words], cwd=work, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def main(work: Path, folder: Path | None, text: Path) -> None:
    # Every setting is a key of the config: `harness train` builds the model from the folder.
    folder = folder or tiny(work / "base", text)
    train = ["train", "--recipe", "fp8_hybrid", "--name", "tuned", "tracking.mlflow=false"]
    train += [f"model.target=hf:{folder}", f"data.path={text}", f"data.tokenizer={folder}"]
    train += ["train.steps=60", "train.global_batch=8", "train.micro_batch=4"]
    train += ["data.context=128", "train.lr=3e-3"]
    for line in harness(*train, work=work).splitlines():
        if line.startswith(("step ", "loss", "precision", "FP8")):
            print(line)

    # Use the run's model, then write it as a folder that transformers loads without the harness.
    print(harness("eval", "runs/tuned", work=work))
    print(harness("sample", "runs/tuned", "import ", "--tokens", "24", work=work))
    print(harness("export", "runs/tuned", "--format", "hf", "--out", "tuned", work=work))
    model = transformers.AutoModelForCausalLM.from_pretrained(work / "tuned", local_files_only=True)
    saved = json.loads((work / "tuned/config.json").read_text())
    print(f"loaded back: {type(model).__name__}, {saved['model_type']}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        given = [Path(each).resolve() for each in sys.argv[1:3]]
        main(Path(scratch), *(given + [None, Path(json.__file__).parent][len(given) :]))
