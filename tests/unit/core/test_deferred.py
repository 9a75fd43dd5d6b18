"""A model that is built without memory has the values of one that is built whole, or it is built whole."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from harness.core import deferred, exact_types
from harness.core.config import ModelConfig
from harness.core.shards import Rows
from harness.core.state import seed_everything
from harness.models import Task, build_deferred, build_model, gpt, llama, vision
from tests.support.matrix import rest_slow

CPU = torch.device("cpu")


class Own(nn.Module):
    """Initialisers of torch, and what constructors do to weights beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(100, 100)
        self.second = nn.Linear(100, 100)
        self.rows = nn.Embedding(100, 100, padding_idx=3)
        self.scaled = nn.Parameter(torch.randn(100, 100) * 0.1)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 3, enable_nested_tensor=False
        )
        self.register_buffer("mask", torch.tril(torch.ones(100, 100)))
        nn.init.orthogonal_(self.first.weight)
        nn.init.trunc_normal_(self.second.weight, std=0.02)
        nn.init.kaiming_normal_(self.rows.weight[5:50])
        with torch.no_grad():
            self.first.weight[:10].copy_(self.second.weight[:10] * 2)
            self.first.weight[:, 5].zero_()
            # A value that is read decides how many random numbers are drawn.
            if self.first.weight.mean() > -1:
                torch.rand(3)
            self.second.weight[:, torch.randperm(100)[:50]] = 0
        # Tied, and not trained.
        self.third = nn.Linear(100, 100)
        self.third.weight = self.second.weight
        self.rows.weight.requires_grad_(False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: gpt.build(dim=128),
    "tied gpt": lambda: gpt.build(dim=64, tied=True, qk_norm=True),
    "convnet": vision.convnet,
    "vit": vision.vit,
    "own": Own,
}


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_same(whole: nn.Module, later: nn.Module) -> int:
    """How many tensors of `later` had no memory."""
    recording = deferred.recording_of(later)
    assert recording is not None
    theirs, ours = tensors(whole), tensors(later)
    assert list(theirs) == list(ours)
    without = 0
    for name, expected in theirs.items():
        found = ours[name]
        assert found.requires_grad == expected.requires_grad
        assert type(found) is type(expected)
        if found.is_meta:
            without += 1
            found = recording.value(recording.view(found))
        assert torch.equal(found, expected), name
        assert found.stride() == expected.stride()
    return without


@pytest.mark.parametrize("small", rest_slow([0, 4096], 0))
@pytest.mark.parametrize("name", list(MODELS))
def test_values_and_generator_are_those_of_a_whole_build(name: str, small: int) -> None:
    seed_everything(3)
    whole = MODELS[name]()
    after = torch.get_rng_state()
    seed_everything(3)
    later = deferred.build(MODELS[name], CPU, small)
    assert torch.equal(torch.get_rng_state(), after)
    without = assert_same(whole, later)
    assert without == len(tensors(whole)) if small == 0 else without > 0
    assert torch.equal(torch.get_rng_state(), after), "values are computed aside"


@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_a_file_are_read_later(tied: bool, tmp_path: Path) -> None:
    stored = gpt.build(dim=64, tied=tied)
    named = llama.to_llama(stored.state_dict(), stored.settings)
    halves = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in named.items()}
    save_file(halves, tmp_path / "model.safetensors")
    described = json.dumps(llama.config_of(stored.settings, 64))
    (tmp_path / "config.json").write_text(described)
    config = ModelConfig(target="harness.models.llama:build", args={"folder": str(tmp_path)})
    whole = build_model(config)
    assert_same(whole, later := build_deferred(config, CPU))
    assert next(later.parameters()).is_meta

    # Each rank reads its rows alone, of matrices that are several in the file, too.
    recording: Any = deferred.recording_of(later)
    for name, expected in whole.named_parameters():
        view = recording.view(later.get_parameter(name))
        assert recording.has_rows(view)
        for rank in range(3):
            rows = Rows.of_rank(tuple(expected.shape), rank, 3)
            found = recording.rows(view, rows.begin, rows.end)
            assert torch.equal(found, expected[rows.begin : rows.end]), name


class Table(deferred.Source):
    """A tensor of [60, 80] that counts how many of its rows are read."""

    def __init__(self, seed: int) -> None:
        self.place = "here"
        self.values = torch.randn(60, 80, generator=torch.Generator().manual_seed(seed))
        self.read = 0

    def __call__(self) -> Tensor:
        return self.rows(0, 60)

    def rows(self, begin: int, end: int) -> Tensor:
        self.read += end - begin
        return self.values[begin:end].clone()


# What a constructor makes of two tables, and how many rows of each its row 1 needs: None where it is made whole.
MADE_OF_TWO: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, int] | None]] = {
    "as it is": (lambda a, b: a, (1, 0)),
    "cast": (lambda a, b: a.to(torch.bfloat16), (1, 0)),
    "above each other": (lambda a, b: torch.cat([a, b]), (1, 0)),
    "a part above the other": (lambda a, b: torch.cat([a[:4], b]), None),
    "beside each other": (lambda a, b: torch.cat([a, b], dim=-1), (1, 1)),
    "stacked": (lambda a, b: torch.stack([a, b]), (0, 60)),
    "stacked in between": (lambda a, b: torch.stack([a, b], dim=1), (1, 1)),
    "turned": (lambda a, b: a.t().contiguous(), None),
    "two dtypes": (lambda a, b: torch.cat([a, b.double()]), None),
    "changed afterwards": (lambda a, b: a.clone().mul_(2), None),
    "added": (lambda a, b: a + b, None),
}


@pytest.mark.parametrize("name", list(MADE_OF_TWO))
def test_rows_are_read_without_the_others(name: str) -> None:
    make, needed = MADE_OF_TWO[name]
    tables = Table(1), Table(2)
    expected = make(*(table.values for table in tables))

    def build() -> nn.Module:
        model = nn.Module()
        made = make(*(deferred.later(each, (60, 80), torch.float32) for each in tables))
        model.weight = nn.Parameter(made)
        return model

    recording: Any = deferred.recording_of(model := deferred.build(build, CPU))
    assert recording.places == {"here"}
    view = recording.view(model.weight)
    assert [table.read for table in tables] == [0, 0]
    assert recording.has_rows(view) == (needed is not None)
    if needed is not None:
        assert torch.equal(recording.rows(view, 1, 2), expected[1:2])
        assert tuple(table.read for table in tables) == needed
        for begin, end in ((0, len(expected)), (1, len(expected)), (1, 1)):
            found = recording.rows(view, begin, end)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected[begin:end])
    assert torch.equal(recording.value(view), expected)


def test_a_constructor_may_convert_its_model() -> None:
    def make() -> nn.Module:
        model: Any = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100)).double()
        model[1].weight = model[0].weight
        with torch.no_grad():
            model[0].weight.mul_(3)
        return model.to(CPU).half()

    seed_everything(3)
    whole = make()
    seed_everything(3)
    later: Any = deferred.build(make, CPU)
    assert later[0].weight is later[1].weight
    assert assert_same(whole, later) == 1


def test_a_model_of_the_meta_device_may_get_its_memory_in_the_constructor() -> None:
    """As transformers does for weights that a folder lacks."""

    def make() -> nn.Module:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(100, 200), nn.Linear(200, 3))
        model.to_empty(device="cpu")
        for param in model.parameters():
            nn.init.normal_(param)
        return model

    seed_everything(3)
    whole = make()
    after = torch.get_rng_state()
    seed_everything(3)
    later = deferred.build(make, CPU)
    assert torch.equal(torch.get_rng_state(), after)
    assert assert_same(whole, later) == 1


def test_errors_that_are_final_are_raised_as_they_are() -> None:
    def make() -> nn.Module:
        raise KeyError("weights")

    with pytest.raises(KeyError):
        deferred.build(make, CPU, final=KeyError)
    with pytest.raises(deferred.CannotDeferError, match="KeyError"):
        deferred.build(make, CPU)


def test_a_forward_computes_each_weight_that_it_reads() -> None:
    seed_everything(3)
    whole = gpt.build(dim=128)
    seed_everything(3)
    later = deferred.build(lambda: gpt.build(dim=128), CPU)
    ids = torch.arange(32).view(2, 16)
    task = Task(whole, "gpt")
    for half in (None, torch.bfloat16):
        cast = torch.autocast("cpu", dtype=half, enabled=half is not None, cache_enabled=False)
        with torch.no_grad(), cast:
            expected = task.loss(whole, {"inputs": ids, "targets": ids})
            with deferred.computing(later):
                found = task.loss(later, {"inputs": ids, "targets": ids})
        assert torch.equal(found, expected)
    assert later.embed.weight.is_meta  # type: ignore[union-attr]


class Stored(nn.Module):
    """Two matrices that are in files."""

    def __init__(self, tables: tuple[Table, Table]) -> None:
        super().__init__()
        first, second = (deferred.later(each, (60, 80), torch.float32) for each in tables)
        self.first, self.second = nn.Parameter(first), nn.Parameter(second.to(torch.bfloat16))


def test_a_trial_reads_no_matrix_unless_it_complains() -> None:
    tables = Table(1), Table(2)
    later: Any = deferred.build(lambda: Stored(tables), CPU)
    answers: list[str] = []
    found: list[Tensor] = []

    def trial() -> str:
        ran = (later.first @ later.second.float().t(), later.first.clone(), later.second.clone())
        found[:] = ran
        answer = answers.pop(0)
        if answer == "error":
            raise ValueError(answer)
        return answer

    def read() -> list[int]:
        counts = [table.read for table in tables]
        for table in tables:
            table.read = 0
        return counts

    # Values of a usual size, which are not alike, and the same on every rank.
    answers[:] = [""]
    assert deferred.try_model(later, trial) == ""
    assert read() == [0, 0]
    product, first, second = found
    assert first.dtype == torch.float32
    assert second.dtype == torch.bfloat16
    assert float(first.detach().std()) == pytest.approx(80**-0.5, rel=0.05)
    assert len(first.unique(dim=0)) == 60
    assert not torch.equal(first, second.float())
    assert product.isfinite().all()
    answers[:] = [""]
    deferred.try_model(later, trial)
    assert torch.equal(found[1], first)

    # A complaint, or an error, of values that nobody has stored does not count.
    for complaint in ("odd", "error"):
        answers[:] = [complaint, ""]
        assert deferred.try_model(later, trial) == ""
        assert torch.equal(found[1], tables[0].values)
        assert min(read()) > 0
    answers[:] = ["first", "second"]
    assert deferred.try_model(later, trial) == "second"
    answers[:] = ["error", "error"]
    with pytest.raises(ValueError, match="error"):
        deferred.try_model(later, trial)

    # Elsewhere values are the stored ones.
    recording: Any = deferred.recording_of(later)
    read()
    assert torch.equal(recording.value(recording.view(later.first)), tables[0].values)
    assert read() == [60, 0]


def test_a_model_without_files_is_tried_once_with_its_own_values() -> None:
    seed_everything(3)
    whole = nn.Linear(100, 100)
    seed_everything(3)
    later: Any = deferred.build(lambda: nn.Linear(100, 100), CPU)
    for model in (whole, later):
        calls: list[Tensor] = []

        def trial(model: Any = model, calls: list[Tensor] = calls) -> str:
            calls.append(model.weight.clone())
            return "complaint"

        assert deferred.try_model(model, trial) == "complaint"
        assert len(calls) == 1
        assert torch.equal(calls[0], whole.weight)


@torch.library.custom_op("harness_tests::largest", mutates_args=())
def largest(values: Tensor) -> Tensor:
    """An operation that torch knows no shapes of: it fails on a tensor without memory."""
    return values.max().clone()


EXPECTS_ERRORS: dict[str, Callable[[Tensor], Any]] = {
    "caught numpy": lambda weight: weight.numpy().std(),
    "caught array": lambda weight: np.asarray(weight).std(),
    "caught operator": largest,
    "caught format": lambda weight: f"{weight.sum():.2f}",
    "caught storage": lambda weight: weight.untyped_storage()[0] + 1,
    "caught pickle": lambda weight: len(pickle.dumps(weight)),
    "caught share": lambda weight: weight.share_memory_().sum(),
}


def scale_by_type(weight: Tensor) -> None:
    """As libraries find out whether somebody else has quantised a weight."""
    if type(weight) is not nn.Parameter:
        weight.data.zero_()


class Odd(nn.Module):
    """Does one thing that cannot be recorded."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(100, 100)
        weight = self.linear.weight
        if kind == "list":
            self.kept = [weight]
        elif kind == "closure":
            self.read = lambda: weight
        elif kind == "numpy":
            weight.detach().numpy().fill(1)
        elif kind == "caught":
            try:
                torch._foreach_mul_([weight.data, self.linear.bias.data], 2.0)
            except deferred.CannotDeferError:
                weight.data.zero_()
        elif kind in EXPECTS_ERRORS:
            # On a tensor without memory these fail, and the weights would become others than in a whole build.
            try:
                weight.data.mul_(float(EXPECTS_ERRORS[kind](weight.detach())))
            except (RuntimeError, TypeError, AttributeError, NotImplementedError):
                weight.data.zero_()
        elif kind == "address":
            other = torch.randn(100, 100)
            if weight.data_ptr() == other.data_ptr():  # as for tied weights
                weight.data.zero_()
        elif kind == "each":
            weight.data.apply_(lambda value: value / 2)
        elif kind == "printed":
            if "FakeTensor" in repr(weight):
                weight.data.zero_()
        elif kind == "exact type":
            scale_by_type(weight)
        elif kind == "shared":
            self.again = nn.Parameter(weight.data)
        elif kind == "lazy":
            self.lazy = nn.LazyLinear(3)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("list", "neither parameters nor buffers: .100, 100."),
        ("closure", "neither parameters nor buffers: .100, 100."),
        ("numpy", "numpy"),
        ("caught", "_foreach_mul_ writes tensors of two kinds"),
        ("caught numpy", "Tensor.numpy: RuntimeError"),
        ("caught array", "Tensor.__array__: RuntimeError"),
        ("caught operator", "harness_tests.*largest"),
        ("caught format", "Tensor.__format__: TypeError"),
        ("caught storage", "Tensor.untyped_storage asks for memory that is not there yet"),
        ("caught pickle", "Tensor.__reduce_ex__ asks for memory"),
        ("caught share", "Tensor.share_memory_: RuntimeError"),
        ("address", "Tensor.data_ptr asks for memory"),
        ("each", "Tensor.apply_ asks for memory"),
        ("printed", "Tensor.__repr__ asks for memory"),
        ("exact type", r"scale_by_type .test_deferred.py:\d+. compares the exact type of a tensor"),
        ("shared", "linear.weight and again share memory|again and linear.weight share memory"),
        ("lazy", "lazy.weight gets its shape in the first forward"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_what_cannot_be_recorded_is_refused(kind: str, why: str) -> None:
    with pytest.raises(deferred.CannotDeferError, match=why):
        deferred.build(lambda: Odd(kind), CPU)
    assert not deferred.is_building()
    made: Any = Odd(kind)
    assert made.linear.weight.shape == (100, 100)
    if kind in EXPECTS_ERRORS or kind in ("address", "each", "printed", "exact type"):
        assert made.linear.weight.any(), "a whole build does not come to the error"


def test_a_class_that_is_compared_by_its_name_is_noticed() -> None:
    def make() -> nn.Module:
        made = nn.Linear(100, 100)
        if type(made.weight).__name__ == "Parameter":
            made.weight.data.fill_(2)
        return made

    with pytest.raises(deferred.CannotDeferError, match="compares the exact type"):
        deferred.build(make, CPU)


def test_only_torchs_own_functions_may_compare_types() -> None:
    """torchvision's and torchao's files lie beside torch's, under names that begin alike."""

    def asks(x: Any) -> bool:
        return type(x) is Tensor

    beside = Path(torch.__file__).parent.with_name("torchvision") / "ops.py"
    own = Path(torch.__file__).parent / "nn" / "init.py"
    code = asks.__code__
    source = Path(__file__)
    assert exact_types.comparing([code])
    assert exact_types.is_torchs(str(own))
    assert not exact_types.is_torchs(str(beside))
    assert not exact_types.is_torchs(str(source))


def test_other_types_may_be_compared() -> None:
    """Also where a function only asks what a tensor is an instance of, or compares types of something else."""

    def make() -> nn.Module:
        made = nn.Linear(100, 100)
        is_linear = type(made) is nn.Linear and made.__class__.__name__ == "Linear"
        if is_linear and isinstance(made.weight, nn.Parameter) and isinstance(made.bias, Tensor):
            made.weight.data.fill_(2)
        return made

    seed_everything(3)
    whole = make()
    seed_everything(3)
    assert assert_same(whole, deferred.build(make, CPU)) == 1
    assert sys.getprofile() is None


@pytest.mark.nightly
def test_values_that_are_read_and_errors_of_other_tensors_can_be_recorded() -> None:
    """Values are computed where they are read; an error of a tensor with memory is the same in a whole build."""

    def make() -> nn.Module:
        made = nn.Linear(100, 100)
        try:
            made.weight.data.mul_(made.weight.sum().item() + len(made.weight.tolist()))
            torch.mv(torch.zeros(3, 3), torch.zeros(4))
        except RuntimeError:
            made.bias.data.fill_(2)
        return made

    seed_everything(3)
    whole = make()
    seed_everything(3)
    assert assert_same(whole, deferred.build(make, CPU)) == 1
