"""Every shipped recipe on every card: which rung is taken, and why not the others. The table is written by hand.

One letter a rung, in the ladder's order: T taken, x not for this tier, u not needed as a better one runs, m its library
is missing.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from card_support import CARDS, CUDA_12, machine

from harness.capability.cards import check_usable
from harness.capability.probe import LibraryFacts, MachineFacts, NvidiaSmi
from harness.core.files import shipped
from harness.precision.plan import resolve
from harness.precision.recipe import Recipe, load_recipe

COLUMNS = ("V100", "T4", "A100", "A10", "L4", "4090", "H100", "H200", "B200", "CPU")
# With Transformer Engine and torchao installed, torch built for CUDA 13.0.
TAKEN = {
    "auto": "xxxT xxxT xxTx xxTx Tuux Tuux Tuux Tuux Tuux xxTx",
    "bf16": "xT xT Tx Tx Tx Tx Tx Tx Tx Tx",
    "fp16_overflow": "T T T T T T T T T T",
    "fp16_scaler": "T T T T T T T T T T",
    "fp16_underflow": "T T T T T T T T T T",
    "fp32": "T T T T T T T T T T",
    "fp8_block": "xxxT xxxT xxTx xxTx xxTx xxTx Tuux Tuux Tuux xTux",
    "fp8_current": "xxxT xxxT xxTx xxTx Tuux Tuux Tuux Tuux Tuux xTux",
    "fp8_dynamic": "xxT xxT xTx xTx Tux Tux Tux Tux Tux Tux",
    "fp8_hybrid": "xxxT xxxT xxTx xxTx Tuux Tuux Tuux Tuux Tuux xTux",
    "fp8_native": "xxT xxT xTx xTx Tux Tux Tux Tux Tux Tux",
}
# The same where `make setup` could not build Transformer Engine.
WITHOUT_TE = TAKEN | {
    "auto": "xxxT xxxT xxTx xxTx mTux mTux mTux mTux mTux xxTx",
    "fp8_block": "xxxT xxxT xxTx xxTx xxTx xxTx mTux mTux mTux xTux",
    "fp8_current": "xxxT xxxT xxTx xxTx mTux mTux mTux mTux mTux xTux",
    "fp8_hybrid": "xxxT xxxT xxTx xxTx mTux mTux mTux mTux mTux xTux",
}
BACKENDS = {
    "auto": ("transformer_engine:fp8", "native:fp8", "autocast:bf16", "autocast:fp16"),
    "bf16": ("autocast:bf16", "autocast:fp16"),
    "fp16_overflow": ("autocast:fp16",),
    "fp16_scaler": ("autocast:fp16",),
    "fp16_underflow": ("autocast:fp16",),
    "fp32": ("autocast:fp32",),
    "fp8_block": ("transformer_engine:fp8", "torchao:fp8", "autocast:bf16", "autocast:fp16"),
    "fp8_current": ("transformer_engine:fp8", "torchao:fp8", "autocast:bf16", "autocast:fp16"),
    "fp8_dynamic": ("torchao:fp8", "autocast:bf16", "autocast:fp16"),
    "fp8_hybrid": ("transformer_engine:fp8", "native:fp8", "autocast:bf16", "autocast:fp16"),
    "fp8_native": ("native:fp8", "autocast:bf16", "autocast:fp16"),
}
TIERS = {
    **dict.fromkeys(("H100", "H200"), "HOPPER"),
    **dict.fromkeys(("A100", "A10"), "AMPERE"),
    **dict.fromkeys(("L4", "4090"), "ADA"),
    **{"V100": "VOLTA", "T4": "TURING", "B200": "BLACKWELL", "CPU": "CPU"},
}
TORCHAO = {"torchao": LibraryFacts("0.18.0", True, "installed")}
TE = {"transformer_engine": LibraryFacts("2.20.2", True, "installed")}
NO_TE = {"transformer_engine": LibraryFacts(None, False, "not installed")}


def facts_of(card: str, libraries: dict[str, LibraryFacts]) -> MachineFacts:
    facts = (
        MachineFacts(torch_version="2.13.0+cpu")
        if card == "CPU"
        else machine(card, arch_list=(*CUDA_12, "sm_100"))
    )
    return replace(facts, libraries=libraries)


def told(recipe: str, facts: MachineFacts, card: str) -> str:
    """One letter a rung, from the reason in words."""
    rung, verdicts = resolve(load_recipe(recipe), facts)
    assert [verdict.rung for verdict in verdicts] == list(BACKENDS[recipe])
    assert [verdict.rung for verdict in verdicts if verdict.taken] == ([rung.name] if rung else [])
    letters = ""
    for verdict in verdicts:
        if verdict.taken:
            letters += "T"
        elif verdict.reason.startswith(f"not for tier {TIERS[card]} (for "):
            letters += "x"
        elif rung and verdict.reason == f"not needed: {rung.name} runs":
            letters += "u"
        elif verdict.reason.startswith("Transformer Engine: not installed"):
            letters += "m"
        else:
            letters += f"({verdict.reason})"
    return letters


def test_the_table_has_every_recipe_and_every_card() -> None:
    assert sorted(TAKEN) == shipped("recipes")
    assert all(len(row.split()) == len(COLUMNS) for row in (*TAKEN.values(), *WITHOUT_TE.values()))


@pytest.mark.parametrize("recipe", TAKEN)
@pytest.mark.parametrize(("table", "te"), [(TAKEN, TE), (WITHOUT_TE, NO_TE)], ids=["te", "no te"])
def test_the_rung_taken_and_the_reasons_for_the_others(
    recipe: str, table: dict[str, str], te: dict[str, LibraryFacts]
) -> None:
    found = [told(recipe, facts_of(card, TORCHAO | te), card) for card in COLUMNS]
    assert dict(zip(COLUMNS, found, strict=True)) == dict(
        zip(COLUMNS, table[recipe].split(), strict=True)
    )


def test_a_t4_that_claims_bf16_does_not_get_it() -> None:
    """torch.cuda.is_bf16_supported() is True there; neither the claim, a recipe nor the host's CPU makes it real."""
    ladder = [
        {"backend": "autocast", "precision": p, "tiers": ["TURING", "VOLTA"]}
        for p in ("bf16", "fp16")
    ]
    recipe = Recipe.model_validate({"name": "hopeful", "ladder": ladder})
    for card in ("T4", "V100"):
        facts = replace(facts_of(card, {}), cpu_bf16_isa=("amx_bf16", "avx512_bf16"))
        rung, (refused, taken) = resolve(recipe, facts)
        assert rung is not None
        assert (rung.precision, taken.taken) == ("fp16", True)
        assert "bf16 needs compute capability 8.0 or more" in refused.reason
        assert "only emulate" in refused.reason


@pytest.mark.parametrize("card", [card for card in COLUMNS if card != "CPU"])
def test_a_card_that_torch_cannot_use_stops_before_any_ladder(card: str) -> None:
    name = CARDS[card][0]
    (unbuilt,) = check_usable(machine(card, arch_list=("sm_60",)))
    assert unbuilt.what == "this build of torch has no code for this card"
    assert name in unbuilt.where
    seen = NvidiaSmi(True, "470.82.01", (name,))
    unseen = MachineFacts(
        torch_version="2.13.0+cu130", torch_cuda="13.0", nvidia_smi=seen, libraries=TORCHAO | TE
    )
    (old_driver,) = check_usable(unseen)
    assert "needs driver 580 or newer; here is 470.82.01" in old_driver.why
    hidden = replace(unseen, cuda_visible_devices="")
    assert check_usable(hidden) == []
    for recipe, row in TAKEN.items():
        assert told(recipe, hidden, "CPU") == row.split()[-1], (
            "on the CPU on purpose, as without a card"
        )
