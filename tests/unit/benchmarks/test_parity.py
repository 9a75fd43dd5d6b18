"""The control's ulp, the claim's arithmetic, and a study that goes on where it was interrupted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.parity import (
    FIXED,
    RECIPE,
    judge,
    pair_up,
    perturbed_gpt,
    run_folder,
    settings,
    show,
    train,
)
from harness.core.config import load_config
from harness.models import build_model, gpt

SIZES: dict[str, Any] = {"dim": 32, "layers": 1, "heads": 2}
TINY = [
    "train.steps=1",
    "train.global_batch=1",
    "train.micro_batch=1",
    "data.context=16",
    "data.val_samples=1",
    "model.args={dim: 32, layers: 1, heads: 2}",
]


def _ulps(model: torch.nn.Module) -> torch.Tensor:
    """All parameters as integers that count fp32 values."""
    bits = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).view(
        torch.int32
    )
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@pytest.mark.parametrize(("ulp_bits", "ulp"), [(0, 1), (16, 2**16)])
def test_a_control_moves_every_weight_by_one_ulp_either_way(ulp_bits: int, ulp: int) -> None:
    torch.manual_seed(3)
    plain = _ulps(gpt.build(**SIZES))
    after = torch.get_rng_state()
    torch.manual_seed(3)
    moved = _ulps(perturbed_gpt(coin=5, ulp_bits=ulp_bits, **SIZES)) - plain
    assert torch.equal(torch.get_rng_state(), after)  # whatever is drawn next is the pair's
    assert moved.unique().tolist() == [-ulp, ulp]
    assert abs((moved / ulp).double().mean()) < 0.05
    torch.manual_seed(3)
    assert not torch.equal(_ulps(perturbed_gpt(coin=6, ulp_bits=ulp_bits, **SIZES)) - plain, moved)


def test_the_ulp_of_bf16_changes_the_products_that_of_fp32_hardly() -> None:
    seen: list[torch.Tensor] = []
    for model in (
        gpt.build,
        partial(perturbed_gpt, coin=1),
        partial(perturbed_gpt, coin=1, ulp_bits=16),
    ):
        torch.manual_seed(3)
        seen.append(
            torch.cat(
                [parameter.detach().flatten() for parameter in model(**SIZES).parameters()]
            ).bfloat16()
        )
    plain, faint, plainly = seen
    assert (faint != plain).double().mean() < 0.001
    assert (plainly != plain).double().mean() > 0.999


def test_the_kinds_differ_in_nothing_but_the_weights_of_the_controls() -> None:
    configs = {kind: load_config("quickstart", settings(kind, 7, [])) for kind in RECIPE}
    bf16 = configs["bf16"]
    assert bf16.train.seed == 7
    assert configs["fp8"] == bf16
    moves: dict[str, list[int]] = {}
    for kind in ("fp32_ulp", "bf16_ulp"):
        assert configs[kind].model_copy(update={"model": bf16.model}) == bf16
        torch.manual_seed(7)
        plain = build_model(bf16.model)
        torch.manual_seed(7)
        moves[kind] = (
            (_ulps(build_model(configs[kind].model)) - _ulps(plain)).abs().unique().tolist()
        )
    assert moves == {"fp32_ulp": [1], "bf16_ulp": [2**16]}


def test_overrides_win_over_what_the_study_sets_and_reach_the_control() -> None:
    config = load_config(
        "quickstart", settings("bf16_ulp", 0, ["data.val_samples=9", "model.args.dim=64"])
    )
    assert config.data.val_samples == 9
    assert config.model.args == {
        "dim": 64,
        "layers": 4,
        "heads": 4,
        "tied": False,
        "coin": 0,
        "ulp_bits": 16,
    }
    assert "tracking.fp8_every=1" in FIXED


def test_the_claim_compares_the_upper_ends() -> None:
    narrow = [0.001, -0.001, 0.0, 0.0]  # upper end 3.18245 * 0.00081650 / 2 = +0.0012992
    wide = [0.002, -0.002, 0.0, 0.0]  # twice that
    fp8 = [0.002, 0.003, 0.004, 0.003]  # upper end 0.003 + 0.0012992
    assert judge(fp8, {"narrow": narrow}, margin=0.00301).holds == {"narrow": True}
    verdict = judge(fp8, {"narrow": narrow, "wide": wide}, margin=0.00299)
    assert verdict.holds == {"narrow": False, "wide": True}
    assert verdict.controls["narrow"].high == pytest.approx(0.0012992, abs=1e-6)
    assert "DOES NOT HOLD beside narrow" in str(verdict)
    assert "claim holds beside wide" in str(verdict)


def test_a_study_with_too_few_seeds_says_so() -> None:
    spread = [
        0.004,
        -0.004,
        0.0,
        0.0,
    ]  # sd 0.327%: 9 seeds, since 2.3060 * 0.327% / 3 = 0.251% and n = 10: 0.234%
    verdict = judge(spread, {"control": spread})
    assert verdict.holds == {"control": True}
    assert verdict.seeds_needed == 10
    assert "4 are TOO FEW" in str(verdict)


def test_differences_are_relative_to_bf16_of_the_same_seed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    losses = {0: (2.02, 2.0, 1.98, 2.0), 4: (3.0, 3.0, 3.3, 2.7)}  # in the order of RECIPE
    results = {
        (kind, seed): {"val_loss": loss, "switches": 3 if (kind, seed) == ("fp8", 4) else 0}
        for seed, row in losses.items()
        for kind, loss in zip(RECIPE, row, strict=True)
    }
    first, second = pairs = pair_up(results, [0, 4])
    assert first["relative_difference"] == pytest.approx(
        {"fp8": 0.01, "fp32_ulp": -0.01, "bf16_ulp": 0.0}
    )
    assert second["relative_difference"] == pytest.approx(
        {"fp8": 0.0, "fp32_ulp": 0.1, "bf16_ulp": -0.1}
    )
    assert (first["switches"], second["switches"]) == (0, 3)
    show(pairs, judge([0.01, 0.0], {"fp32_ulp": [-0.01, 0.1]}))
    printed = capsys.readouterr().out.splitlines()
    assert printed[2].split() == [
        "0",
        "2.0000",
        "2.0200",
        "+1.000%",
        "1.9800",
        "-1.000%",
        "2.0000",
        "+0.000%",
        "0",
    ]


@pytest.mark.nightly
def test_finished_runs_are_kept_and_others_made_again(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, "bf16_ulp", 1)
    folder.mkdir(parents=True)
    (folder / "journal.jsonl").write_text("the remains of an interrupted run\n")
    first = train(tmp_path, "bf16_ulp", 1, TINY)
    assert 4.0 < first["val_loss"] < 7.0  # ln 256 = 5.5
    journal = (folder / "journal.jsonl").stat()
    assert train(tmp_path, "bf16_ulp", 1, TINY) == first
    assert (folder / "journal.jsonl").stat() == journal
    again = train(tmp_path, "bf16_ulp", 1, [*TINY, "train.lr=5e-3"])
    assert again["val_loss"] != first["val_loss"]
    assert (folder / "journal.jsonl").stat() != journal
