"""`harness doctor --speed`: turns, the tie rule, reasons, and real steps of odd models in every precision."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.capability.probe import MachineFacts, probe
from harness.core.errors import ConfigError
from harness.core.protocols import Batches
from harness.core.spread import spread_of
from harness.estimate.roofline import Op, Rates
from harness.measure import speed
from harness.measure.card_device import TorchDevice
from harness.measure.held_data import HeldBatches
from harness.measure.speed import Candidate, candidates, figures_of, measure_speed
from harness.measure.speed_picture import draw
from harness.measure.speed_verdict import Figures, Machine, Row, Status, choose, reason
from harness.measure.turns import steps_of_a_turn, take_turns
from harness.precision.plan import resolve
from harness.precision.recipe import load_recipe
from harness.tools.doctor import command
from harness.tools.start import read_policies

# ---- Turns


class Clockwork:
    """Takes turns in no time; says in `log` whose turn it was. fails: the number of the call that raises."""

    def __init__(self, name: str, log: list[tuple[str, int]], fails: int = 0) -> None:
        self.name, self.log, self.fails, self.calls = name, log, fails, 0

    def steps(self, count: int) -> float:
        self.calls += 1
        self.log.append((self.name, count))
        if self.calls == self.fails:
            raise ValueError("broken\nin two lines")
        return 2.0 * count


def test_contenders_take_turns_and_another_one_begins_each_round() -> None:
    log: list[tuple[str, int]] = []
    takers = {name: Clockwork(name, log) for name in "abc"}
    turns = take_turns(takers, {"a": 1, "b": 5, "c": 2}, 0.0, least=4)
    assert "".join(turns.order) == "abcbcacababc"
    assert [name for name, _ in log] == turns.order
    assert set(log) == {("a", 1), ("b", 5), ("c", 2)}
    assert turns.seconds == {name: [2.0] * 4 for name in "abc"}


def test_a_contender_that_raises_is_named_and_the_others_go_on() -> None:
    log: list[tuple[str, int]] = []
    takers = {"a": Clockwork("a", log), "b": Clockwork("b", log, fails=2)}
    turns = take_turns(takers, {"a": 1, "b": 1}, 0.0, least=3)
    assert turns.failures == {"b": "ValueError: broken in two lines"}
    assert [len(turns.seconds[name]) for name in "ab"] == [3, 1]
    assert turns.order.count("b") == 2


def test_turns_end_if_nobody_is_left() -> None:
    turns = take_turns({"a": Clockwork("a", [], fails=1)}, {"a": 1}, 1e9)
    assert turns.seconds == {"a": []}


def test_quartiles() -> None:
    assert spread_of([3.0]) == (3.0, 3.0, 3.0)
    assert spread_of([5.0, 1.0, 2.0, 4.0, 3.0]) == (2.0, 3.0, 4.0)


def test_a_turn_has_at_least_one_step_and_a_bounded_number() -> None:
    assert steps_of_a_turn(100.0) == 1
    assert steps_of_a_turn(0.05) == 5
    assert steps_of_a_turn(0.0) == 50


# ---- The verdict

GPU = Machine({"fp8": 1200e12, "bf16": 700e12, "fp16": 700e12, "fp32": 50e12}, 3e12, 5e-6)
CPU = Machine({"fp8": 2e9, "bf16": 4e9, "fp16": 4e9, "fp32": 20e9}, 5e9, 2e-5)
WORK = Figures(800, 300, 1e15, 10**11, 0.7, 0.2, 0.1, 40, 0)


def row(name: str, *times: float, status: Status = "measured", **more: Any) -> Row:
    """A row of `backend:precision`, with milliseconds of its turns."""
    precision = name.partition(":")[2].partition(",")[0]
    compiled = name.endswith(", compiled")
    seconds = [each / 1e3 for each in times]
    made = Row(name, "recipe", precision, compiled, status, seconds=seconds, figures=WORK)
    return replace(made, **more)


def taken(*rows: Row) -> tuple[str, list[str]]:
    choice = choose(rows)
    assert choice is not None
    return choice.taken.name, [each.name for each in choice.tied]


def test_the_fastest_is_taken() -> None:
    slow, fast = row("native:fp8", 10, 10, 11), row("autocast:bf16", 5, 5, 6)
    assert taken(slow, fast) == ("autocast:bf16", ["autocast:bf16"])


def test_a_tie_within_the_spread_takes_the_first_of_the_ladder() -> None:
    first, second = row("native:fp8", 9, 9.5, 10.5, 11), row("autocast:bf16", 8, 9, 10, 11)
    assert taken(first, second) == ("native:fp8", ["native:fp8", "autocast:bf16"])
    assert taken(second, first)[0] == "autocast:bf16"
    apart = row("native:fp8", 10.4, 10.5, 10.6, 12)
    assert taken(apart, second) == ("autocast:bf16", ["autocast:bf16"])


def test_one_slow_turn_of_the_fastest_makes_no_tie() -> None:
    fastest = row("autocast:fp32", 2, 2.1, 12)
    slower = row("native:fp8", 5, 6, 7)
    assert taken(slower, fastest) == ("autocast:fp32", ["autocast:fp32"])
    assert fastest.spread.high > slower.spread.high, "its middle half is wide"
    # The same the other way: one fast turn makes nobody as fast.
    lucky = row("native:fp8", 1, 11, 12)
    assert taken(lucky, row("autocast:fp32", 6.5, 7, 7.5)) == ("autocast:fp32", ["autocast:fp32"])


def test_equal_times_are_a_tie() -> None:
    same = [row(name, 3, 3, 3) for name in ("native:fp8", "autocast:bf16")]
    assert taken(*same)[0] == "native:fp8"


@pytest.mark.parametrize("status", ["not finite", "failed", "too slow", "cannot be built"])
def test_what_did_not_train_is_not_taken(status: Status) -> None:
    assert taken(row("native:fp8", 1, 1, status=status), row("autocast:bf16", 5, 5))[0] == (
        "autocast:bf16"
    )
    assert choose([row("native:fp8", 1, 1, status=status)]) is None


FP8, BF16, FP32 = row("native:fp8", 20, 20), row("autocast:bf16", 10, 10), row("autocast:fp32", 9)
FUSED = row("autocast:bf16, compiled", 10, 10)


def with_work(of: Row, **figures: Any) -> Row:
    assert of.figures is not None
    return replace(of, figures=replace(of.figures, **figures))


@pytest.mark.parametrize(
    ("loser", "winner", "machine", "word", "shown"),
    [
        (FP8, BF16, CPU, "emulated", "2 GFLOP/s in fp8, 4 GFLOP/s in bf16"),
        (with_work(FP8, misaligned=10), BF16, GPU, "misaligned", "10 of 40 Linear layers"),
        (FP8, with_work(BF16, operations=1500), GPU, "launch-bound", "75% of the step"),
        (FP8, with_work(BF16, small_share=0.83), GPU, "small GEMMs", "83% of the FLOPs"),
        (FP8, with_work(BF16, memory_share=0.6), GPU, "memory-bound", "60% of the time"),
        (FP8, BF16, GPU, "casts", "1.2e+03 TFLOP/s in fp8, 700 TFLOP/s in bf16"),
        (FP32, BF16, GPU, "GEMM-bound", "50 TFLOP/s in fp32, 700 TFLOP/s in bf16"),
        (with_work(FP32, product_share=0.1), BF16, GPU, "memory-bound", "it moves 93.13 GiB"),
        (row("autocast:bf16", 20), FUSED, GPU, "launch-bound", "20% of the step"),
        (with_work(row("autocast:bf16", 90), memory_share=0.4), FUSED, GPU, "memory-bound", "40%"),
        (FUSED, BF16, GPU, "GEMM-bound", "70% of the time"),
        (FUSED, with_work(BF16, product_share=0.2), GPU, "overhead", "40% of the eager"),
        (with_work(row("torchao:fp8", 30), bytes=2 * 10**11), FP8, GPU, "more work", "186.26 GiB"),
        (row("torchao:fp8, compiled", 30), FP8, GPU, "slower kernels", "800 operations"),
        (replace(FP8, figures=None), BF16, GPU, "unknown", "could not be counted"),
    ],
)
def test_reasons(loser: Row, winner: Row, machine: Machine, word: str, shown: str) -> None:
    why = reason(loser, winner, machine)
    assert why.word == word
    assert shown in why.text


def operation(flops: float, moved: int, kernels: int = 1) -> Op:
    return Op("mm", "forward", "GEMMs in 16 bits", moved, 0, flops, "half", False, kernels)


def test_figures_are_sums_over_operations() -> None:
    rates = Rates(1e12, 2e12, 1e12, 1e12, 1e12, 1e12, 1e-9, 1e-6)
    # A product of 1 s, one of 1 ms whose operands take longer to cast than FP8 saves, and 1 s of copies.
    ops = [operation(1e12, 10**9), operation(1e9, 10**9), operation(0.0, 10**12, kernels=3)]
    found = figures_of(ops, rates)
    assert (found.operations, found.products, found.flops) == (5, 2, 1.001e12)
    assert found.bytes == 10**12 + 2 * 10**9
    assert found.small_share == pytest.approx(1e9 / 1.001e12)
    assert found.product_share == pytest.approx(0.5, abs=1e-2)
    assert found.memory_share == pytest.approx(0.5, abs=1e-2)
    no_faster = replace(rates, gemm_fp8=1e12)
    assert figures_of(ops, no_faster).small_share != figures_of(ops, no_faster).small_share


# ---- Real steps

MODULE = """
import torch
import torch.nn.functional as F
from torch import nn

IMAGES = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Three(nn.Module):
    # Three parameters, one of them a scalar.
    def __init__(self, how):
        super().__init__()
        self.how, self.calls = how, 0
        self.up = nn.Linear(192, 64)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images, labels):
        self.calls += self.training
        logits = self.up(images.flatten(1)) * self.scale
        if self.how == "raises" and self.calls > 8:
            raise ValueError("no\\x1b[2J more")
        if self.how == "infinite" and logits.requires_grad and self.calls > 2:
            return F.cross_entropy(logits, labels) * float("inf")
        return F.cross_entropy(logits, labels)


class ViT(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 4, 4)
        layers = [nn.TransformerEncoderLayer(64, 2, 128, 0.0, batch_first=True) for _ in range(depth)]
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(64, 16)

    def forward(self, images, labels):
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean(1)), labels)


def three(how="right"):
    return Three(how)


def vit():
    return ViT()


def data():
    rows = [{"images": image, "labels": torch.tensor(n % 16)} for n, image in enumerate(IMAGES)]
    return rows[:56], rows[56:]
"""
# How many steps there are depends on how fast the machine is, and whether the guard acts on the number of steps.
CONFIG = """
recipe: fp8_hybrid
guard: {enabled: false}
train: {steps: 4, global_batch: 8, micro_batch: 4}
data: {target: "mine_speed:data"}
model: {target: "mine_speed:three"}
tracking: {mlflow: false}
"""
SHORT = 1e-4


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_speed.py").write_text(MODULE)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    return tmp_path


@pytest.fixture(scope="module")
def facts() -> MachineFacts:
    return probe()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Only these candidates, by their names; and however slow the machine is, each gets its turns."""

    def only(*names: str) -> None:
        def chosen(recipe: Any, facts: MachineFacts) -> list[Candidate]:
            return [each for each in candidates(recipe, facts) if each.name in names]

        monkeypatch.setattr(speed, "candidates", chosen)
        monkeypatch.setattr(speed, "_MOST_OF_TIME", float("inf"))

    return only


def measured(facts: MachineFacts, *words: str) -> speed.SpeedReport:
    config, recipe = read_policies("mine.yaml", list(words), None)
    return measure_speed(config, recipe, facts, SHORT)


def test_candidates_are_every_rung_that_runs_here_in_both_modes(facts: MachineFacts) -> None:
    found = candidates(load_recipe("fp8_hybrid"), facts)
    names = [each.name for each in found]
    assert names[:4] == [
        "native:fp8",
        "native:fp8, compiled",
        "autocast:bf16",
        "autocast:bf16, compiled",
    ]
    assert len(names) == len(set(names))
    assert {"autocast:fp16", "autocast:fp32"} < set(names)
    assert not any("transformer_engine" in name for name in names), "no such unit here"
    for each in found:
        assert [rung.name for rung in each.recipe.ladder] == [each.rung.name]


def test_another_own_recipe_comes_first(facts: MachineFacts) -> None:
    assert candidates(load_recipe("fp32"), facts)[0].name == "autocast:fp32"


def test_the_recipe_that_is_named_takes_the_rung(facts: MachineFacts) -> None:
    own = load_recipe("fp8_hybrid")
    found = candidates(own, facts)
    assert not any(each.shadowed for each in found)
    for each in found:
        taken, _ = resolve(load_recipe(each.recipe.name), facts)
        assert taken == each.rung, f"{each.name}: --recipe {each.recipe.name} gives another rung"
    by_name = {each.name: each for each in found}
    assert by_name["native:fp8"].of_config
    assert by_name["autocast:fp16"].recipe.name == "fp16_scaler", "not one for a fault of a model"

    # No recipe as it is gives a rung that stands below another one of all that have it.
    first = own.ladder[1].model_copy(update={"backend": "autocast", "precision": "fp32"})
    mine = own.model_copy(update={"float32_matmul": "medium", "ladder": [first, own.ladder[2]]})
    (bf16,) = (
        each
        for each in candidates(mine, facts)
        if each.rung.name == "autocast:bf16" and each.of_config and each.compile == "none"
    )
    assert bf16.shadowed
    row = speed.Row(bf16.name, "my/own.yaml", "bf16", shadowed=bf16.shadowed, seconds=[1.0] * 5)
    report = speed.SpeedReport("processor", 1, "a step", 1.0, speed.Machine({}, 1.0, 1.0), [row])
    report.choice = speed.choose(report.rows)
    (line,) = (line for line in speed.lines(report) if line.startswith("Take "))
    assert "a copy of recipe my/own.yaml without the rungs before this one" in line


@pytest.mark.slow
def test_three_parameters_are_timed_in_turns(
    folder: Path, facts: MachineFacts, few: Callable[..., None]
) -> None:
    names = ("native:fp8", "autocast:bf16", "autocast:bf16, compiled", "autocast:fp32")
    few(*names)
    report = measured(facts)
    rows = {each.name: each for each in report.rows}
    assert list(rows) == list(names), "nothing is dropped"
    compiled = rows.pop("autocast:bf16, compiled")
    assert compiled.status == "cannot be built"
    assert "ModuleList" in compiled.why
    for each in rows.values():
        assert each.status == "measured", each.why
        assert len(each.seconds) >= 3
        assert min(each.seconds) > 0
        assert each.figures is not None
        # Forward and two gradients of a product, or one: the images need none. The micro-batch is 4.
        assert each.figures.flops == 2 * 2 * (2 * 4 * 192 * 64)
    # Each round has every one of them once, and another begins.
    rounds = [report.order[at : at + 3] for at in range(0, len(report.order), 3)]
    assert all(set(each) == set(rows) for each in rounds)
    assert [each[0] for each in rounds[:3]] == list(rows)
    assert report.choice is not None
    text = "\n".join(speed.lines(report))
    assert f"Take {report.choice.taken.name}" in text
    json.dumps(report.as_dict(), allow_nan=False)


@pytest.mark.slow
def test_memory_counts_what_is_alive_together(
    folder: Path, facts: MachineFacts, few: Callable[..., None]
) -> None:
    few("autocast:fp32")
    (found,) = measured(facts, "model.target=mine_speed:vit").rows
    layer = torch.nn.TransformerEncoderLayer(64, 2, 128)
    blocks = 2 * sum(each.numel() for each in layer.parameters())
    parameters = blocks + (3 * 16 * 64 + 64) + (64 * 16 + 16)
    # Weights, gradients and two moments are alive together in the update, and activations before it.
    assert found.peak_bytes is not None
    assert 16 * parameters <= found.peak_bytes < 32 * parameters


@pytest.mark.slow
def test_a_candidate_that_raises_in_its_turn_is_named(
    folder: Path, facts: MachineFacts, few: Callable[..., None]
) -> None:
    few("autocast:bf16", "autocast:fp32")
    report = measured(facts, "model.args={how: raises}")
    for each in report.rows:
        assert each.status == "failed"
        assert each.why.startswith("ValueError: no")
        assert "\x1b" not in each.why
    assert report.choice is None
    assert "Nothing could be measured" in "\n".join(speed.lines(report))


@pytest.mark.slow
def test_a_candidate_that_is_not_finite_is_named(
    folder: Path, facts: MachineFacts, few: Callable[..., None]
) -> None:
    few("autocast:fp32")
    (found,) = measured(facts, "model.args={how: infinite}").rows
    assert found.status == "not finite"
    assert "NaN or infinite" in found.why
    assert found.skipped > 0


@pytest.mark.slow
def test_candidates_that_do_not_fit_together_come_one_after_another(
    folder: Path, facts: MachineFacts, few: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    few("native:fp8", "autocast:bf16", "autocast:fp32")
    monkeypatch.setattr(speed, "memory_on", lambda _: 1)
    report = measured(facts)
    assert not report.together
    assert [each.status for each in report.rows] == ["measured"] * 3
    names = [each.name for each in report.rows]
    assert report.order == [name for name in names for _ in range(len(report.order) // 3)]
    assert "Memory is short" in "\n".join(speed.lines(report))


class Leaves:
    """A bench whose candidates run out of memory half-way and hold themselves in a circle, as models do."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Leaves.Contender] = weakref.WeakSet()
        self.before: list[int] = []

    class Contender:
        def __init__(self) -> None:
            self.itself = self

        def steps(self, count: int) -> float:
            raise RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            )

    def allocated(self) -> int:
        self.before.append(len(self.alive))
        return self.before[-1]

    def build(self, candidate: object, stack: object) -> tuple[Contender, None]:
        made = self.Contender()
        self.alive.add(made)
        return made, None


def test_what_a_candidate_without_memory_left_is_gone_before_the_next_is_built() -> None:
    """Else the next one would have less memory than there is, and its own would be counted too low."""
    bench: Any = Leaves()
    candidate: Any = None
    row = Row("eager", "bf16", "bf16")
    gc.disable()
    try:
        for _ in range(3):
            assert speed._prepare(bench, candidate, row, 60.0) is None
            assert row.out_of_memory, "cuBLAS's own word for it"
    finally:
        gc.enable()
    assert bench.before == [0, 0, 0]


def test_memory_that_torch_keeps_of_a_check_before_counts_as_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`--card` writes over half of a card: to the driver those blocks are in use until torch gives them back."""
    kept = [40]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80 - sum(kept), 80))
    assert TorchDevice(torch.device("cuda", 0), "gpu 0").free_memory() == 80


@pytest.mark.slow
def test_a_vit_in_turns_leaves_the_folder_as_it_was(
    folder: Path, few: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    few("native:fp8", "autocast:bf16")
    before = sorted(path.name for path in folder.iterdir())
    words = ["model.target=mine_speed:vit"]
    code = command(words, "mine.yaml", None, True, speed=True, minutes=SHORT)
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    made = {path.name for path in folder.iterdir()} - set(before)
    assert made <= {"__pycache__"}
    assert found["speed"]["take"]["recipe"] in ("fp8_hybrid", "bf16")
    assert [each["name"] for each in found["speed"]["candidates"]] == [
        "native:fp8",
        "autocast:bf16",
    ]
    assert found["resolved"] == "native:fp8", "what doctor prints otherwise is there"


def test_nothing_is_timed_where_the_run_could_not_start(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = command(["data.target=mine_speed:nothing"], "mine.yaml", None, True, speed=True)
    found = json.loads(capsys.readouterr().out)
    assert code == 2
    assert "speed" not in found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speed": True, "config": None}, "name the config"),
        ({"speed": True, "minutes": 0.0}, "--minutes"),
        ({"speed": True, "minutes": float("nan")}, "--minutes"),
        ({"minutes": 1.0}, "--minutes belongs to --speed"),
        ({"speed": True, "picture": Path("nowhere/at/all.png")}, "--picture"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    folder: Path, options: dict[str, Any], words: str
) -> None:
    given = {"config": "mine.yaml", **options}
    with pytest.raises(ConfigError, match=words):
        command(None, **given)


def test_windows_that_are_held_come_again(folder: Path) -> None:
    class Numbered:
        name, tokens_per_sample, masked, unit = "numbers", 7, False, "loss"

        def window(self, index: int) -> Any:
            return speed_window(index)

        def micro_batches(self, window: Any, rank: int, world_size: int) -> list[Any]:
            assert (rank, world_size) == (0, 1)
            return [{"x": torch.tensor([window.index])}]

    data: Any = Numbered()
    held: Batches = HeldBatches(data, 3)
    for index in range(7):
        window = held.window(index)
        assert window.index == index
        (batch,) = held.micro_batches(window, 0, 1)
        assert batch["x"].item() == index % 3
    assert (held.tokens_per_sample, held.unit) == (7, "loss")


def speed_window(index: int) -> Any:
    import numpy as np

    from harness.core.facts import Window

    return Window(index, np.array([index]))


def test_the_picture_has_a_bar_for_each_candidate(tmp_path: Path) -> None:
    rows = [row("native:fp8", 9, 10, 12), row("autocast:bf16", 5, 6, 7)]
    report = speed.SpeedReport("gpu 0 (H\x1b[2J100)", 1, "a step", 2.0, GPU, rows)
    report.choice = choose(rows)
    path = draw(report, tmp_path / "bars.png")
    assert path.read_bytes()[:4] == b"\x89PNG"
