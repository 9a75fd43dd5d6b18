"""A model that cannot fit this machine is refused before its memory is gone; one that fits never is."""

from __future__ import annotations

import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.core import memory
from harness.core.config import ModelConfig
from harness.core.errors import ConfigError
from harness.models import build_model, gpt, room, vision

GIB = 2**30


@pytest.mark.parametrize("key", ["layers", "dim", "vocab", "ffn"])
def test_sizes_of_a_billion_are_refused_at_once_with_both_numbers(key: str) -> None:
    started = time.process_time()
    sizes: dict[str, Any] = {"dim": 64, "heads": 4, key: 10**9}
    with pytest.raises(
        ConfigError, match=rf"{key} 1000000000.*: needs .*iB or more .* this machine has .*iB"
    ):
        gpt.build(**sizes)
    assert time.process_time() - started < 60  # to build so many takes hours


def test_a_billion_modules_of_fake_tensors_are_refused_too_and_large_weights_are_not() -> None:
    with FakeTensorMode(), pytest.raises(ConfigError, match="10,000,000,006 Python modules"):
        gpt.build(layers=10**9)
    with FakeTensorMode(), pytest.raises(ConfigError, match=r"float32 parameters take .* PiB"):
        gpt.build(dim=10**9)
    with torch.device("meta"):
        assert gpt.build(vocab=10**9, layers=1).embed.weight.shape[0] == 10**9


@pytest.mark.parametrize(
    "options", [{"layers": 10**9}, {"dim": 10**9}, {"size": 2 * 10**9}, {"classes": 10**12}]
)
def test_image_classifiers_are_refused_too(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="to be built, and this machine has"):
        vision.vit(**options)


def test_a_convnet_of_a_billion_classes_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="to be built, and this machine has"):
        vision.convnet(classes=10**12)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied": True},
        {"qk_norm": True, "kv_heads": 2},
        {"dim": 64, "ffn": 48, "vocab": 100, "layers": 3},
    ],
)
def test_what_is_refused_is_what_would_be_built(options: dict[str, Any]) -> None:
    model = gpt.build(**options)
    built = sum(parameter.numel() for parameter in model.parameters()), len(list(model.modules()))
    assert gpt.size_of(model.settings) == built


def test_a_model_that_fills_all_memory_to_the_last_byte_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameters, modules = gpt.size_of(gpt.build().settings)
    needed = 4 * parameters + room._MODULE * modules
    monkeypatch.setattr(room, "all_memory", lambda: needed)
    gpt.build()
    monkeypatch.setattr(room, "all_memory", lambda: needed - 1)
    with pytest.raises(ConfigError, match="or more to be built"):
        gpt.build()
    monkeypatch.setattr(room, "all_memory", lambda: 0)  # not known
    gpt.build()


def test_the_bound_on_objects_is_under_what_python_alone_takes_for_them() -> None:
    tracemalloc.start()
    try:
        with torch.device("meta"):
            model = gpt.build(layers=50)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken > room._MODULE * len(list(model.modules()))


class Endless(nn.Module):
    """Grows until somebody stops it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(10**9):
            self.layers.append(nn.Linear(512, 512))


def test_a_model_of_ones_own_stops_when_next_to_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = iter([2 * GIB, GIB, 10 * 2**20])
    monkeypatch.setattr(room, "all_memory", lambda: 16 * GIB)
    monkeypatch.setattr(room, "free_memory", lambda swap: next(left))
    with pytest.raises(
        ConfigError, match=r"takes all memory.*10.0 MiB of 16.0 GiB(.|\n)*modules.*Parameters"
    ):
        build_model(ModelConfig(target=f"{__name__}:Endless"))
    nn.Linear(4096, 4096 * 2)  # nobody looks any more


def test_what_other_threads_build_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "all_memory", lambda: 16 * GIB)
    monkeypatch.setattr(room, "free_memory", lambda swap: 0)
    with room.watched("here"):
        other = threading.Thread(target=lambda: nn.Linear(4096, 4096 * 2))
        other.start()
        other.join()
        nn.Linear(2, 2)


def test_memory_of_a_machine_and_of_a_container_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(**files: str) -> None:
        for name, text in files.items():
            (tmp_path / name.replace("_", ".")).write_text(text)

    (tmp_path / "meminfo").write_text(
        "MemTotal: 1000 kB\nMemAvailable: 600 kB\nSwapTotal: 100 kB\nSwapFree: 50 kB\nHugePages_Total: 3\n"
    )
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    kib = 1024
    assert (memory.all_memory(), memory.free_memory(), memory.free_memory(swap=True)) == (
        1100 * kib,
        600 * kib,
        650 * kib,
    )
    write(memory_max="max\n", memory_current="5\n")
    assert memory.all_memory() == 1100 * kib
    write(
        memory_max=f"{400 * kib}\n",
        memory_current=f"{300 * kib}\n",
        memory_stat=f"inactive_file {20 * kib}\n",
    )
    assert (memory.all_memory(), memory.free_memory()) == (500 * kib, 120 * kib)
    (tmp_path / "memory.swap.max").write_text("0\n")
    (tmp_path / "memory.swap.current").write_text("0\n")
    assert (memory.all_memory(), memory.free_memory(swap=True)) == (400 * kib, 120 * kib)
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "nowhere")
    assert memory.all_memory() == 0
