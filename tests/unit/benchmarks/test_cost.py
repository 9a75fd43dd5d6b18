"""The study of FP8's cost: its plan, what each switch changes, its baseline, its arithmetic, its resume."""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import cost, cost_corpora, cost_report
from benchmarks.cost import CONTROLS, FP8, RECIPES, SIZES, STAGES, VARIANTS, Job, jobs_of, missing, read_lines
from benchmarks.cost_numerics import (
    GEMMS,
    Numbers,
    Operand,
    Variant,
    in_blocks,
    product,
    round_by_chance,
    round_fp8,
)
from benchmarks.cost_training import Corpus, SeedsLoss, Size, clip, fp8_layers, sample_order, train, windows
from harness import Precision
from harness.core.errors import ConfigError, DataError
from harness.data.batches import sample_numbers
from harness.models import gpt
from harness.optim.schedule import Schedule
from harness.precision import scaling

CPU = torch.device("cpu")
SMALL = Size(dim=64, layers=3, heads=2, context=32, batch=4, steps=12, warmup=3, lr=3e-3, validation=16)
TEXT = Path(gpt.__file__).read_bytes()


def _corpus(size: Size = SMALL) -> Corpus:
    return Corpus.cut(TEXT, size)


def _of_the_product(recipe: str, seed: int, size: Size = SMALL) -> tuple[Tensor, list[Tensor], float]:
    """Losses [steps], final parameters and validation loss of the product's own `Precision`, in a plain loop."""
    torch.manual_seed(seed)
    model: Any = gpt.build(**size.model())
    precision = Precision.from_recipe(recipe)
    precision.prepare(model)
    model.loss = SeedsLoss(1)  # a mean of the same order of sums
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=size.lr, betas=(0.9, 0.95), fused=True)
    schedule = Schedule(size.lr, size.warmup, size.steps, 0.0)
    corpus = _corpus(size)
    losses: list[Tensor] = []
    for step in range(size.steps):
        numbers = sample_numbers(seed, step, size.batch, (len(corpus.train) - 1) // size.context)
        with precision.context():
            loss = model(*windows(corpus.train, torch.from_numpy(numbers), size.context))
        precision.backward(loss)
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        precision.step(optimizer, max_grad_norm=1.0)
        optimizer.zero_grad()
        losses.append(loss.detach())
    with precision.evaluating():
        loss = model(*windows(corpus.val, torch.arange(size.validation), size.context))
    return torch.cat(losses), [each.detach() for each in parameters], float(loss)


def _traced(variant: Variant, seeds: list[int], **options: Any) -> tuple[Tensor, list[Tensor], list[Any]]:
    """Losses [steps, S], final parameters [S, ...] and the outcomes of the study's own loop."""
    losses: list[Tensor] = []
    final: list[nn.Module] = []

    def keep(model: nn.Module, loss: Tensor) -> None:
        losses.append(loss)
        final[:] = [model]

    outcomes = train(variant, SMALL, _corpus(), seeds, CPU, trace=keep, **options)
    return torch.stack(losses), [each.detach() for each in final[0].parameters()], outcomes


@pytest.mark.parametrize(("recipe", "variant"), [("fp8_hybrid", FP8), ("bf16", CONTROLS["bf16"])])
def test_the_baselines_are_the_product_to_the_last_bit(recipe: str, variant: Variant) -> None:
    losses, parameters, outcomes = _traced(variant, [3, 8])
    for place, seed in enumerate((3, 8)):
        wanted, weights, validation = _of_the_product(recipe, seed)
        assert torch.equal(losses[:, place], wanted)
        assert all(torch.equal(ours[place], theirs) for ours, theirs in zip(parameters, weights, strict=True))
        assert outcomes[place].loss == pytest.approx(validation, abs=1e-6)
    assert losses[-1].max() < losses[0].min() - 0.3  # it trained


@pytest.mark.slow
def test_a_card_computes_the_same_but_for_the_order_of_sums() -> None:
    for name in ("fp8", "block", "weight_residual", "only_fprop"):
        on_cpu, _, _ = _traced(VARIANTS[name], [3, 8])
        as_card, _, _ = _traced(VARIANTS[name], [3, 8], card=True)
        assert (on_cpu - as_card).abs().max() < 2e-3, name


def test_seeds_do_not_see_each_other() -> None:
    together, _, outcomes = _traced(RECIPES["current"], [3, 8])
    alone, _, (outcome,) = _traced(RECIPES["current"], [8])
    assert torch.equal(together[:, 1], alone[:, 0])
    assert (outcomes[1].loss, outcomes[1].loss_bf16) == (outcome.loss, outcome.loss_bf16)
    assert outcomes[0].loss != outcome.loss


@pytest.mark.slow
def test_every_variant_trains_and_differs_from_every_other() -> None:
    seen: dict[str, float] = {}
    changed = replace(RECIPES["bf16_warmup"], bf16_steps=4)
    for name, variant in (VARIANTS | {"bf16_warmup": changed}).items():
        loss = float(_traced(variant, [0])[0][-1])
        assert 2.0 < loss < 5.2, name
        seen[name] = loss
    # Equal on purpose: 12 steps never leave a history of 16.
    assert seen.pop("history_1024") == seen["fp8"]
    assert len(set(seen.values())) == len(seen)


def test_switches_choose_layers_and_operands_and_nothing_else() -> None:
    model = gpt.build(**SMALL.model())
    every = fp8_layers(model, FP8)
    assert len(every) == 12
    assert fp8_layers(model, VARIANTS["only_down"]) == [f"blocks.{block}.mlp.down" for block in range(3)]
    assert fp8_layers(model, VARIANTS["edges_bf16"]) == [name for name in every if name.startswith("blocks.1.")]
    assert fp8_layers(model, CONTROLS["bf16"]) == []
    x = torch.randn(2, 8, 16).to(torch.bfloat16)
    for name, variant in VARIANTS.items():
        if variant.scaling == "block" or variant.bf16_steps or not variant.gemms:
            continue
        numbers = Numbers(variant, 1, 2, CPU, card=False)
        for role, gemms in {"input": (0, 2), "weight": (0, 1), "grad_output": (1, 2)}.items():
            take = numbers.operands(x, 0, role, record=True)
            for gemm in (GEMMS[each] for each in gemms):
                fp8 = take(gemm).inverse is not None
                assert fp8 == (role in variant.roles and gemm in variant.gemms), (name, role, gemm)


def test_scales_follow_margin_format_history_and_algorithm() -> None:
    def scale(variant: Variant, amaxes: list[float], role: str = "input") -> float:
        numbers = Numbers(variant, 1, 1, CPU, card=False)
        for step, amax in enumerate(amaxes):
            numbers.begin_step(step)
            numbers.operands(torch.full((1, 2, 2), amax), 0, role, record=True)
            numbers.end_step()
        numbers.begin_step(len(amaxes))
        inverse = numbers.operands(torch.ones(1, 2, 2), 0, role, record=True)("wgrad").inverse
        assert inverse is not None
        return 1 / float(inverse)

    peak_then_quiet = [4.0] + [1.0] * 20
    assert scale(FP8, [4.0, 1.0]) == pytest.approx(112.0)
    assert scale(FP8, peak_then_quiet) == pytest.approx(448.0)
    assert scale(RECIPES["history_1024"], peak_then_quiet) == pytest.approx(112.0)
    assert scale(RECIPES["most_recent"], [4.0, 1.0]) == pytest.approx(448.0)
    assert scale(RECIPES["margin_1"], [4.0]) == pytest.approx(56.0)
    assert scale(FP8, [4.0], "grad_output") == pytest.approx(57344 / 4)
    assert scale(RECIPES["grad_e4m3"], [4.0], "grad_output") == pytest.approx(112.0)
    assert scale(RECIPES["current"], [4.0]) == pytest.approx(448.0)  # of the ones, not of the four


def test_first_steps_in_bf16_record_what_later_ones_scale_by() -> None:
    numbers = Numbers(replace(FP8, bf16_steps=1), 1, 1, CPU, card=False)
    numbers.begin_step(0)
    assert numbers.operands(torch.full((1, 2, 2), 4.0), 0, "input", record=True)("fprop").inverse is None
    numbers.end_step()
    numbers.begin_step(1)
    inverse = numbers.operands(torch.ones(1, 2, 2), 0, "input", record=True)("fprop").inverse
    assert inverse is not None
    assert 1 / float(inverse) == pytest.approx(112.0)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_a_cards_cast_has_the_values_of_the_products(fmt: str) -> None:
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = bits[torch.isfinite(bits)][None, None]
    for scale in (1.0, 0.37, 2.0**14):
        wide = torch.full((1, 1, 1), scale)
        assert torch.equal(round_fp8(x, wide, fmt, card=True), scaling.quantize(x, scale, fmt).float())


def test_rounding_by_chance_has_no_bias_and_knows_only_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    for value, below, above in (
        (1.1, 1.0, 1.25),
        (-2.9, -3.0, -2.5),
        (2.0**-16 * 0.3, 0.0, 2.0**-16),
        (1e9, 57344, 57344),
    ):
        found = round_by_chance(torch.full((200_000,), value), torch.ones(1), "e5m2", generator)
        assert set(found.unique().tolist()) == {below, above}
        share = (min(max(value, -57344), 57344) - below) / (above - below) if above > below else 1.0
        bound = 5 * math.sqrt(share * (1 - share) / 200_000) * (above - below)
        assert float(found.double().mean()) == pytest.approx(below + share * (above - below), abs=bound + 1e-12)


def test_blocks_have_scales_of_their_own_that_are_powers_of_two() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 200, 300).to(torch.bfloat16)
    x[:, 130] *= 2.0**20
    x[:, :, 260] *= 2.0**-20
    found = in_blocks(x, "e4m3", 128, 128, card=False)
    for seed in range(2):
        for rows in (slice(0, 128), slice(128, 200)):
            for columns in (slice(0, 128), slice(128, 256), slice(256, 300)):
                part = x[seed, rows, columns].float()
                scale = 2.0 ** math.floor(math.log2(448.0 / float(part.abs().max())))
                wanted = scaling.quantize(part, scale, "e4m3").float() / scale
                assert torch.equal(found[seed, rows, columns].float(), wanted)
    assert torch.equal(in_blocks(x, "e4m3", 1, 128, card=True), in_blocks(x, "e4m3", 1, 128, card=False))
    assert not in_blocks(torch.zeros(1, 4, 4), "e4m3", 1, 128, card=False).any()


@pytest.mark.parametrize("card", [False, True])
def test_products_are_exact_and_rounded_once(card: bool) -> None:
    torch.manual_seed(0)
    left, right, more = (torch.randint(-8, 9, (2, *shape)).to(torch.bfloat16) for shape in ((5, 6), (7, 6), (7, 6)))
    inverse, other = torch.tensor([0.3, 0.7]), torch.tensor([1.1, 0.9])
    wide = (left.double() @ (right + more).double().mT) * (inverse.double() * other.double())[:, None, None]
    found = product(Operand((left,), inverse), Operand((right, more), other), "fprop", card)
    assert torch.allclose(found.double(), wide, rtol=2.0**-8, atol=0)
    assert found.dtype == torch.bfloat16
    grad = torch.randint(-8, 9, (2, 5, 7)).to(torch.bfloat16)
    back = product(Operand((grad,)), Operand((right,), other), "dgrad", card)
    assert torch.allclose(back.double(), grad.double() @ right.double() * other[:, None, None], rtol=2.0**-8, atol=0)
    weights = product(Operand((grad,)), Operand((left,)), "wgrad", card)
    assert torch.equal(weights, (grad.double().mT @ left.double()).to(torch.bfloat16))


def test_two_parts_of_a_weight_hold_it_sixteen_times_as_well() -> None:
    torch.manual_seed(0)
    weight = torch.randn(1, 64, 64)
    errors: list[float] = []
    for variant in (RECIPES["current"], replace(RECIPES["weight_residual"], scaling="current")):
        taken = Numbers(variant, 1, 1, CPU, card=False).operands(weight, 0, "weight", record=True)("fprop")
        assert taken.inverse is not None
        whole = sum((part.double() for part in taken.parts), torch.zeros(())) * taken.inverse.double()
        errors.append(float((whole - weight).abs().max()))
    assert errors[1] < errors[0] / 12


def test_smooth_channels_change_the_cast_and_not_the_product() -> None:
    plain = replace(FP8, smooth=False, gemms=("dgrad",))
    smooth = replace(plain, smooth=True)
    assert torch.equal(_traced(plain, [0])[0][0], _traced(smooth, [0])[0][0])  # powers of two: exact in bf16, too
    assert not torch.equal(_traced(FP8, [0])[0], _traced(RECIPES["smooth_swiglu"], [0])[0])


def test_each_seed_is_clipped_by_its_own_norm() -> None:
    parameters = [nn.Parameter(torch.zeros(2, 3, 4)), nn.Parameter(torch.zeros(2, 5))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
        parameter.grad[0] *= 0.01
        parameter.grad[1] *= 10
    clip(parameters, seeds=2)
    small, large = (
        math.sqrt(sum(float(each.grad[seed].square().sum()) for each in parameters if each.grad is not None))
        for seed in (0, 1)
    )
    assert small == pytest.approx(0.01 * math.sqrt(17))
    assert large == pytest.approx(1.0)


def test_pairs_share_data_and_initial_weights() -> None:
    order = sample_order(SMALL, _corpus(), [4, 9])
    samples = (len(_corpus().train) - 1) // SMALL.context
    assert order.shape == (SMALL.steps, 2 * SMALL.batch)
    assert order[2, SMALL.batch :].tolist() == sample_numbers(9, 2, SMALL.batch, samples).tolist()
    bf16, moved, fp8 = (_traced(VARIANTS[name], [4])[0] for name in ("bf16", "ulp_1", "fp8"))
    assert bf16[0] == pytest.approx(float(fp8[0]), abs=0.01)
    assert bf16[0] == pytest.approx(float(moved[0]), abs=1e-4)
    assert not torch.equal(bf16, moved)


def test_the_plan_is_fixed_and_balanced() -> None:
    assert cost.plan_text() == cost.plan_text()
    jobs = jobs_of("screen")
    assert jobs == jobs_of("screen")
    assert len({(job.variant, job.corpus, job.seeds) for job in jobs}) == len(jobs) == len(VARIANTS) * 2 * 12
    in_a_round = len(VARIANTS) * 2
    for number in range(12):
        turn = jobs[number * in_a_round : (number + 1) * in_a_round]
        assert {job.seeds for job in turn} == {tuple(range(8 * number, 8 * number + 8))}
        assert {job.variant for job in turn} == set(VARIANTS)
        assert {job.variant for job in turn[:8]} == set(CONTROLS)
    first, second = jobs[8:in_a_round], jobs[in_a_round + 8 : 2 * in_a_round]
    assert [job.variant for job in first] != [job.variant for job in second]
    chosen = jobs_of("confirm", ["current", "block"])
    assert {job.variant for job in chosen} == {*CONTROLS, "fp8", "current", "block"}
    assert all(size.validation * size.context < 150_000 for size in SIZES.values())
    assert "fp8_hybrid" in cost.plan_text()


@pytest.mark.parametrize(("stage", "recipes"), [("confirm", []), ("screen", ["current"]), ("confirm", ["only_input"])])
def test_recipes_belong_to_the_stage_confirm(stage: str, recipes: list[str]) -> None:
    with pytest.raises(ConfigError):
        jobs_of(stage, recipes)


def _row(job: Job, seed: int, loss: float | None, plain: float | None = None) -> dict[str, Any]:
    head = {"stage": job.stage, "variant": job.variant, "corpus": job.corpus, "identity": job.identity(), "seed": seed}
    figures = {"loss": loss, "loss_bf16": loss if plain is None else plain, "train_loss": loss}
    return head | figures | {"seconds": 1.0, "machine": "here", "torch": "2"}


class Turn:
    """The counter that workers share, for one of them."""

    def __init__(self) -> None:
        self.value = 0

    def get_lock(self) -> AbstractContextManager[None]:
        return nullcontext()


def test_an_interrupted_output_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = cost_corpora.pinned()
    for name in pinned:
        data = TEXT * 3
        (tmp_path / f"{name}.txt").write_bytes(data)
        pinned[name] |= {"sha256": hashlib.sha256(data).hexdigest()}
    monkeypatch.setattr(cost_corpora, "pinned", lambda: pinned)
    stage = replace(STAGES["rehearse"], variants=(*CONTROLS, "fp8"), seeds=2, at_once=1)
    monkeypatch.setitem(STAGES, "rehearse", stage)
    monkeypatch.setitem(SIZES, "toy", replace(SIZES["toy"], steps=1, validation=2))
    out = tmp_path / "out"
    out.mkdir()
    jobs = jobs_of("rehearse")
    worker = cost.Worker(0, "cpu", tmp_path, out, math.inf)

    cost.work(worker, jobs[:3], Turn())
    (file,) = out.glob("*.jsonl")
    whole = file.read_text()
    assert len(read_lines([out])) == 3
    file.write_text(whole[: whole.rindex('"seed"')])  # cut in the middle of the third line
    left = missing(jobs, read_lines([out]))
    assert left == jobs[2:]
    cost.work(worker, left, Turn())
    rows = read_lines([out])
    assert len(rows) == len(jobs)
    assert missing(jobs, rows) == []
    again = next(row for row in rows if (row["variant"], row["corpus"]) == (jobs[2].variant, jobs[2].corpus))
    assert json.dumps(again)[:40] == whole.splitlines()[2][:40]
    late = replace(worker, number=1, deadline=0.0)
    cost.work(late, jobs, Turn())
    assert len(read_lines([out])) == len(jobs)


def test_a_run_that_failed_is_told_and_tried_again(tmp_path: Path) -> None:
    job = Job("rehearse", "fp8", "python", (0, 1))
    failed = {key: value for key, value in _row(job, 0, 1.0).items() if key != "loss"} | {"failed": "OutOfMemoryError"}
    assert missing([job], [failed, _row(job, 1, 1.0)]) == [replace(job, seeds=(0,))]
    assert cost_report.losses_of([failed, _row(job, 1, 2.0)], "loss") == {("fp8", "python", 1): 2.0}


def test_lines_of_another_plan_are_refused(tmp_path: Path) -> None:
    row = _row(Job("rehearse", "fp8", "python", (0,)), 0, 1.0)
    (tmp_path / "worker-00-000.jsonl").write_text(json.dumps(row | {"identity": "0" * 16}) + "\n")
    with pytest.raises(DataError, match="not a run of this plan"):
        read_lines([tmp_path])


def test_a_difference_is_to_the_mean_of_the_seeds_own_controls() -> None:
    losses = {
        **{(name, "python", 0): loss for name, loss in zip(CONTROLS, (2.0, 2.1, 1.9, 2.04), strict=True)},
        ("fp8", "python", 0): 2.05,
        ("fp8", "python", 1): 3.0,  # whose controls did not run
    }
    assert cost_report.differences(losses, "fp8", "python") == {0: pytest.approx(2.05 / 2.01 - 1)}
    others = (2.1 + 1.9 + 2.04) / 3
    assert cost_report.differences(losses, "bf16", "python") == {0: pytest.approx(2.0 / others - 1)}
    assert cost_report.differences(losses, "fp8", "python", "bf16") == {0: pytest.approx(2.05 / 2.0 - 1)}


def test_the_report_finds_a_cost_that_was_put_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = torch.Generator().manual_seed(1)
    costs = {"fp8": 0.004, "current": 0.001, "block": 0.002, "margin_1": 0.003, "only_input": 0.0005, "no_down": None}
    lines: list[str] = []
    pooled: list[float] = []
    for seed in range(12):
        of_seed: list[float] = []
        for corpus, level in (("python", 2.0), ("licences", 1.0)):
            for name in (*CONTROLS, *costs):
                job = Job("screen", name, corpus, ())
                share = costs.get(name, 0.0)
                noise = 0.0 if name in CONTROLS else 0.001 * float(torch.randn((), generator=draw))
                loss = None if share is None else level * (1 + 0.01 * seed) * (1 + share + noise)
                lines.append(json.dumps(_row(job, seed, loss)))
                if name == "fp8":
                    of_seed.append(0.004 + noise)
        pooled.append(sum(of_seed) / 2)
    (tmp_path / "worker-00-000.jsonl").write_text("\n".join(lines) + "\n")
    cost_report.report([tmp_path], tmp_path)
    told = capsys.readouterr().out
    assert "--recipes current block" in told
    assert "target for fp8 DOES NOT HOLD" in told
    assert "LOST 24" in told
    assert (tmp_path / "cost_screen.png").stat().st_size > 10_000
    kept = json.loads((tmp_path / "cost_screen.json").read_text())["variants"]["fp8"]["result"]
    mean = sum(pooled) / 12
    sd = math.sqrt(sum((each - mean) ** 2 for each in pooled) / 11)
    half = 2.200985160 * sd / math.sqrt(12)  # Student's t of 11 degrees, from a printed table
    assert kept["pooled"]["mean"] == pytest.approx(mean, abs=1e-9)
    assert kept["pooled"]["low"] == pytest.approx(mean - half, abs=1e-8)
    assert kept["pooled"]["high"] == pytest.approx(mean + half, abs=1e-8)
    low, high = kept["boot"]
    assert low < mean < high
    assert high - low == pytest.approx(2 * 1.96 * sd * math.sqrt(11 / 12) / math.sqrt(12), rel=0.1)


def test_runs_of_two_machines_and_repeated_ones_are_refused() -> None:
    job = Job("screen", "fp8", "python", ())
    rows = [_row(job, 0, 1.0), _row(job, 1, 1.0) | {"machine": "elsewhere"}]
    with pytest.raises(DataError, match="several machines"):
        cost_report.losses_of(rows, "loss")
    with pytest.raises(DataError, match="there twice"):
        cost_report.losses_of([rows[0], rows[0]], "loss")


def test_corpora_are_made_whole_or_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"one\n")
    digest = hashlib.sha256
    wanted = {
        "python": {"sha256": digest(b"one\n").hexdigest(), "files": {"stdlib/a.py": digest(b"one\n").hexdigest()}}
    }
    cost_corpora.make(tmp_path / "made", {"stdlib": tmp_path}, wanted)
    assert cost_corpora.read(tmp_path / "made", "python", wanted) == b"one\n"
    wanted["python"]["files"] |= {"stdlib/b.py": "0" * 64}
    (tmp_path / "a.py").write_bytes(b"two\n")
    with pytest.raises(DataError) as caught:
        cost_corpora.make(tmp_path / "other", {"stdlib": tmp_path}, wanted)
    assert "a.py" in str(caught.value)
    assert "b.py" in str(caught.value)
    assert not (tmp_path / "other").exists()
    (tmp_path / "made" / "python.txt").write_bytes(b"two\n")
    with pytest.raises(DataError, match="not the pinned one"):
        cost_corpora.read(tmp_path / "made", "python", wanted)


def test_what_is_pinned_says_how_long_it_is() -> None:
    pinned = cost_corpora.pinned()
    assert set(pinned) == {"python", "licences"}
    for corpus in pinned.values():
        assert cost_corpora.ENOUGH <= corpus["bytes"] < cost_corpora.ENOUGH + cost_corpora.LARGEST
        assert list(corpus["files"].values()) == sorted(corpus["files"].values())
