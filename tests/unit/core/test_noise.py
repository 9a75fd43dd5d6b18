"""Of what libraries log on import, only that is left out which nobody can act upon."""

from __future__ import annotations

import logging

import pytest
import torch

import harness


@pytest.mark.parametrize(
    ("logger", "text", "heard"),
    [
        ("torchao", "Failed to load /x/_C_mxfp8.so: no such library", "with CUDA"),
        ("torchao", "torchao needs another torch", "always"),
        ("torch.utils._pytree", "%s is an Enum subclass and is now natively supported", "never"),
        ("torch.utils._pytree", "a leaf that is none", "always"),
    ],
)
@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_only_noise_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    logger: str,
    text: str,
    heard: str,
    cuda: str | None,
) -> None:
    assert harness.__all__
    monkeypatch.setattr(torch.version, "cuda", cuda)
    logging.getLogger(logger).warning(text, *(["X"] if "%" in text else []))
    assert bool(caplog.records) == (
        heard == "always" or (heard == "with CUDA" and cuda is not None)
    )
