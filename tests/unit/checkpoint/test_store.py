"""The store: what is saved comes back bit for bit, and what was damaged in any way does not come back at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.checkpoint import manifest
from harness.checkpoint.store import Store
from harness.core.errors import CheckpointError, MisuseError
from tests.support.matrix import rest_slow

META: dict[str, Any] = {
    "step": 3,
    "parts": {"model": {}, "data": {"nested": [1, 2.5, None, "é"]}},
    "rng": 2**64 + 1,
}


def state(seed: int = 0) -> dict[str, dict[str, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(8, 16, generator=random)
    return {
        "model": {
            "head.weight": weight,
            "embed.weight": weight,
            "turned": weight.T,
            "row": weight[3],
            "empty": weight[:0],
        },
        "optimizer": {
            "step": torch.tensor(7.0),
            "moments": torch.randn(3, 5, generator=random).double(),
        },
        "fp8": {
            "history": torch.rand(4, 6, generator=random).to(torch.float8_e4m3fn),
            "scale": torch.rand(6, generator=random).bfloat16(),
            "special": torch.tensor([float("nan"), float("inf"), -0.0]),
        },
        "rng": {"torch": torch.get_rng_state()},
        "none": {},
    }


def saved(root: Path, *steps: int) -> Store:
    store = Store(root, {"torch": "2"})
    for step in steps:
        store.save(step, state(step), {**META, "step": step})
    return store


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def bits(tensor: Tensor) -> list[int]:
    return tensor.reshape(-1).contiguous().view(torch.uint8).tolist() if tensor.numel() else []


def assert_same(store: Store, step: int) -> None:
    tensors, meta = store.load(step)
    expected = {part: named for part, named in state(step).items() if named}
    expected["rng"] = tensors["rng"]
    assert meta == {**META, "step": step}
    assert tensors.keys() == expected.keys()
    for part, named in expected.items():
        assert tensors[part].keys() == named.keys()
        for name, tensor in named.items():
            assert tensors[part][name].dtype == tensor.dtype
            assert tensors[part][name].shape == tensor.shape
            assert bits(tensors[part][name]) == bits(tensor)


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints", {"torch": "2.13"})
    path = store.save(3, state(3), META)
    assert path == tmp_path / "checkpoints" / "step-00000003"
    assert names(path) == [
        "fp8.safetensors",
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "rng.safetensors",
        "state.json",
    ]
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert (manifest["format"], manifest["step"], manifest["versions"]) == (1, 3, {"torch": "2.13"})
    assert manifest["files"]["state.json"]["bytes"] == (path / "state.json").stat().st_size
    assert len({(path / name).stat().st_mode for name in names(path)}) == 1
    assert_same(Store(tmp_path / "checkpoints"), 3)


def test_saving_leaves_the_tensors_as_they_were(tmp_path: Path) -> None:
    tensors = state()
    shared = tensors["model"]["head.weight"].untyped_storage().data_ptr()
    Store(tmp_path).save(1, tensors, {})
    assert tensors["model"]["embed.weight"].untyped_storage().data_ptr() == shared
    assert not tensors["model"]["turned"].is_contiguous()


def test_steps_are_listed_oldest_first_and_only_committed_ones(tmp_path: Path) -> None:
    store = saved(tmp_path, 20, 3, 100_000_000)
    (tmp_path / ".tmp-step-00000040").mkdir()
    (tmp_path / "step-000000003").mkdir()
    (tmp_path / "step-5").mkdir()
    assert store.steps() == [3, 20, 100_000_000]
    assert store.newest_valid() == 100_000_000
    assert Store(tmp_path / "not" / "there", readonly=True).steps() == []


def test_saving_a_whole_step_again_changes_nothing(tmp_path: Path) -> None:
    store = saved(tmp_path, 3)
    before = (tmp_path / "step-00000003" / "manifest.json").stat().st_mtime_ns
    store.save(3, state(99), {})
    assert (tmp_path / "step-00000003" / "manifest.json").stat().st_mtime_ns == before
    assert_same(store, 3)


def test_saving_a_damaged_step_again_quarantines_it(tmp_path: Path) -> None:
    store = saved(tmp_path, 3)
    for number in (1, 2):
        (tmp_path / "step-00000003" / "model.safetensors").unlink()
        store.save(3, state(3), {**META, "step": 3})
        assert_same(store, 3)
        assert f"quarantine-step-00000003-{number}" in names(tmp_path)
    assert len(store.quarantined) == 2


FILES = [
    "manifest.json",
    "state.json",
    "model.safetensors",
    "optimizer.safetensors",
    "fp8.safetensors",
    "rng.safetensors",
]


@pytest.mark.parametrize("name", rest_slow(FILES, "manifest.json", "fp8.safetensors"))
def test_every_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    """Every byte of each file, up to 600 spread over it and each with another bit: 0 may pass."""
    store = saved(tmp_path, 3)
    path = tmp_path / "step-00000003" / name
    data = path.read_bytes()
    places = sorted({number * len(data) // 600 for number in range(600)} | {0, len(data) - 1})
    missed = []
    for count, place in enumerate(places):
        damaged = bytearray(data)
        damaged[place] ^= 1 << (count % 8)
        path.write_bytes(damaged)
        problems = store.verify(3)
        if name not in {Path(problem.where).name for problem in problems}:
            missed.append(place)
    assert missed == []
    with pytest.raises(CheckpointError, match=name):
        store.load(3)
    path.write_bytes(data)
    assert_same(store, 3)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["empty", "short", "longer", "missing", "link", "folder"])
def test_every_damaged_file_is_found_and_the_one_before_is_used(
    tmp_path: Path, name: str, damage: str
) -> None:
    store = saved(tmp_path, 3, 6)
    path = tmp_path / "step-00000006" / name
    data = path.read_bytes()
    path.unlink()
    if damage == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "folder":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes({"empty": b"", "short": data[:-1], "longer": data + b"\n"}[damage])
    (problem,) = store.verify(6)
    assert Path(problem.where).name == name
    assert problem.fix
    assert store.newest_valid() == 3
    assert_same(store, 3)
    assert [step for step in names(tmp_path) if "step" in step] == [
        "step-00000003",
        "step-00000006",
    ], "nothing moves"
    assert (store.damaged, store.quarantined) == ({6: [problem]}, [])
    store.set_aside()
    assert [step for step in names(tmp_path) if "step" in step] == [
        "quarantine-step-00000006-1",
        "step-00000003",
    ]
    assert (store.damaged, store.quarantined) == ({}, [problem])
    assert store.newest_valid() == 3


def test_a_file_that_was_not_written_by_the_save_is_found(tmp_path: Path) -> None:
    store = saved(tmp_path, 3)
    (tmp_path / "step-00000003" / "extra.pkl").write_bytes(b"")
    assert "not in the manifest" in store.verify(3)[0].what


def test_a_checkpoint_of_another_step_or_behind_a_link_is_refused(tmp_path: Path) -> None:
    store = saved(tmp_path, 3)
    shutil.copytree(store.path(3), store.path(8))
    store.path(9).symlink_to(store.path(3))
    assert "of step 3" in store.verify(8)[0].what
    assert "link" in store.verify(9)[0].what
    assert store.newest_valid() == 3


@pytest.mark.parametrize(
    ("tensors", "meta", "why"),
    [
        ({"../model": {"a": torch.zeros(1)}}, {}, "part name"),
        ({"model": {"a": torch.zeros(1)}}, {"loss": float("nan")}, "JSON"),
        ({"model": {"a": torch.zeros(1)}}, {"path": Path()}, "JSON"),
    ],
)
def test_what_cannot_be_written_as_data_is_refused(
    tmp_path: Path, tensors: Any, meta: Any, why: str
) -> None:
    store = saved(tmp_path, 3)
    with pytest.raises(CheckpointError, match=why):
        store.save(6, tensors, meta)
    assert names(tmp_path) == ["step-00000003"]


def test_a_rollback_keeps_newer_checkpoints_aside(tmp_path: Path) -> None:
    store = saved(tmp_path, 3, 6, 9)
    store.discard_after(3)
    assert store.steps() == [3]
    saved(tmp_path, 6)
    store.discard_after(3)
    assert names(tmp_path) == [
        "rolledback-step-00000006-1",
        "rolledback-step-00000006-2",
        "rolledback-step-00000009-1",
        "step-00000003",
    ]


def test_opening_removes_what_a_dead_save_left(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    (tmp_path / ".tmp-step-00000006").mkdir()
    (tmp_path / ".tmp-step-00000006" / "model.safetensors").write_bytes(b"half")
    Store(tmp_path, readonly=True)
    assert ".tmp-step-00000006" in names(tmp_path)
    assert Store(tmp_path).steps() == [3]
    assert names(tmp_path) == ["step-00000003"]


def test_a_store_opened_to_read_changes_nothing(tmp_path: Path) -> None:
    saved(tmp_path, 3, 6)
    (tmp_path / "step-00000006" / "state.json").write_bytes(b"{}")
    store = Store(tmp_path, readonly=True)
    assert store.newest_valid() == 3
    writes = (
        lambda: store.save(9, {}, {}),
        lambda: store.discard_after(3),
        lambda: store.remove(3),
        store.set_aside,
    )
    for change in writes:
        with pytest.raises(MisuseError):
            change()
    assert names(tmp_path) == ["step-00000003", "step-00000006"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="checkpoints"):
        Store(tmp_path / "checkpoints")


def test_a_folder_that_is_deleted_meanwhile_is_made_again_and_that_is_told(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    store = saved(root, 3)
    writes = (lambda: store.save(6, state(6), {**META, "step": 6}), lambda: store.discard_after(3))
    for write in writes:
        shutil.rmtree(root)
        with pytest.raises(CheckpointError, match="it is made again"):
            write()
        write()
    store.save(6, state(6), {**META, "step": 6})
    assert_same(store, 6)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").symlink_to(tmp_path / "away")
    with pytest.raises(CheckpointError, match="No such file"):
        writes[0]()
    assert not (tmp_path / "away").exists()


def test_with_nothing_valid_there_is_nothing_to_load(tmp_path: Path) -> None:
    store = saved(tmp_path, 3, 6)
    for step in (3, 6):
        (store.path(step) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="not one of its checkpoints is whole") as caught:
        store.newest_valid()
    assert len(caught.value.problems) == 3
    assert (store.quarantined, names(tmp_path)) == ([], ["step-00000003", "step-00000006"])
    with pytest.raises(CheckpointError):
        store.load(3)


def age(store: Store, step: int) -> None:
    """As if the checkpoint had been written a minute ago."""
    for path in store.path(step).iterdir():
        os.utime(path, times=(path.stat().st_mtime - 60, path.stat().st_mtime - 60))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read from the first byte to the last, in order."""
    read: list[str] = []
    whole = manifest.file_entry
    monkeypatch.setattr(
        manifest, "file_entry", lambda path: (read.append(path.name), whole(path))[1]
    )
    return read


def test_a_resume_hashes_every_file_once(tmp_path: Path, hashed: list[str]) -> None:
    age(saved(tmp_path, 3), 3)
    store = Store(tmp_path)
    assert store.newest_valid() == 3
    assert_same(store, 3)
    assert sorted(hashed) == sorted(set(names(store.path(3))) - {"manifest.json"})


def test_one_so_new_that_its_times_may_tell_too_little_is_read_again(
    tmp_path: Path, hashed: list[str]
) -> None:
    store = saved(tmp_path, 3)
    for path in store.path(
        3
    ).iterdir():  # of the future, so that no pause of this test makes it old
        os.utime(path, times=(path.stat().st_mtime + 3600, path.stat().st_mtime + 3600))
    assert store.newest_valid() == 3
    assert_same(store, 3)
    assert sorted(hashed) == sorted(2 * [*(set(names(store.path(3))) - {"manifest.json"})])


def test_what_changed_since_it_verified_is_not_loaded(tmp_path: Path) -> None:
    store = saved(tmp_path, 3)
    age(store, 3)
    assert store.newest_valid() == 3
    path = store.path(3) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="SHA-256"):
        store.load(3)
