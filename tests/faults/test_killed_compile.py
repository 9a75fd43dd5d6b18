"""A compile that was killed left half a library in torch's cache: the next run compiles it again and trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import events, metrics, train

pytestmark = [pytest.mark.nightly, pytest.mark.faults(7)]

HALF = 4096
"""Bytes: the dynamic linker maps the rest of such a file, and the kernel answers a read of it with SIGBUS."""


def test_a_library_that_was_left_half_written_is_compiled_again(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    common = ("--recipe", "fp32", "train.steps=2", "engine.compile=blocks")
    first = train(tmp_path, "--name", "first", *common, TORCHINDUCTOR_CACHE_DIR=str(cache))
    assert first.returncode == 0, first.stdout
    libraries = sorted(cache.glob("??/*.so"))
    assert libraries
    for path in libraries:
        path.write_bytes(path.read_bytes()[:HALF])

    again = train(tmp_path, "--name", "again", *common, TORCHINDUCTOR_CACHE_DIR=str(cache))
    assert again.returncode == 0, again.stdout
    (event,) = events(tmp_path / "runs" / "again", "compile.cache")
    assert str(libraries[0]) in event["text"]
    assert str(libraries[0]) in again.stdout
    assert metrics(tmp_path / "runs" / "again") == metrics(tmp_path / "runs" / "first")
