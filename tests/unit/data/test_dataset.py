"""A data set of one's own: its order, its samples as a batch, bad ones by number, and what it must be to be resumed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.core.config import DataConfig, RunConfig, data_doubts, load_config
from harness.core.errors import ConfigError, DataError
from harness.core.facts import BAD_LABEL, IGNORED, NON_FINITE_INPUT, UNREADABLE, StepFacts, Window
from harness.core.health import Flawed, check_batch, harmless, name_faults, one_sample
from harness.core.protocols import Batch, Batches
from harness.core.state import seed_everything
from harness.data.dataset import DatasetBatches, open_dataset
from harness.data.order import sample_numbers
from harness.data.samples import first_form
from harness.monitors.data import DataMonitor
from harness.report.inspect import trained_on
from tests.unit.data import targets


def source(
    target: str, global_batch: int = 8, micro_batch: int = 4, seed: int = 3, **config: Any
) -> DatasetBatches:
    asked = DataConfig(target=f"tests.unit.data.targets:{target}", **config)
    return DatasetBatches(asked, seed, global_batch, micro_batch)


def numbers(batches: list[Batch]) -> list[int]:
    """Of `pairs`, whose images tell their number."""
    return [int(image[0, 0, 0]) for batch in batches for image in batch["inputs"]]


def test_the_order_is_that_of_text_at_any_world_size() -> None:
    data: Batches = source("both")
    for index in (0, 3, 11):
        window = data.window(index)
        assert window.samples.tolist() == sample_numbers(3, index, 8, targets.SIZE).tolist()
        alone = data.micro_batches(window, 0, 1)
        assert numbers(list(alone)) == window.samples.tolist()
        dealt = [data.micro_batches(window, rank, 2) for rank in range(2)]
        for number, batch in enumerate(alone):
            assert torch.equal(dealt[number % 2][number // 2]["inputs"], batch["inputs"])


def test_a_share_is_held_out_by_number_whatever_the_seed() -> None:
    splits = []
    for seed in (0, 1):
        data = source("pairs", global_batch=36, micro_batch=36, seed=seed, val_fraction=0.1)
        assert data.n_samples == 36
        train = numbers(data.micro_batches(data.window(0), 0, 1))
        val = numbers(data.validation(0, 1))
        assert sorted(train + val) == list(range(targets.SIZE)), (
            "every sample is in one split, once"
        )
        splits.append(val)
    assert splits[0] == splits[1]
    assert len(splits[0]) == 4


@pytest.mark.parametrize(
    ("target", "expected"),
    [("both", range(6)), ("mapping", range(6)), ("with_validation", range(1000, 1006))],
)
def test_a_validation_of_its_own(target: str, expected: range) -> None:
    data = source(target)
    assert data.n_samples == targets.SIZE
    assert sorted(numbers(data.validation(0, 1))) == list(expected)


@pytest.mark.parametrize(
    ("names", "size", "left_out"),
    [
        (["dev"], 6, []),
        (
            ["test", "validation_matched", "validation_mismatched"],
            7,
            ["test", "validation_mismatched"],
        ),
        (["dev", "validation"], 7, ["dev"]),
        # As train_test_split of the datasets library names them: a share of train is held out, and this is said.
        (["test"], 4, ["test"]),
    ],
)
def test_splits_are_known_by_name_and_others_are_named(
    names: list[str], size: int, left_out: list[str]
) -> None:
    facts = source("named", args={"names": names}, val_fraction=0.1).facts()
    assert facts["val_samples"] == size
    assert [text.partition(" ")[0] for text in facts["skipped"]] == left_out
    assert ("left out" in trained_on(facts, {})[-1]) == bool(left_out)


def test_a_random_split_is_two_data_sets() -> None:
    data = source("random_split", global_batch=targets.SIZE, micro_batch=targets.SIZE)
    train = numbers(data.micro_batches(data.window(0), 0, 1))
    assert len(train) == targets.SIZE
    assert sorted(train + numbers(data.validation(0, 1))) == list(range(targets.SIZE + 6))


def test_pairs_become_inputs_and_targets_in_dtypes_of_models() -> None:
    data = source("pairs")
    batch = data.micro_batches(data.window(0), 0, 1)[0]
    assert {name: (value.dtype, tuple(value.shape)) for name, value in batch.items()} == {
        "inputs": (torch.float32, (4, 1, 4, 4)),
        "targets": (torch.int64, (4,)),
    }
    assert (data.tokens_per_sample, data.facts()["counted"]) == (1, "samples")


def test_texts_are_padded_and_told_from_padding() -> None:
    data = source("texts", args={"pad_id": 9})
    batch = data.micro_batches(data.window(0), 0, 1)[0]
    lengths = [int(mask.sum()) for mask in batch["attention_mask"]]
    assert batch["input_ids"].shape[1] % 16 == 0
    assert sorted(set(lengths)) != lengths[:1], "the window must have several lengths"
    for ids, labels, mask, length in zip(
        batch["input_ids"], batch["labels"], batch["attention_mask"], lengths, strict=True
    ):
        number = int(ids[0])
        assert length == 5 + 7 * (number % 3)
        assert ids[:length].tolist() == [number] * length
        assert set(ids[length:].tolist()) <= {9}
        assert labels[:length].tolist() == [number + 1] * length
        assert set(labels[length:].tolist()) <= {IGNORED}
        assert mask.tolist() == [1] * length + [0] * (len(mask) - length)
    assert batch["weight"].dtype == torch.float32


def test_a_collate_of_its_own_is_used() -> None:
    data = source("lists", seed=0)
    batch = data.micro_batches(data.window(0), 0, 1)[0]
    assert batch["inputs"].shape == (4, 1)
    assert torch.equal(batch["targets"], batch["inputs"][:, 0].long() % 3)


@pytest.mark.parametrize("name", ["collate", "collate_fn"])
@pytest.mark.parametrize("by", ["itself", "random_split"])
def test_a_collate_is_used_by_either_name_and_through_a_split(by: str, name: str) -> None:
    data = source("collated", args={"by": by, "name": name})
    batch = data.micro_batches(data.window(0), 0, 1)[0]
    assert torch.equal(batch["targets"], batch["inputs"][:, 0].long() % 3)


def test_a_validation_is_collated_by_its_own() -> None:
    assert numbers(source("mixed", micro_batch=3, global_batch=3).validation(0, 1)) == [*range(6)]


@pytest.mark.parametrize("by", ["random_split", "concat"])
def test_what_a_data_set_says_counts_within_those_of_torch(by: str) -> None:
    data = source("wrapped", args={"by": by, "pad_id": 9, "unit": "nats per token"})
    batch = data.micro_batches(data.window(0), 0, 1)[0]
    padding = batch["input_ids"][batch["attention_mask"] == 0]
    assert padding.numel()
    assert set(padding.tolist()) == {9}
    assert data.unit == "nats per token"

    # A generator of its own is seeded for every sample: the same noise whenever one is read.
    noisy = source("wrapped", args={"by": by, "noise": True})
    once, again = (noisy.micro_batches(noisy.window(1), 0, 1)[0]["inputs"] for _ in range(2))
    assert torch.equal(once, again)


@pytest.mark.parametrize(
    ("how", "bit", "told"),
    [
        ("raises", UNREADABLE, "OSError: the disk is gone"),
        ("shape", UNREADABLE, "inputs has shape [1, 4, 5], that of the first sample [1, 4, 4]"),
        ("lacks", UNREADABLE, "it has no targets"),
        ("text", UNREADABLE, "targets is a str, which is no tensor, array or number"),
        ("nan", NON_FINITE_INPUT, "input nan at position [0, 0, 0]"),
        ("label", BAD_LABEL, "label 3, not in [0, 3)"),
    ],
)
def test_a_bad_sample_is_named(how: str, bit: int, told: str) -> None:
    data = source("broken", args={"how": how}, global_batch=36, micro_batch=4)
    window = data.window(0)
    if 7 not in _taken(data, window):  # held out
        pytest.fail("the bad sample is not among those that are trained on")
    found = [check_batch(batch, None, 3) for batch in data.micro_batches(window, 0, 1)]
    assert sum(found) == bit, "in one micro-batch"
    monitor = DataMonitor(data, None, "skip", classes=3)
    verdict = monitor.observe(_facts(bit))
    assert verdict.skip
    assert told in verdict.text
    assert verdict.evidence["count"] == 1
    (place,) = verdict.evidence["samples"]
    assert data._train.places(place) == 7
    if bit == UNREADABLE:
        assert verdict.code == "data.unreadable"
        assert place == 7 or "(number 7 of the data set)" in verdict.text


def _taken(data: DatasetBatches, window: Any) -> list[int]:
    return [data._train.places(int(place)) for place in window.samples]


def _facts(bad: int) -> StepFacts:
    return StepFacts(1, 0, 1.0, 1.0, 1e-3, 1.0, False, 0, 1, 1.0, bad_data=bad)


def test_a_collate_that_fails_names_the_sample() -> None:
    number = source("lists")._train.places(8)
    data = source("lists", args={"fails": number}, global_batch=36, micro_batch=36)
    (batch,) = data.micro_batches(data.window(0), 0, 1)
    (fault,) = name_faults(batch)
    assert fault.row is not None
    assert "it cannot be put together" in fault.text
    assert _taken(data, data.window(0))[fault.row] == number
    assert len(batch["inputs"]) == 36


def test_one_sample_of_a_flawed_batch_keeps_its_own_fault() -> None:
    data = source("broken", global_batch=36, micro_batch=36)
    (batch,) = data.micro_batches(data.window(0), 0, 1)
    assert isinstance(batch, Flawed)
    row = batch.faults[0].row
    assert row is not None
    assert check_batch(one_sample(batch, row)) == UNREADABLE
    assert check_batch(one_sample(batch, row - 1)) == 0
    assert not isinstance(harmless(batch), Flawed)


def test_samples_that_cannot_be_read_fail_before_the_first_step_if_asked() -> None:
    with pytest.raises(DataError, match="sample 0 of train: OSError: the disk is gone"):
        source("broken", args={"index": _first()}, bad="fail")
    assert source("broken", args={"index": _first()}).facts()["unreadable"]


def _first() -> int:
    return source("pairs")._train.places(0)


def test_augmentation_is_a_function_of_seed_sample_and_epoch() -> None:
    data, again = source("augmented", 36, 36), source("augmented", 36, 36)
    window = data.window(2)
    (batch,) = data.micro_batches(window, 0, 1)
    again.micro_batches(again.window(0), 0, 1)
    assert torch.equal(again.micro_batches(window, 0, 1)[0]["inputs"], batch["inputs"]), (
        "whatever was read before"
    )
    epochs = [_by_number(data, index) for index in (0, 1)]
    assert epochs[0].keys() == epochs[1].keys()
    assert all(not torch.equal(epochs[0][number], epochs[1][number]) for number in epochs[0])
    other = _by_number(source("augmented", 36, 36, seed=4), 0)
    assert all(not torch.equal(epochs[0][number], other[number]) for number in epochs[0])


def _by_number(data: DatasetBatches, index: int) -> dict[int, torch.Tensor]:
    window = data.window(index)
    (batch,) = data.micro_batches(window, 0, 1)
    return dict(zip(_taken(data, window), batch["inputs"], strict=True))


def test_reading_leaves_the_process_its_random_numbers() -> None:
    data = source("augmented")
    seed_everything(1)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    seed_everything(1)
    data.micro_batches(data.window(0), 0, 1)
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected


def test_a_generator_of_its_own_is_refused_unless_it_can_be_seeded() -> None:
    with pytest.raises(
        ConfigError, match="samples differ when they are read again: train 0"
    ) as caught:
        source("seeded", args={"tell": False})
    assert "set_seed(seed)" in str(caught.value)
    data = source("seeded", args={"tell": True})
    first, second = (data.micro_batches(data.window(1), 0, 1)[0]["inputs"] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("stream", "have no __len__ and no __getitem__"),
        ("streaming", r"have no __len__(.|\n)*streaming=False(.|\n)*data\.path=hf:NAME"),
        ("iterable", r"a Rows, are read from the beginning only(.|\n)*return list\(data\)"),
        ("loader", r"a DataLoader, have no __getitem__(.|\n)*return its data set"),
        ("frame", r"a DataFrame of pandas, have no samples by number(.|\n)*to_numpy\("),
        ("named_arrays", r"a dict, are of names(.|\n)*inputs, targets(.|\n)*TensorDataset"),
        ("listed_arrays", r"two arrays of one length, \[40, 8\] and \[40\]: inputs and labels\?"),
        ("three_splits", r"3 data sets(.|\n)*return a pair"),
        ("strings", r"\Adata.target .*: sample 0 cannot be read: text is a str.*\n.*\n.*\Z"),
        ("nothing", "its training data have no sample"),
        ("missing", 'no function "missing"'),
        ("arrays", r"two arrays of one length, \[40, 8\] and \[40\]: inputs and labels\?"),
        ("flat", r"collate made inputs \[3\] of 1 samples: the first dimension must count them"),
    ],
)
def test_what_is_no_data_set_is_refused(target: str, told: str) -> None:
    with pytest.raises((ConfigError, DataError), match=told):
        source(target)


def test_a_table_is_refused_whatever_its_columns_are_called() -> None:
    """By number it would give columns in place of rows, all of one length."""
    with pytest.raises(ConfigError, match="a DataFrame of pandas"):
        source("frame", args={"names": "numbers"})


def test_a_tuple_of_one_is_its_sample_and_one_of_three_is_refused() -> None:
    (batch,) = source("in_tuples", args={"tensors": 1}).micro_batches(Window(0, np.arange(4)), 0, 1)
    assert batch["inputs"].shape == (4, 3)
    with pytest.raises(DataError, match=r"a tuple of 3: which of them is what\?"):
        source("in_tuples", args={"tensors": 3})


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_samples_in_one_buffer_are_kept_apart(kind: str) -> None:
    data = source("one_buffer", args={"kind": kind}, global_batch=36, micro_batch=36)
    window = data.window(0)
    batches = data.micro_batches(window, 0, 1)
    assert numbers(batches) == _taken(data, window)
    assert batches[0]["targets"].tolist() == [number % 3 for number in _taken(data, window)]


def test_arrays_that_hide_their_values_are_refused() -> None:
    """Numbers of a palette and what lies under a mask would be trained on."""
    for kind, told in (("palette", r"convert\('RGB'\)"), ("masked", r"\.filled\(VALUE\)")):
        with pytest.raises(DataError, match=told):
            source("hidden", args={"kind": kind})
    assert source("hidden", args={"kind": "colours"}).facts()["fields"]["inputs"][1:] == [8, 8, 3]
    assert source("hidden", args={"kind": "unmasked"}).facts()["fields"]["inputs"][1:] == [8]


def test_a_validation_that_is_trained_on_is_told() -> None:
    told = "8 of the 8 samples to validate on that were looked at equal one to train on"
    for target in ("one_twice", "both", "with_validation", "pairs"):
        doubts = "".join(data_doubts(run_of(target), source(target).facts()))
        # All of `both`'s validation are the first of its training samples.
        assert (told in doubts) == (target == "one_twice")
        assert ("equal one to train on" in doubts) == (target in ("one_twice", "both"))


@pytest.mark.parametrize(("labels", "is_told"), [("labels", False), ("answer", True)])
def test_labels_that_are_padded_like_a_text_are_told(labels: str, is_told: bool) -> None:
    doubts = "".join(data_doubts(run_of("texts"), source("texts", args={"labels": labels}).facts()))
    told = "input_ids, answer: texts of different lengths are padded"
    assert (told in doubts) == is_told
    assert ("padded" in doubts) == is_told


def test_texts_that_are_equally_long_by_chance_may_differ() -> None:
    data = source("translations", global_batch=36, micro_batch=36)
    assert data._train.places(0) == 0, "the first sample is the one of equal lengths"
    (batch,) = data.micro_batches(data.window(0), 0, 1)
    assert not isinstance(batch, Flawed)
    for ids, translated, mask in zip(
        batch["inputs"], batch["targets"], batch["attention_mask"], strict=True
    ):
        number, length = int(ids[0]), int(mask.sum())
        assert length == 5 + number % 7
        expected = length if number == 0 else length + 1 + number % 3
        assert translated[translated != IGNORED].tolist() == [number] * expected


def test_a_text_unlike_its_labels_in_one_sample_is_named() -> None:
    data = source("translations", args={"alike": True, "odd": 19}, global_batch=36, micro_batch=36)
    (batch,) = data.micro_batches(data.window(0), 0, 1)
    assert isinstance(batch, Flawed)
    assert [fault.text.partition(" (")[0] for fault in batch.faults] == [
        "targets has 12 values, inputs has 10"
    ]


def test_too_few_to_hold_out_and_two_sources_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 samples are too few to hold out 0.1 of them"):
        source("pairs", args={"size": 3})
    with pytest.raises(ConfigError, match=r"data.path and data.target are both given"):
        load_config("tiny", ["data.path=here", "data.target=a.b:c"])
    with pytest.raises(ConfigError, match=r"data.target 'targets' is not of the form"):
        load_config("tiny", ["data.target=targets"])


def run_of(target: str, **args: Any) -> RunConfig:
    overrides = [
        f"data.target=tests.unit.data.targets:{target}",
        "train.global_batch=8",
        "train.micro_batch=4",
    ]
    return load_config(
        "tiny", [*overrides, *(f"data.args.{name}={value}" for name, value in args.items())]
    )


def test_a_run_goes_on_with_the_data_it_began_with_and_no_others(tmp_path: Path) -> None:
    began = open_dataset(run_of("pairs"), tmp_path)
    assert open_dataset(run_of("pairs"), tmp_path).fingerprint == began.fingerprint
    with pytest.raises(
        DataError, match="train_samples were 36, and are 45; val_samples were 4, and are 5"
    ):
        open_dataset(run_of("pairs", size=50), tmp_path)
    with pytest.raises(DataError, match=r"of \d+ samples looked at, train 0.* changed"):
        open_dataset(run_of("augmented"), tmp_path)
    (tmp_path / "data" / "target.json").write_text("{}")
    with pytest.raises(DataError, match=r"target.json: cannot be read"):
        open_dataset(run_of("pairs"), tmp_path)


def test_padded_samples_and_stand_ins_are_on_the_host_whatever_the_default_device() -> None:
    """A data set's own file may set torch's default device to a GPU. The meta device stands for it."""
    form = first_form({"inputs": [1, 2, 3], "targets": [1, 2, 3]}, None, 0, ())
    with torch.device("meta"):
        short = form.taken({"inputs": [4], "targets": [5]})
        batch = form.batch([form.stand_in(), short])
    devices = {name: values.device.type for name, values in batch.items()}
    assert devices == {"inputs": "cpu", "targets": "cpu", "attention_mask": "cpu"}
    assert batch["inputs"][1, 0] == 4
