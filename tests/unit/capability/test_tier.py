"""Tier and usability on faked machines: every card of the recipe table, and every way a card can be unusable."""

from __future__ import annotations

import pytest
from card_support import CARDS, CUDA_12, machine

from harness.capability.cards import Tier, check_usable, tier_of
from harness.capability.probe import Device, MachineFacts, NvidiaSmi


def blind(**changes: object) -> MachineFacts:
    """A machine whose card torch does not see."""
    facts: dict[str, object] = {
        "torch_version": "2.13.0+cu130",
        "torch_cuda": "13.0",
        "nvidia_smi": NvidiaSmi(True, "580.65", ("NVIDIA H100",)),
    }
    return MachineFacts(**{**facts, **changes})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("card", CARDS)
def test_tier_of_a_card(card: str) -> None:
    tier, reason = tier_of(machine(card))
    assert tier is CARDS[card][2]
    assert CARDS[card][0] in reason


@pytest.mark.parametrize("card", [card for card in CARDS if card != "V100"])
def test_cards_that_a_cuda_13_build_runs_on(card: str) -> None:
    assert check_usable(machine(card)) == []


def test_no_card_is_cpu_and_no_problem() -> None:
    facts = MachineFacts(torch_version="2.13.0+cpu")
    assert tier_of(facts) == (Tier.CPU, "torch sees no GPU")
    assert check_usable(facts) == []


def test_the_weakest_card_decides() -> None:
    tier, reason = tier_of(machine("H100", "T4", "A100"))
    assert tier is Tier.TURING
    assert "weakest of 3" in reason
    assert "weakest" not in tier_of(machine("T4", "T4"))[1]


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hiding_the_cards_means_cpu_on_purpose(hidden: str) -> None:
    facts = blind(cuda_visible_devices=hidden)
    assert tier_of(facts)[0] is Tier.CPU
    assert check_usable(facts) == []


def test_v100_under_a_build_without_its_code_names_the_wheels_that_have_it() -> None:
    (problem,) = check_usable(machine("V100", "V100"))
    assert "no code for this card" in problem.what
    assert "cu126" in problem.fix
    assert check_usable(machine("V100", arch_list=CUDA_12)) == []


@pytest.mark.parametrize(
    ("card", "arch_list", "usable"),
    [
        ("A10", ("sm_80",), True),  # machine code of the same major version
        ("A100", ("sm_86",), False),  # of a higher minor version
        ("H100", ("sm_80",), False),  # of another major version
        ("H100", ("sm_80", "compute_80"), True),  # PTX is compiled for the card at load
        ("A100", ("sm_75", "compute_90"), False),  # PTX of a newer card
        ("H100", ("sm_90a",), True),
        ("5090", ("sm_100a",), False),
        ("B200", ("compute_90a",), False),  # PTX tied to one architecture
        ("B200", ("sm_100f",), True),
        ("5090", ("compute_100f",), False),  # PTX tied to another family
        ("5090", ("compute_120f",), True),
    ],
)
def test_code_for_the_card(card: str, arch_list: tuple[str, ...], usable: bool) -> None:
    assert (check_usable(machine(card, arch_list=arch_list)) == []) is usable


def test_a_cpu_build_beside_a_card() -> None:
    (problem,) = check_usable(blind(torch_version="2.13.0+cpu", torch_cuda=None))
    assert "NVIDIA H100" in problem.what
    assert problem.why == "it is a CPU-only build"
    assert "CUDA_VISIBLE_DEVICES" in problem.fix


@pytest.mark.parametrize(
    ("cuda", "driver", "needed"), [("13.0", "550.54.15", "580"), ("12.8", "470.82.01", "525")]
)
def test_a_driver_too_old(cuda: str, driver: str, needed: str) -> None:
    (problem,) = check_usable(
        blind(torch_cuda=cuda, nvidia_smi=NvidiaSmi(True, driver, ("NVIDIA H100",)))
    )
    assert f"needs driver {needed}" in problem.why
    assert driver in problem.why


def test_a_card_unseen_for_another_reason_quotes_torch_and_the_environment() -> None:
    (problem,) = check_usable(blind(torch_error="CUDA unknown error", cuda_visible_devices="7"))
    assert "CUDA unknown error" in problem.why
    assert "'7'" in problem.why


def test_a_broken_driver() -> None:
    smi = NvidiaSmi(True, error="NVIDIA-SMI has failed")
    (problem,) = check_usable(blind(nvidia_smi=smi, nvidia_on_pci=True))
    assert problem.why == "NVIDIA-SMI has failed"
    # The tool alone, in an image without a card, is no broken GPU.
    assert check_usable(blind(nvidia_smi=smi)) == []


def test_a_card_below_volta_is_refused_not_used_as_cpu() -> None:
    facts = MachineFacts(
        torch_version="2.13.0+cu126",
        torch_cuda="12.6",
        cuda_available=True,
        devices=(Device("Tesla P100", (6, 0), 2**34),),
        arch_list=CUDA_12,
    )
    assert "too old" in check_usable(facts)[0].what


def test_rocm_is_not_taken_for_hopper() -> None:
    facts = MachineFacts(
        torch_version="2.13.0+rocm7",
        torch_hip="7.0",
        cuda_available=True,
        devices=(Device("AMD Instinct MI300X", (9, 4), 2**37),),
    )
    assert "ROCm" in check_usable(facts)[0].what


def test_torch_missing() -> None:
    (problem,) = check_usable(MachineFacts(torch_error="No module named 'torch'"))
    assert problem.why == "No module named 'torch'"
    assert problem.fix == "make setup"
