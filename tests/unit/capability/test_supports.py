"""What each backend can compute on each tier."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.capability.cards import Tier, tier_of
from harness.capability.probe import Device, LibraryFacts, MachineFacts
from harness.precision.backends.registry import can_run

OK = LibraryFacts("1.0", True, "installed")
LIBRARIES = {"transformer_engine": OK, "torchao": OK}
CAPABILITIES = {
    Tier.VOLTA: (7, 0),
    Tier.TURING: (7, 5),
    Tier.AMPERE: (8, 0),
    Tier.ADA: (8, 9),
    Tier.HOPPER: (9, 0),
    Tier.BLACKWELL: (10, 0),
}
GPUS = set(CAPABILITIES)
FP8 = {Tier.ADA, Tier.HOPPER, Tier.BLACKWELL}
EXPECTED = {
    ("transformer_engine", "fp8"): FP8,
    ("native", "fp8"): FP8 | {Tier.CPU},
    ("torchao", "fp8"): FP8 | {Tier.CPU},
    ("autocast", "bf16"): FP8 | {Tier.AMPERE, Tier.CPU},
    ("autocast", "fp16"): GPUS | {Tier.CPU},
    ("autocast", "fp32"): GPUS | {Tier.CPU},
}


def machine(
    tier: Tier,
    libraries: dict[str, LibraryFacts] | None = None,
    isa: tuple[str, ...] = (),
    cuda: str = "13.0",
) -> MachineFacts:
    capability = CAPABILITIES.get(tier)
    facts = MachineFacts(
        torch_version="2.13.0",
        torch_cuda=cuda if capability else None,
        cuda_available=capability is not None,
        devices=(Device("card", capability, 2**34),) if capability else (),
        cpu_bf16_isa=isa,
        libraries=LIBRARIES if libraries is None else libraries,
    )
    assert tier_of(facts)[0] is tier
    return facts


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize(("backend", "precision"), EXPECTED)
def test_every_pair_on_every_tier(backend: str, precision: str, tier: Tier) -> None:
    able, reason = can_run(backend, precision, machine(tier), tier)
    assert able is (tier in EXPECTED[backend, precision])
    assert reason


@pytest.mark.parametrize("backend", ["transformer_engine", "torchao"])
def test_a_missing_library_says_why(backend: str) -> None:
    broken = {backend: LibraryFacts(None, False, "its extension is not installed")}
    able, reason = can_run(backend, "fp8", machine(Tier.HOPPER, broken), Tier.HOPPER)
    assert not able
    assert "its extension is not installed" in reason
    assert not can_run(backend, "fp8", machine(Tier.HOPPER, {}), Tier.HOPPER)[0]


def test_reasons_name_the_card() -> None:
    assert "card has 7.5" in can_run("autocast", "bf16", machine(Tier.TURING), Tier.TURING)[1]
    assert "card has 8.0" in can_run("native", "fp8", machine(Tier.AMPERE), Tier.AMPERE)[1]


def test_slow_ways_on_a_cpu_say_so() -> None:
    assert "slow" in can_run("autocast", "fp16", machine(Tier.CPU), Tier.CPU)[1]
    assert "slow" in can_run("autocast", "bf16", machine(Tier.CPU), Tier.CPU)[1]
    assert (
        "amx_bf16" in can_run("autocast", "bf16", machine(Tier.CPU, isa=("amx_bf16",)), Tier.CPU)[1]
    )
    assert "emulation in PyTorch" in can_run("native", "fp8", machine(Tier.CPU), Tier.CPU)[1]


@pytest.mark.parametrize(
    ("backend", "precision"), [("native", "bf16"), ("nccl", "fp8"), ("autocast", "fp8")]
)
def test_a_pair_that_does_not_exist(backend: str, precision: str) -> None:
    able, reason = can_run(backend, precision, machine(Tier.HOPPER), Tier.HOPPER)
    assert not able
    assert f"{backend} does not compute in {precision}" in reason


@pytest.mark.parametrize(
    ("tier", "scaling", "cuda", "able", "expected"),
    [
        (Tier.ADA, "delayed", "12.1", True, "delayed scaling"),
        (Tier.ADA, "delayed", "12.0", False, "cuBLASLt 12.1.3"),
        (Tier.ADA, "current", "12.10", True, "current scaling"),
        (Tier.ADA, "current", "11.8", False, "torch is built for 11.8"),
        (Tier.ADA, "block", "13.0", False, "compute capability 9.0 or more, card has 8.9"),
        (Tier.HOPPER, "delayed", "12.0", True, "delayed scaling"),
        (Tier.HOPPER, "current", "12.0", True, "current scaling"),
        (Tier.HOPPER, "block", "12.8", False, "CUDA 12.9 or more, torch is built for 12.8"),
        (Tier.HOPPER, "block", "12.9", True, "block scaling"),
        (Tier.BLACKWELL, "block", "13.0", True, "emulated with MXFP8"),
        (Tier.AMPERE, "current", "13.0", False, "compute capability 8.9"),
    ],
)
def test_what_transformer_engine_needs_for_each_scaling(
    tier: Tier, scaling: str, cuda: str, able: bool, expected: str
) -> None:
    answer, reason = can_run("transformer_engine", "fp8", machine(tier, cuda=cuda), tier, scaling)
    assert answer is able
    assert expected in reason
    assert ("MXFP8" in reason) is (tier is Tier.BLACKWELL)


def test_the_weakest_card_decides_other_backends_go_by_their_own_rules() -> None:
    mixed = replace(
        machine(Tier.ADA), devices=(Device("big", (9, 0), 2**34), Device("small", (8, 9), 2**34))
    )
    able, reason = can_run("transformer_engine", "fp8", mixed, Tier.ADA, "block")
    assert not able
    assert "small has 8.9" in reason
    assert can_run("torchao", "fp8", mixed, Tier.ADA, "block")[0]


def test_an_unknown_cuda_version_is_not_taken_for_a_new_one() -> None:
    unknown = replace(machine(Tier.HOPPER), torch_cuda=None)
    able, reason = can_run("transformer_engine", "fp8", unknown, Tier.HOPPER, "block")
    assert not able
    assert "no known version" in reason
