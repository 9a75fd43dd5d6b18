"""Text whose samples carry their numbers, and a model that reads them: what was trained on is in its own state.

`write_text` makes a text in which sample n (of CONTEXT tokens) is line n, and the line begins with n. The model, as a
user's `model.target`, counts in a buffer how often it was trained on each; the buffer is in every checkpoint. Neither
the harness's data order nor its journal takes part in that count.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from harness.models.gpt import GPT, build, rotary

CONTEXT = 32
DIGITS = 6
NAME = "numbered.txt"
WORDS = (
    "amax",
    "scale",
    "history",
    "tensor",
    "layer",
    "window",
    "gradient",
    "loss",
    "step",
    "rank",
)


def write_text(folder: Path, samples: int) -> Path:
    """One file of at least `samples` training samples; the lines after them are held out."""
    generator = random.Random(5)
    lines = []
    for number in range(samples * 8 // 7 + 8):
        words = " ".join(generator.choice(WORDS) for _ in range(CONTEXT))
        lines.append(f"{number:0{DIGITS}d} {words}"[: CONTEXT - 1] + "\n")
    folder.mkdir(parents=True)
    (folder / NAME).write_text("".join(lines))
    return folder


class Numbered(nn.Module):
    """A GPT with dropout and noise from torch, numpy and Python, so that a forgotten generator changes the loss.

    noise: how much of it. nan_samples: their batch's loss is NaN. outlier: in these training forwards, [first, last),
    one hidden unit of the MLP doubles and its outgoing weight halves: the function stays, and two FP8 tensors outgrow
    their scales. All state is in buffers, so it goes back when the run does.
    """

    def __init__(
        self,
        samples: int,
        nan_samples: Sequence[int],
        outlier: Sequence[int],
        log: str,
        dim: int,
        noise: float,
    ) -> None:
        super().__init__()
        self.gpt: GPT = build(dim=dim, layers=1, heads=2, ffn=96, tied=True)
        self.vocab_size = self.gpt.vocab_size
        self.dropout = nn.Dropout(noise)
        self.outlier, self.log, self.noise = tuple(outlier), log, noise
        self.register_buffer(
            "nan_samples", torch.tensor(list(nan_samples), dtype=torch.int64), persistent=False
        )
        self.register_buffer(
            "place_value", 10 ** torch.arange(DIGITS - 1, -1, -1), persistent=False
        )
        self.consumed: Tensor
        self.forwards: Tensor
        self.register_buffer("consumed", torch.zeros(samples, dtype=torch.int64))
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """int64 [batch, CONTEXT] -> mean loss, nats per token."""
        gpt = self.gpt
        x = gpt.embed(inputs)
        if not self.training:
            rotation = rotary(inputs.shape[1], gpt.head_dim, x.device)
            return gpt.loss(gpt.lm_head(gpt.norm(gpt.blocks[0](x, rotation))), targets)
        numbers = ((inputs[:, :DIGITS] - ord("0")) * self.get_buffer("place_value")).sum(dim=1)
        self._count(numbers)
        x = self.dropout(x) * (1 + self.noise * (float(np.random.random()) - random.random()))
        x = gpt.blocks[0](x, rotary(inputs.shape[1], gpt.head_dim, x.device))
        loss = gpt.loss(gpt.lm_head(gpt.norm(self.dropout(x))), targets)
        return (
            loss * math.nan if torch.isin(numbers, self.get_buffer("nan_samples")).any() else loss
        )

    @torch.no_grad()
    def _count(self, numbers: Tensor) -> None:
        self.consumed.index_add_(0, numbers, torch.ones_like(numbers))
        if self.log:
            with Path(self.log).open("a") as log:  # one write a forward: ranks share the file
                log.write(f"{int(self.forwards)} {' '.join(map(str, numbers.tolist()))}\n")
        if self.outlier and self.outlier[0] <= int(self.forwards) < self.outlier[1]:
            mlp = self.gpt.get_submodule("blocks.0.mlp")
            gate_up, down = mlp.get_parameter("gate_up.weight"), mlp.get_parameter("down.weight")
            gate_up[96 + 5] *= 2.0
            down[:, 5] *= 0.5
        self.forwards += 1


def numbered(
    samples: int,
    nan_samples: Sequence[int] = (),
    outlier: Sequence[int] = (),
    log: str = "",
    dim: int = 64,
    noise: float = 0.1,
) -> Numbered:
    """samples: of the text, held-out ones included. log: a file that gets a line for every training forward."""
    return Numbered(samples, nan_samples, outlier, log, dim, noise)
