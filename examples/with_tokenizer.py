"""From a folder of your own to samples: a BPE tokenizer, prepared data, a GPT under fp8_hybrid.

Run: python examples/with_tokenizer.py [FOLDER]; without a folder it takes a package of Python's standard library.
"""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: in the project's folder: pip install -e '.[hf]'")

END = "<|endoftext|>"


def tokenizer_of(folder: Path, path: Path) -> Path:
    """A byte-level BPE of 1,024 ids, trained on the folder's own text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(file) for file in sorted(folder.rglob("*.py"))], trainer)
    tokenizer.save(str(path))
    return path


def harness(*words: str, work: Path) -> str:
    """Run `harness <words>` as in a shell; its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", *words], cwd=work, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def main(work: Path, folder: Path) -> None:
    # Text becomes files of token ids, once for many runs.
    tokenizer = tokenizer_of(folder, work / "tokenizer.json")
    prepare = ["data", "prepare", str(folder), "--tokenizer", str(tokenizer), "--out", "prepared"]
    harness(*prepare, work=work)

    # A run takes the vocabulary from the prepared data. packing=documents: no sample attends to another document.
    train = ["train", "--recipe", "fp8_hybrid", "--name", "own", "--config", "tiny"]
    train += ["model.args={dim: 128, layers: 2, heads: 4}", "train.steps=80", "train.lr=3e-3"]
    train += ["train.global_batch=8", "train.micro_batch=4", "data.context=128"]
    train += ["data.path=prepared", "data.packing=documents", "tracking.mlflow=false"]
    for line in harness(*train, work=work).splitlines():
        if line.startswith(("loss", "precision", "data", "FP8")):
            print(line)

    # The run's folder is all that is needed to use the model.
    sample = ["sample", "runs/own", "import ", "--tokens", "32", "--temperature", "0.7"]
    print(harness(*sample, work=work))
    print(f"peak memory {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        given = sys.argv[1] if len(sys.argv) > 1 else Path(asyncio.__file__).parent
        main(Path(scratch), Path(given).resolve())
