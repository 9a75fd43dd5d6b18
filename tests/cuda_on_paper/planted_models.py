"""Small models for the recorder: one with a planted fault, and a stack of equal Linear layers."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Planted(nn.Module):
    """Bytes in, loss out; `fault` names what its forward does wrong."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.embed = nn.Embedding(256, 64)
        self.middle = nn.Linear(64, 64)
        self.head = nn.Linear(64, 256)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.middle(self.embed(inputs))
        if self.fault == "prints":
            print("loss is near")
        if self.fault == "item":
            x = x * (1.0 if x.sum().item() >= 0 else -1.0)
        elif self.fault == "to_host":
            x.detach().abs().max().to("cpu")
        elif self.fault == "pageable":
            x = x + torch.tensor([0.5] * 64).to(x.device, non_blocking=True)
        elif self.fault == "not_zero":
            if (x > 1e4).any():
                x = x.clamp(max=1e4)
        elif self.fault == "one_sample" and len(inputs) == 1:
            raise ValueError("expected more than 1 value\nper channel")
        elif self.fault == "mask":
            x = x * 1.0
            x[x > 1e4] = x[x > 1e4] * 0.5
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Elsewhere(Planted):
    """Two layers that share a weight made of a NumPy array, and a buffer of another: no `torch.device` moves those."""

    def __init__(self) -> None:
        super().__init__("")
        self.middle.weight = nn.Parameter(torch.from_numpy(np.ones((64, 64), dtype=np.float32)))
        self.last = nn.Linear(64, 64)
        self.last.weight = self.middle.weight
        self.register_buffer("factor", torch.from_numpy(np.ones(64, dtype=np.float32)))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.last(self.middle(self.embed(inputs)) * self.factor)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Recurrent(Planted):
    """A GRU, of whose cell PyTorch has no fake."""

    def __init__(self) -> None:
        super().__init__("")
        self.middle = nn.GRU(64, 64, batch_first=True)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.middle(self.embed(inputs))[0]
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Linears(nn.Module):
    """`layers` Linear layers of one width, one after the other, between an embedding and a head of their own."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.lm_head = nn.Linear(width, 256, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        # 16 bits already, as after another layer: what a Linear costs here is its own.
        x = self.embed(inputs).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.lm_head(x).float().flatten(0, 1), targets.flatten())


class Attends(nn.Module):
    """Attention of four heads, whose operands are as `kind` says; with a mask but for narrow values."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(256, 64)
        widths = {"narrow values": 32, "twelve features": 48}
        self.head = nn.Linear(widths.get(kind, 64), 256)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        samples, time = inputs.shape
        heads = self.embed(inputs).unflatten(-1, (4, 16)).transpose(1, 2)
        query, key, value = heads, heads * 2.0, heads * 3.0
        mask = None
        if self.kind == "narrow values":
            value = value[..., :8]
        else:
            mask = torch.ones(time, time, dtype=torch.bool, device=inputs.device).tril()
        if self.kind == "twelve features":
            query, key, value = query[..., :12], key[..., :12], value[..., :12]
        if self.kind == "broadcast key heads":
            key, value = key[:, :1], value[:, :1]
        if self.kind == "broadcast samples":
            key, value = key[:1], value[:1]
        if self.kind == "three dimensions":
            query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        grouped = self.kind == "groups of one"
        x = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, enable_gqa=grouped
        )
        x = x.reshape(samples, 4, time, -1).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def converted() -> nn.Module:
    """Parameters in another type and back, as peft has those of its adapters."""
    model = Elsewhere()
    model.head.weight = model.embed.weight
    return model.to(torch.bfloat16).float()


def build(fault: str) -> nn.Module:
    """A `Planted` model, or one of another class."""
    if fault == "converted":
        return converted()
    return {"elsewhere": Elsewhere, "recurrent": Recurrent}.get(fault, lambda: Planted(fault))()


def linears(width: int, layers: int) -> nn.Module:
    """A `Linears` model."""
    return Linears(width, layers)


def attends(kind: str) -> nn.Module:
    """An `Attends` model."""
    return Attends(kind)
