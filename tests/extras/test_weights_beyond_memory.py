"""A weight file that cannot be mapped into memory is refused by name."""

from __future__ import annotations

import json
import resource
import struct
from pathlib import Path

import pytest

from harness.core.errors import ConfigError
from harness.models.huggingface import build


def test_a_file_that_the_address_space_has_no_room_for(tmp_path: Path) -> None:
    # A hole of 1 TiB, under a limit of 64 GiB: more than this process has, and less than the file.
    size = 1 << 40
    entry = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    header = json.dumps({"weight": entry}).encode()
    file = tmp_path / "model.safetensors"
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(header)) + header)
        opened.truncate(8 + len(header) + size)

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))

    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 36, before[1]))
    try:
        with pytest.raises(ConfigError) as refused:
            build(str(tmp_path), {})
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert f"{file}: cannot be mapped into memory" in str(refused.value)
    assert "ulimit -v" in str(refused.value)
