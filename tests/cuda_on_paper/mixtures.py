"""Mixtures of experts as people write them: each chooses its rows in another way."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, HIDDEN, EXPERTS, CHOSEN, VOCAB = 64, 128, 8, 2, 256
PARAMETERS = 2 * VOCAB * DIM + DIM * EXPERTS + EXPERTS * 2 * DIM * HIDDEN


def active(chosen: int = CHOSEN) -> int:
    """Elements of the matrices that one token meets: the router, its experts, the head."""
    return DIM * EXPERTS + chosen * 2 * DIM * HIDDEN + DIM * VOCAB


class Mixture(nn.Module):
    """Bytes in, logits out. way: how the rows of an expert are found."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embed = nn.Embedding(VOCAB, DIM)
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(DIM, HIDDEN, bias=False), nn.GELU(), nn.Linear(HIDDEN, DIM, bias=False)
            )
            for _ in range(EXPERTS)
        )
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs).flatten(0, 1)
        shares = self.router(x).softmax(-1)
        mixed = x + getattr(self, self.way)(x, shares)
        return self.head(mixed).unflatten(0, inputs.shape)

    def where(self, x: Tensor, shares: Tensor) -> Tensor:
        weights, chosen = shares.topk(CHOSEN, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if rows.numel():
                out = out.index_add(
                    0, rows, (expert(x[rows]) * weights[rows, places, None]).to(x.dtype)
                )
        return out

    def one_hot(self, x: Tensor, shares: Tensor) -> Tensor:
        weights, chosen = torch.topk(shares, CHOSEN)
        taken = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for number in taken.sum((-1, -2)).nonzero():
            places, rows = torch.where(taken[number].squeeze(0))
            made = self.experts[int(number)](x[rows])
            out.index_add_(0, rows, (made * weights[rows, places, None]).to(x.dtype))
        return out

    def mask(self, x: Tensor, shares: Tensor) -> Tensor:
        taken = torch.zeros(shares.shape, dtype=torch.bool, device=x.device)
        taken.scatter_(1, shares.topk(CHOSEN).indices, True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if taken[:, number].any():
                rows = taken[:, number]
                out[rows] = out[rows] + (expert(x[rows]) * shares[rows, number, None]).to(x.dtype)
        return out

    def sorted(self, x: Tensor, shares: Tensor) -> Tensor:
        weights, chosen = shares.topk(CHOSEN, dim=-1)
        order = chosen.flatten().argsort()
        counts = chosen.flatten().bincount(minlength=EXPERTS).tolist()
        parts = x[order // CHOSEN].split(counts)
        made = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return torch.zeros_like(x).index_add(
            0, order // CHOSEN, (made * weights.flatten()[order, None]).to(x.dtype)
        )

    def switch(self, x: Tensor, shares: Tensor) -> Tensor:
        weights, chosen = shares.max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            out = out.index_copy(0, rows, (expert(x[rows]) * weights[rows, None]).to(x.dtype))
        return out

    def by_values(self, x: Tensor, shares: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (shares[:, number] > 1 / EXPERTS).nonzero().flatten()
            out = out.index_add(0, rows, expert(x[rows]).to(x.dtype))
        return out


build = Mixture
