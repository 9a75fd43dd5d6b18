"""The doctor's report on faked machines."""

from __future__ import annotations

import io

from rich.console import Console

from harness.capability.probe import Device, LibraryFacts, MachineFacts, NvidiaSmi
from harness.core.files import shipped
from harness.tools.doctor import doctor

OK = LibraryFacts("1.0", True, "installed")
MISSING = LibraryFacts(None, False, "not installed")


def report(facts: MachineFacts | None = None) -> tuple[int, str]:
    stream = io.StringIO()
    return doctor(Console(file=stream, width=140), facts), stream.getvalue()


def rungs_of(text: str, recipe: str) -> dict[str, str]:
    """rung -> "taken" or "-", of one recipe in the table."""
    found: dict[str, str] = {}
    current = ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("│")]
        if len(cells) == 6:
            current = cells[1] or current
            if current == recipe:
                found[cells[2]] = cells[3]
    return found


def gpu(name: str, capability: tuple[int, int], **libraries: LibraryFacts) -> MachineFacts:
    return MachineFacts(
        python="3.11.7",
        torch_version="2.13.0+cu130",
        torch_cuda="13.0",
        cuda_available=True,
        devices=(Device(name, capability, 80 * 2**30),) * 2,
        arch_list=("sm_75", "sm_80", "sm_90"),
        libraries={"deepspeed": OK, "transformer_engine": MISSING, **libraries},
        disk_free_bytes=100 * 2**30,
        has_compiler=True,
        has_ninja=True,
    )


def test_this_machine_names_every_recipe_and_a_command() -> None:
    code, text = report()
    assert code == 0
    for recipe in shipped("recipes"):
        assert list(rungs_of(text, recipe).values()).count("taken") == 1
    assert "launch/train.py --recipe fp8_hybrid" in text


def test_the_rung_follows_the_card_and_its_libraries() -> None:
    code, text = report(gpu("NVIDIA H100", (9, 0), transformer_engine=OK))
    assert code == 0
    assert "Tier HOPPER" in text
    assert rungs_of(text, "fp8_hybrid")["transformer_engine:fp8"] == "taken"
    text = report(gpu("NVIDIA H100", (9, 0)))[1]
    assert rungs_of(text, "fp8_hybrid")["native:fp8"] == "taken"
    assert "make setup builds it" in text
    assert rungs_of(report(gpu("NVIDIA A100", (8, 0)))[1], "fp8_hybrid")["autocast:bf16"] == "taken"
    assert rungs_of(report(gpu("Tesla T4", (7, 5)))[1], "fp8_hybrid")["autocast:fp16"] == "taken"


def test_a_card_that_torch_cannot_use_is_exit_4_with_the_fix() -> None:
    facts = MachineFacts(
        torch_version="2.13.0+cpu", nvidia_smi=NvidiaSmi(True, "580.65", ("NVIDIA H100",))
    )
    code, text = report(facts)
    assert code == 4
    assert "CPU-only build" in text
    assert "Next" not in text


def test_without_compiler_or_ninja_the_command_is_another() -> None:
    bare = MachineFacts(
        torch_version="2.13.0+cpu", libraries={"deepspeed": OK}, disk_free_bytes=2**30
    )
    code, text = report(bare)
    assert code == 0
    assert "no C++ compiler" in text
    assert "no ninja" in text
    assert "\npython launch/train.py" in text
    assert "little, keep room" in text


def test_two_cards_without_deepspeed_get_torchrun() -> None:
    text = report(gpu("NVIDIA A100", (8, 0), deepspeed=MISSING))[1]
    assert "torchrun --standalone --nproc_per_node 2 -- launch/train.py" in text


def test_markup_in_a_reason_is_shown_as_it_is() -> None:
    broken = LibraryFacts(None, False, "needs [core_cu13]")
    assert "needs [core_cu13]" in report(gpu("NVIDIA H100", (9, 0), transformer_engine=broken))[1]
