"""A Hugging Face model that is built without memory: its weights stay in the folder until values are needed.

transformers loads a folder as ever, with its own code: it renames and merges what is stored, casts to float32, ties
head and embedding, and reports what is missing. Only the tensors that it is given have no memory (`models/stored.py`).
What it does to them is recorded (`core/deferred.py`), so the values are those of a whole load, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.core import deferred
from harness.models.stored import read_later, weight_files

# transformers loads tensors in other threads, unless this variable is set. Nothing is recorded there.
_IN_THIS_THREAD = "HF_DEACTIVATE_ASYNC_LOAD"


def from_pretrained_later(
    transformers: Any, path: Path, wanted: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any]]:
    """The model of the folder `path`, and what transformers says of its weights. Call it within `deferred.build`.

    wanted: keyword arguments of transformers' from_pretrained, the config among them.
    Raises deferred.CannotDeferError for a folder that only transformers itself can read.
    """
    config = wanted["config"]
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if why := _must_read_whole(kind, config, path):
        deferred.refuse(why)

    with _in_this_thread():
        state = read_later(path / name for name in weight_files(path))
        arguments = {key: value for key, value in wanted.items() if key != "trust_remote_code"}
        model, info = kind.from_pretrained(None, state_dict=state, **arguments)
    # It does not know the folder. peft names it in its own config.
    model.config.name_or_path = str(path)
    return model, info


def _must_read_whole(kind: Any, config: Any, path: Path) -> str:
    """Why transformers would read something else than the files of `_files`; empty if it would not."""
    if getattr(kind, "config_class", None) is not type(config):
        return f"{config.model_type} has several models, and transformers chooses among them"
    if getattr(config, "transformers_weights", None) or getattr(config, "extra_files", ()):
        return "config.json names files of weights"
    if (path / "adapter_config.json").is_file():
        return "the folder has adapters beside the weights"
    if any(path.glob("shard-*.safetensors")):
        return "the folder is a distributed checkpoint"
    return ""


@contextmanager
def _in_this_thread() -> Iterator[None]:
    before = os.environ.get(_IN_THIS_THREAD)
    os.environ[_IN_THIS_THREAD] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_IN_THIS_THREAD]
        else:
            os.environ[_IN_THIS_THREAD] = before
