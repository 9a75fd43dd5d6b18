"""Tensors of safetensors files that are read later: whole, or by rows, and never of another file than was found."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from harness.core import deferred
from harness.core.errors import ConfigError
from harness.models import stored
from harness.models.stored import read_later

STORED = {
    "weight": torch.arange(30000).view(100, 300).to(torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
}


def built(file: Path) -> Any:
    def make() -> nn.Module:
        model = nn.Module()
        for name, tensor in read_later([file]).items():
            model.register_buffer(name, tensor)
        return model

    return deferred.build(make, torch.device("cpu"))


def test_rows_are_read_when_they_are_needed(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file(STORED, file)
    at_once = read_later([file])
    assert all(torch.equal(at_once[name], STORED[name]) for name in STORED)

    model = built(file)
    recording: Any = deferred.recording_of(model)
    view = recording.view(model.weight)
    rows = recording.rows(view, 7, 9)
    assert torch.equal(rows, STORED["weight"][7:9])
    assert rows.untyped_storage().nbytes() == 2 * 300 * 2, "the rest of the file has no memory"
    assert torch.equal(recording.value(view), STORED["weight"])
    assert torch.equal(model.scalar, STORED["scalar"])
    assert model.empty.shape == (0, 3)


@pytest.mark.slow
def test_ranks_of_a_machine_know_that_they_read_the_same_file(tmp_path: Path) -> None:
    one, copy = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file(STORED, one)
    copy.write_bytes(one.read_bytes())
    places = [deferred.recording_of(built(file)).places for file in (one, one, copy)]  # type: ignore[union-attr]
    assert places[0] == places[1]
    assert places[0] != places[2]


@pytest.mark.parametrize("what", ["replaced", "touched", "gone", "while it is read"])
def test_a_file_that_changes_meanwhile_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.safetensors"
    save_file(STORED, file)
    model = built(file)
    recording: Any = deferred.recording_of(model)
    if what == "replaced":
        save_file({"weight": STORED["weight"] * 2}, tmp_path / "new")
        os.replace(tmp_path / "new", file)
    elif what == "touched":
        os.utime(file, ns=(1, 1))
    elif what == "while it is read":
        fill = stored._fill

        def fill_and_write(data: torch.Tensor, stream: FileIO) -> None:
            fill(data, stream)
            os.utime(file, ns=(1, 1))

        monkeypatch.setattr(stored, "_fill", fill_and_write)
    else:
        file.unlink()
    told = "cannot be read any more" if what == "gone" else "has changed since the start"
    with pytest.raises(ConfigError, match=told):
        recording.rows(recording.view(model.weight), 0, 5)
