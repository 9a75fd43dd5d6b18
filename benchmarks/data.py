"""What data cost: making token ids of text, checking blocks as they are read, and waiting for the next window.

    python -m benchmarks.data [--megabytes 32] [--steps 8]

prepare   `harness data prepare` in one process, processor time: bytes, and a byte-level BPE (trained here, 4,096 ids),
          with the library's own time for the same texts in the same batches beside it. The texts are the source
          of Python's standard library, repeated with a number in each line so that no cache of words helps. Peak
          memory at a quarter of the text and at all of it shows whether it grows.
read      processor time of a sample of 1,024 tokens at a random place of a file of token ids: the read alone, with its
          block hashed and compared (a block that was not read lately), and from a block that is still in memory
wait      the share of the time of a training step that the loop waits for its next window: a GPT of 25M parameters on
          a file of token ids that is larger than the blocks kept in memory, one thread

Nothing is written that outlives the command.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from harness.core.config import DataConfig
from harness.data.batches import TokenBatches
from harness.data.blocks import BLOCK, CACHED
from harness.data.corpus import Tokens
from harness.data.prefetch import Prefetched, Watch
from harness.data.text import standard_library
from harness.data.tokens import prepare
from harness.models.gpt import build

VOCAB = 4096
_CONTEXT = 1024
_SAMPLES = 400
_BATCH_BYTES, _BATCH_TEXTS = 1 << 20, 1024


def texts(most: int) -> Iterator[str]:
    """Documents of about `most` bytes together."""
    documents = [each.content.decode() for each in standard_library().documents]
    size = turn = 0
    while True:
        for text in documents:
            lines = [f"{line} {turn}{number}" for number, line in enumerate(text.splitlines())]
            made = "\n".join(lines)
            yield made
            size += len(made)
            if size >= most:
                return
        turn += 1


def write(path: Path, most: int) -> int:
    """Writes JSONL of `texts`; returns the bytes of text in it."""
    size = 0
    with path.open("w") as stream:
        for text in texts(most):
            stream.write(json.dumps({"text": text}) + "\n")
            size += len(text.encode())
    return size


def train_tokenizer(path: Path) -> None:
    library = importlib.import_module("tokenizers")
    byte_level = library.pre_tokenizers.ByteLevel
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = byte_level(add_prefix_space=False)
    trainer = library.trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts(4 << 20), trainer)
    made.save(str(path))


_CHILD = """
import json, sys, time
from pathlib import Path
from harness.data.prepare import Preparation, prepare_dataset
from harness.data.rows import JsonLines
source, out, tokenizer = sys.argv[1:4]
JsonLines().parts(Path(source), "text", "auto")  # imports the library, which takes some seconds once
begin = time.process_time()
prepare_dataset(Preparation(source, "JSONL", tokenizer=tokenizer or None), Path(out), processes=1)
seconds = time.process_time() - begin
(peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(json.dumps([seconds, int(peak) / 1024]))
"""
_ALONE = """
import json, os, sys, time
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from tokenizers import Tokenizer
library = Tokenizer.from_file(sys.argv[2])
batches, batch, size = [], [], 0
for line in open(sys.argv[1]):
    batch.append(json.loads(line)["text"])
    size += len(batch[-1])
    if size >= {bytes} or len(batch) >= {texts}:
        batches.append(batch)
        batch, size = [], 0
begin = time.process_time()
for batch in [*batches, batch]:
    library.encode_batch_fast(batch, add_special_tokens=False)
print(json.dumps([time.process_time() - begin, 0.0]))
"""


def child(program: str, *arguments: str) -> tuple[float, float]:
    """(seconds of processor time, MiB of memory) that a new interpreter prints of itself."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    seconds, memory = json.loads(done.stdout)
    return seconds, memory


def measure_prepare(folder: Path, megabytes: int) -> None:
    tokenizer = folder / "tokenizer.json"
    train_tokenizer(tokenizer)
    alone = _ALONE.format(bytes=_BATCH_BYTES, texts=_BATCH_TEXTS)
    for share in (4, 1):
        source = folder / f"of{share}.jsonl"
        size = write(source, (megabytes << 20) // share)
        for name, given in (("bytes", ""), ("BPE", str(tokenizer))):
            seconds, memory = child(_CHILD, str(source), str(folder / f"{name}{share}"), given)
            line = f"prepare  {name:<6}{size / 1e6:7.1f} MB  {size / 1e6 / seconds:7.2f} MB/s of processor time"
            if given:
                own, _ = child(alone, str(source), given)
                line += f"  (the tokenizer alone {size / 1e6 / own:.2f}, ratio {own / seconds:.2f})"
            print(f"{line}  {memory:.0f} MiB", flush=True)


def token_file(folder: Path) -> Path:
    """Twice as many blocks as are kept in memory."""
    ids = np.random.default_rng(0).integers(0, VOCAB, 2 * CACHED * BLOCK // 2).astype("<u2")
    ids.tofile(folder / "train.bin")
    ids[: 1 << 16].tofile(folder / "val.bin")
    return folder / "train.bin"


def measure_read(folder: Path) -> None:
    path = token_file(folder)
    config = DataConfig.model_validate({"path": str(path), "context": _CONTEXT})
    begin = time.process_time()
    data = prepare(config, folder / "run")
    seconds = time.process_time() - begin
    size = path.stat().st_size
    print(
        f"start    {size / 1e6:.0f} MB hashed and counted at {size / 1e6 / seconds:,.0f} MB/s of processor time"
    )
    starts = np.random.default_rng(1).integers(0, len(data.train) - _CONTEXT - 1, _SAMPLES)
    places = starts[:, None] + np.arange(_CONTEXT + 1)
    with path.open("rb") as stream:
        begin = time.process_time()
        for start in starts.tolist():
            stream.seek(2 * start)
            np.frombuffer(stream.read(2 * _CONTEXT + 2), "<u2").astype(np.int64)
        plain = time.process_time() - begin
    assert isinstance(data.train, Tokens)
    for name, wanted in (
        ("block hashed and compared", places),
        ("block still in memory", places[:1]),
    ):
        rows = [wanted[row % len(wanted)][None] for row in range(_SAMPLES)]
        begin = time.process_time()
        for row in rows:
            data.train.read(row)
        seconds = time.process_time() - begin
        print(
            f"read     {name:<28}{seconds / _SAMPLES * 1e6:8.0f} us a sample of {_CONTEXT} tokens"
        )
    print(f"read     {'no check at all':<28}{plain / _SAMPLES * 1e6:8.0f} us")


def measure_wait(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    context, micro_batch = 256, 4
    config = DataConfig.model_validate({"path": str(folder / "train.bin"), "context": context})
    watch = Watch()
    data = prepare(config, folder / "run", reading=watch)
    source = Prefetched(TokenBatches(data, 0, context, micro_batch, micro_batch, 8), watch)
    model = build(vocab=VOCAB, dim=512, layers=7, heads=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    count = sum(param.numel() for param in model.parameters())
    begin = 0.0
    for index in range(steps + 1):
        if index == 1:  # the first window cannot be read ahead
            begin, source.waited = time.monotonic(), 0.0
        (batch,) = source.micro_batches(source.window(index), 0, 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    took = time.monotonic() - begin
    per_step = took / steps
    told = f"{source.waited / steps * 1e3:.2f} ms of {per_step * 1e3:.0f} ms a step: {source.waited / took:.3%}"
    print(f"wait     {count / 1e6:.1f}M parameters, {micro_batch} x {context} tokens: {told}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measure_prepare(folder, given.megabytes)
        measure_read(folder)
        measure_wait(folder, given.steps)


if __name__ == "__main__":
    main()
