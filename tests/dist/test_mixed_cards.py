"""Two ranks on unlike machines: they take the rung that the weaker one can, or refuse with the same words.

Facts are inputs, so the cards are described, not there. Run as a script, this file is one rank.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.capability.probe import Device, LibraryFacts, MachineFacts
from harness.core.errors import MachineError
from harness.precision.plan import agree_on_fallback, agree_on_rung, make_plan
from harness.precision.recipe import Recipe, load_recipe
from harness.precision.shape_probe import cache_file, probe_layers
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
CAPABILITIES = {"V100": (7, 0), "T4": (7, 5), "A100": (8, 0), "L4": (8, 9), "H100": (9, 0)}
# recipe, card of rank 0, card of rank 1, the rung they must take together (None: none)
CASES = (
    ("fp8_hybrid", "H100+TE", "H100+TE", "transformer_engine:fp8"),
    ("fp8_hybrid", "H100+TE", "H100", "native:fp8"),
    ("fp8_hybrid", "H100", "L4", "native:fp8"),
    ("fp8_hybrid", "H100", "A100", "autocast:bf16"),
    ("fp8_hybrid", "T4", "H100", "autocast:fp16"),
    ("fp8_hybrid", "A100", "V100", "autocast:fp16"),
    ("fp32", "V100", "H100", "autocast:fp32"),
    ("hopper_only", "H100", "T4", None),
    ("crossed", "T4", "CPU", None),
    ("crossed", "T4", "T4", "autocast:fp16"),
    ("crossed_with_exit", "T4", "CPU", "autocast:fp32"),
    ("crossed_with_exit_for_others", "T4", "CPU", None),
)
OWN = {
    "hopper_only": [("native", "fp8", ["HOPPER"])],
    # Each of the two has a rung, but a T4 cannot run the CPU's, and the recipe gives no CPU the T4's.
    "crossed": [("autocast", "fp16", ["TURING"]), ("native", "fp8", ["CPU"])],
}
OWN["crossed_with_exit"] = [*OWN["crossed"], ("autocast", "fp32", ["CPU"])]
OWN["crossed_with_exit_for_others"] = [*OWN["crossed"], ("autocast", "fp32", ["HOPPER"])]

pytestmark = pytest.mark.dist


def machine(name: str) -> MachineFacts:
    card, _, te = name.partition("+")
    if card == "CPU":
        return MachineFacts()
    libraries = {"transformer_engine": LibraryFacts("2.20.2", True, "installed")} if te else {}
    device = Device(card, CAPABILITIES[card], 16 << 30)
    return MachineFacts(
        torch_cuda="13.0", cuda_available=True, devices=(device,), libraries=libraries
    )


def recipe_named(name: str) -> Recipe:
    if name not in OWN:
        return load_recipe(name)
    ladder = [{"backend": b, "precision": p, "tiers": tiers} for b, p, tiers in OWN[name]]
    return Recipe.model_validate({"name": name, "ladder": ladder})


def layers_chosen_by_time(folder: Path, rank: int) -> list[str]:
    """FP8 layers after `layers.probe`, where the caches of the two ranks say the opposite of each other."""
    os.environ["XDG_CACHE_HOME"] = str(folder / f"cache{rank}")
    base = load_recipe("fp8_hybrid").model_dump()
    recipe = Recipe.model_validate(
        {**base, "layers": {"min_features": 16, "probe": True, "probe_tokens": 128}}
    )
    facts, native = machine("H100"), recipe.ladder[1]
    gain, loss = (2e-5, 1e-5), (1e-5, 2e-5)
    times = {
        "32x32, 128 tokens": loss if rank else gain,
        "64x32, 128 tokens": gain if rank else loss,
    }
    cache_file(recipe, native, facts, CPU).write_text(json.dumps(times))
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 64))
    return list(
        probe_layers(make_plan(recipe, facts, native, [], model), recipe, facts, CPU).fp8_layers()
    )


def rank_main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    timed = layers_chosen_by_time(folder, rank)
    answers: list[dict[str, Any]] = []
    for name, *cards, _ in CASES:
        facts = machine(str(cards[rank]))
        try:
            rung, verdicts = agree_on_rung(recipe_named(name), facts, CPU)
            answer = {"rung": rung.name, "told": {v.rung: v.reason for v in verdicts}}
            answer["taken"] = [v.rung for v in verdicts if v.taken]
        except MachineError as refused:
            answer = {"rung": None, "error": str(refused)}
        answers.append(
            {**answer, "fallback_precision": agree_on_fallback(facts, CPU), "timed": timed}
        )
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(answers))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    return run_ranks(__file__, tmp_path_factory.mktemp("cards"), 2)


def case(two_ranks: list[list[dict[str, Any]]], *wanted: str) -> list[dict[str, Any]]:
    index = next(index for index, (*inputs, _) in enumerate(CASES) if tuple(inputs) == wanted)
    return [answers[index] for answers in two_ranks]


def test_every_pair_takes_what_the_weaker_card_can(two_ranks: list[list[dict[str, Any]]]) -> None:
    for answers in two_ranks:
        assert [answer["rung"] for answer in answers] == [expected for *_, expected in CASES]
        for answer in answers:
            assert answer["rung"] is None or answer["taken"] == [answer["rung"]]


def test_the_stronger_rank_says_what_it_gave_up(two_ranks: list[list[dict[str, Any]]]) -> None:
    weak, strong = case(two_ranks, "fp8_hybrid", "T4", "H100")
    assert (
        strong["told"]["native:fp8"]
        == strong["told"]["autocast:bf16"]
        == "another rank cannot take it"
    )
    assert strong["told"]["autocast:fp16"] == "the best that every rank can take"
    assert "not installed" in strong["told"]["transformer_engine:fp8"], (
        "its own reason, not the other rank's"
    )
    assert weak["told"]["autocast:fp16"] == "fp16 tensor cores"
    with_te, without = case(two_ranks, "fp8_hybrid", "H100+TE", "H100")
    assert with_te["told"]["transformer_engine:fp8"] == "another rank cannot take it"
    assert (
        with_te["told"]["autocast:bf16"]
        == without["told"]["autocast:bf16"]
        == "not needed: native:fp8 runs"
    )


def test_no_common_rung_is_one_error_that_names_both_machines(
    two_ranks: list[list[dict[str, Any]]],
) -> None:
    for wanted in (("hopper_only", "H100", "T4"), ("crossed", "T4", "CPU")):
        first, second = case(two_ranks, *wanted)
        assert first["error"] == second["error"]
        assert f"no rung of recipe {wanted[0]} runs on every rank" in first["error"]
    error = case(two_ranks, "hopper_only", "H100", "T4")[0]["error"]
    assert "rank 0 is tier HOPPER" in error
    assert "rank 1 is tier TURING (T4, compute capability 7.5)" in error
    assert "not for tier TURING (for HOPPER)" in error


def test_the_way_out_of_fp16_is_one_that_both_cards_have(
    two_ranks: list[list[dict[str, Any]]],
) -> None:
    expected = {
        "H100": "bf16",
        "A100": "bf16",
        "L4": "bf16",
        "CPU": "bf16",
        "T4": "fp32",
        "V100": "fp32",
    }
    for index, (_, *cards, _) in enumerate(CASES):
        fallbacks = {expected[str(card).partition("+")[0]] for card in cards}
        for answers in two_ranks:
            assert answers[index]["fallback_precision"] == (
                "bf16" if fallbacks == {"bf16"} else "fp32"
            )


def test_rank_0_times_layers_for_all(two_ranks: list[list[dict[str, Any]]]) -> None:
    assert [answers[0]["timed"] for answers in two_ranks] == [["0"], ["0"]]


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
