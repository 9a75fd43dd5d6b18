"""Manifests that were forged rather than damaged: right seals around what no save would write."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from harness.checkpoint.manifest import manifest_bytes
from harness.checkpoint.store import Store
from harness.core.errors import CheckpointError
from harness.core.files import dump_json


def saved(root: Path) -> Store:
    store = Store(root)
    store.save(3, {"model": {"weight": torch.ones(4)}}, {"step": 3})
    return store


def forge(folder: Path, files: object, step: object = 3) -> None:
    """A manifest with a right seal of its own, around whatever content."""
    (folder / "manifest.json").write_bytes(manifest_bytes(step, files, {}))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "name", ["../../outside", "/etc/passwd", "..", "sub/x.safetensors", "", ".hidden"]
)
def test_a_forged_manifest_cannot_reach_out_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    store = saved(tmp_path / "in")
    (tmp_path / "outside").write_bytes(b"")
    entries = json.loads((store.path(3) / "manifest.json").read_bytes())["files"]
    forge(store.path(3), {**entries, name: {"bytes": 0, "sha256": "0" * 64}})
    assert "not plain files" in store.verify(3)[0].what


@pytest.mark.parametrize(
    "files", [None, [], {}, {"state.json": None}, {"state.json": {"bytes": "9"}}]
)
def test_a_forged_manifest_of_another_shape_is_refused(tmp_path: Path, files: object) -> None:
    store = saved(tmp_path)
    forge(store.path(3), files)
    assert store.verify(3)
    with pytest.raises(CheckpointError):
        store.load(3)


def test_a_header_larger_than_its_file_is_refused_even_when_the_hash_fits(tmp_path: Path) -> None:
    store = saved(tmp_path)
    entries = json.loads((store.path(3) / "manifest.json").read_bytes())["files"]
    bomb = (1 << 60).to_bytes(8, "little") + b"{}"
    (store.path(3) / "model.safetensors").write_bytes(bomb)
    entries["model.safetensors"] = {"bytes": len(bomb), "sha256": hashlib.sha256(bomb).hexdigest()}
    forge(store.path(3), entries)
    assert "header" in store.verify(3)[0].what


def test_a_manifest_of_another_format_is_named(tmp_path: Path) -> None:
    store = saved(tmp_path)
    content = json.loads((store.path(3) / "manifest.json").read_bytes())
    del content["sha256"]
    content["format"] = 2
    seal = hashlib.sha256(dump_json(content)).hexdigest()
    (store.path(3) / "manifest.json").write_bytes(dump_json({**content, "sha256": seal}))
    assert "format 2" in store.verify(3)[0].what
