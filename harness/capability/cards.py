"""Datasheets of cards: what estimates compute with, and the peaks that a run's FLOPs are held against. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Card:
    """One card. memory: bytes that torch reports; bandwidth: B/s; half (fp16 or bf16 with fp32 accumulation), fp8 and
    fp32: dense peaks in FLOP/s, without sparsity, 0 where the card has no such unit."""

    name: str
    capability: tuple[int, int]
    memory: int
    bandwidth: float
    half: float
    fp8: float
    fp32: float
    processors: int

    @property
    def tf32(self) -> float:
        """FLOP/s of float32 GEMMs under TF32: half the 16-bit rate on every card of 8.0 and more, else plain fp32."""
        return self.half / 2 if self.capability >= (8, 0) else self.fp32

    def peaks(self, tf32: bool = False) -> dict[str, float]:
        """Dense FLOP/s by precision, 0 where the card has no such unit. tf32: float32 products may use it."""
        bf16 = self.half if self.capability >= (8, 0) else 0.0
        return {"fp8": self.fp8, "bf16": bf16, "fp16": self.half, "fp32": self.tf32 if tf32 else self.fp32}


# Peaks are NVIDIA's dense figures: half of those printed "with sparsity". Memory is what torch calls "total capacity"
# in its out-of-memory messages, which is less than the round figure of the datasheet: ECC and the driver take theirs.
CARDS: dict[str, Card] = {
    # NVIDIA H100 Tensor Core GPU datasheet, column SXM: 3.35 TB/s, 1,979 / 3,958 / 67 TFLOPS (the first two sparse).
    "H100": Card("NVIDIA H100 80GB HBM3", (9, 0), int(79.1 * GIB), 3.35e12, 989e12, 1979e12, 67e12, 132),
    # NVIDIA H200 Tensor Core GPU datasheet, column SXM: 4.8 TB/s; the processor is the H100's.
    "H200": Card("NVIDIA H200", (9, 0), int(139.7 * GIB), 4.8e12, 989e12, 1979e12, 67e12, 132),
    # NVIDIA HGX B200 datasheet, for eight cards, dense: 18 PFLOPS 16-bit, 36 FP8, 600 TFLOPS fp32, 62 TB/s, 1.44 TB.
    "B200": Card("NVIDIA B200", (10, 0), int(178.3 * GIB), 7.7e12, 2250e12, 4500e12, 75e12, 148),
    # NVIDIA L40S datasheet: 864 GB/s, 362.05 and 733 TFLOPS dense, 91.6 fp32.
    "L40S": Card("NVIDIA L40S", (8, 9), int(44.4 * GIB), 0.864e12, 362e12, 733e12, 91.6e12, 142),
    # NVIDIA L4 datasheet: 300 GB/s, 242 and 485 TFLOPS with sparsity, 30.3 fp32.
    "L4": Card("NVIDIA L4", (8, 9), int(22.0 * GIB), 0.3e12, 121e12, 242e12, 30.3e12, 58),
    # NVIDIA Ada GPU architecture whitepaper, appendix A: 1,008 GB/s; tensor cores with fp32 accumulation, dense.
    "RTX4090": Card("NVIDIA GeForce RTX 4090", (8, 9), int(23.6 * GIB), 1.008e12, 165.2e12, 330.3e12, 82.6e12, 128),
    # NVIDIA A100 Tensor Core GPU datasheet, SXM: 2,039 and 1,555 GB/s, 312 TFLOPS, 19.5 fp32.
    "A100-80GB": Card("NVIDIA A100-SXM4-80GB", (8, 0), int(79.1 * GIB), 2.039e12, 312e12, 0.0, 19.5e12, 108),
    "A100-40GB": Card("NVIDIA A100-SXM4-40GB", (8, 0), int(39.4 * GIB), 1.555e12, 312e12, 0.0, 19.5e12, 108),
    # NVIDIA A10 datasheet: 600 GB/s, 125 TFLOPS, 31.2 fp32.
    "A10": Card("NVIDIA A10", (8, 6), int(22.0 * GIB), 0.6e12, 125e12, 0.0, 31.2e12, 72),
    # NVIDIA T4 datasheet: 320 GB/s (maximum), 65 TFLOPS, 8.1 fp32.
    "T4": Card("Tesla T4", (7, 5), int(14.6 * GIB), 0.32e12, 65e12, 0.0, 8.1e12, 40),
    # NVIDIA V100 datasheet, SXM2: 900 GB/s, 125 TFLOPS, 15.7 fp32; 16 and 32 GB.
    "V100-16GB": Card("Tesla V100-SXM2-16GB", (7, 0), int(15.7 * GIB), 0.9e12, 125e12, 0.0, 15.7e12, 80),
    "V100-32GB": Card("Tesla V100-SXM2-32GB", (7, 0), int(31.7 * GIB), 0.9e12, 125e12, 0.0, 15.7e12, 80),
}


def card_named(name: str) -> Card | None:
    """The card that torch gives this name; None if no datasheet here is of it: its peaks are not known."""
    return next((card for card in CARDS.values() if card.name == name), None)
