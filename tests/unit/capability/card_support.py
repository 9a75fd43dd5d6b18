"""Machines as the probe would describe them, for every card of the recipe table."""

from __future__ import annotations

from harness.capability.cards import Tier
from harness.capability.probe import Device, MachineFacts, NvidiaSmi

CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
CUDA_12 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")

CARDS = {
    "V100": ("Tesla V100-SXM2-16GB", (7, 0), Tier.VOLTA),
    "T4": ("Tesla T4", (7, 5), Tier.TURING),
    "A100": ("NVIDIA A100-SXM4-80GB", (8, 0), Tier.AMPERE),
    "A10": ("NVIDIA A10", (8, 6), Tier.AMPERE),
    "L4": ("NVIDIA L4", (8, 9), Tier.ADA),
    "4090": ("NVIDIA GeForce RTX 4090", (8, 9), Tier.ADA),
    "H100": ("NVIDIA H100 80GB HBM3", (9, 0), Tier.HOPPER),
    "H200": ("NVIDIA H200", (9, 0), Tier.HOPPER),
    "B200": ("NVIDIA B200", (10, 0), Tier.BLACKWELL),
    "5090": ("NVIDIA GeForce RTX 5090", (12, 0), Tier.BLACKWELL),
}


def machine(*cards: str, arch_list: tuple[str, ...] = CUDA_13) -> MachineFacts:
    return MachineFacts(
        torch_version="2.13.0+cu130",
        torch_cuda="13.0",
        cuda_available=True,
        devices=tuple(Device(CARDS[card][0], CARDS[card][1], 16 * 2**30) for card in cards),
        arch_list=arch_list,
        nvidia_smi=NvidiaSmi(True, "580.65", tuple(CARDS[card][0] for card in cards)),
    )
