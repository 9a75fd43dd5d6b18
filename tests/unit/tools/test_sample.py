"""What `harness sample` and `harness eval` take a text for: bytes, a tokenizer's ids, or nothing they could know."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.core.errors import ConfigError
from harness.core.files import write_json
from harness.data.tokenizer import Bytes
from harness.tools.sample import codec_of, of_bytes

ROWS = {"kind": "JSONL", "ids": 256, "tokenizer": "", "separator": 10}
IDS = {"kind": "tokens", "ids": 300, "tokenizer": "", "separator": None}


def run_of(folder: Path, *sources: dict[str, Any]) -> Any:
    """A run of one source, or of a mixture of several."""
    names = [str(number) for number in range(len(sources))] if len(sources) > 1 else ["."]
    for name, info in zip(names, sources, strict=True):
        (folder / "data" / name).mkdir(parents=True, exist_ok=True)
        write_json(folder / "data" / name / "corpus.json", info)
    if len(sources) > 1:
        write_json(folder / "data" / "corpus.json", {"format": 3, "mixture": []})
    data = SimpleNamespace(target=None, mixture=[None] * len(sources) if len(sources) > 1 else [])
    return SimpleNamespace(folder=folder, config=SimpleNamespace(data=data))


@pytest.mark.parametrize("sources", [(ROWS,), (ROWS, ROWS), ({"separator": "\n"},)])
def test_text_without_a_tokenizer_is_bytes(
    tmp_path: Path, sources: tuple[dict[str, Any], ...]
) -> None:
    codec, end = codec_of(run_of(tmp_path, *sources), None)
    assert isinstance(codec, Bytes)
    assert end is None
    assert of_bytes(run_of(tmp_path, *sources))


@pytest.mark.parametrize(
    "sources", [(IDS,), (IDS, IDS), (ROWS, IDS), (ROWS | {"tokenizer": "ab"},)]
)
def test_ids_of_which_nobody_said_whose_are_not_bytes(
    tmp_path: Path, sources: tuple[dict[str, Any], ...]
) -> None:
    with pytest.raises(ConfigError, match="nobody said what they mean"):
        codec_of(run_of(tmp_path, *sources), None)
