"""What a proof asks of a machine, where the answers are missing, odd or late; and what it does when memory runs out."""

from __future__ import annotations

import sysconfig
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.proof import card, training
from benchmarks.proof.registry import Answer, Task
from harness.capability.probe import Device, MachineFacts
from harness.core.timing import in_turns

CPU = torch.device("cpu")
FIELDS = ("driver_version", "power.limit", "clocks.max.sm")
H100 = MachineFacts(
    torch_version="2.13.0",
    torch_cuda="13.0",
    cuda_available=True,
    devices=(Device("H", (9, 0), 1),),
)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A nvidia-smi that a test may write, the only program on PATH; torch reports a card's identity."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1234"))
    return tmp_path / "nvidia-smi"


def says(path: Path, script: str) -> None:
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)


def test_the_driver_s_tool_is_asked_about_the_card_that_torch_uses(smi: Path) -> None:
    says(
        smi,
        'case "$*" in *GPU-1234*) echo "580.65, 700.00, 1980";; *) echo "1, 2, 3"; echo "1, 2, 3";; esac',
    )
    assert card.nvidia_smi(FIELDS) == {
        "driver_version": "580.65",
        "power.limit": "700.00",
        "clocks.max.sm": "1980",
    }


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ('echo "580.65, [N/A], [Insufficient Permissions]"', {"driver_version": "580.65"}),
        ("echo 'Field \"clocks.max.sm\" is not a valid field to query.'; exit 2", {}),
        ('case "$*" in *GPU*) exit 6;; *) echo "580.65, 1, 2";; esac',
         {"driver_version": "580.65", "power.limit": "1", "clocks.max.sm": "2"}),
        ('echo "1, 2, 3"; echo "4, 5, 6"', {}),
        ("printf '\\377\\376'; exit 0", {}),
        ("exit 9", {}),
    ],
)  # fmt: skip
def test_what_it_does_not_tell_is_left_out(smi: Path, script: str, found: dict[str, str]) -> None:
    says(smi, script)
    assert card.nvidia_smi(FIELDS) == found


def test_without_it_nothing_is_known(smi: Path) -> None:
    assert card.nvidia_smi(FIELDS) == {}


def test_a_commit_is_told_or_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = card.source()
    assert len(here["sha256"]) == 64
    assert (here["commit"] is None) == bool(here["why"])
    monkeypatch.setattr(card, "ROOT", card.ROOT / "tests")
    inside = card.source()
    assert inside["commit"] is None
    assert inside["why"]
    assert inside["sha256"] != here["sha256"]
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    without = card.source()
    assert (without["commit"], without["changed"]) == (None, None)
    assert "git" in without["why"]
    assert without["sha256"] == here["sha256"]


def test_what_compiling_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "find_spec", lambda _: object())
    compiler = tmp_path / "cc"
    says(compiler, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert card.no_compiling(H100) == ""
    (tmp_path / "Python.h").unlink()
    assert "python3-dev" in card.no_compiling(H100)
    monkeypatch.setattr(card, "find_spec", lambda _: None)
    assert "triton" in card.no_compiling(H100)
    assert card.no_compiling(replace(H100, cuda_available=False)) == "", "a CPU needs neither"
    compiler.unlink()
    assert "C compiler" in card.no_compiling(H100)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (MachineFacts(torch_version="2.13.0+cpu"), "is a CPU build"),
        (
            MachineFacts(torch_version="2.13.0", torch_cuda="13.0", torch_error="error 802"),
            "error 802",
        ),
        (
            MachineFacts(torch_version="2.13.0", torch_cuda="13.0", cuda_visible_devices=""),
            "CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_why_there_is_no_card(facts: MachineFacts, why: str) -> None:
    assert why in card.no_card(facts)


def test_an_action_that_fails_takes_no_other_with_it() -> None:
    def fails() -> None:
        raise RuntimeError("no kernel for this card")

    times, reasons = in_turns(
        {"fails": fails, "works": lambda: None}, CPU, 1e-4, 5, time.monotonic() + 600
    )
    assert reasons == {"fails": "RuntimeError: no kernel for this card"}
    assert len(times["works"]) == 5
    assert (
        len(in_turns({"works": lambda: None}, CPU, 1e-4, 5, time.monotonic())[0]["works"]) == 1
    ), "at the deadline"


@pytest.mark.slow
def test_what_does_not_fit_is_tried_smaller_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    task = Task(rehearsal=False, deadline=time.monotonic() + 600, folder=tmp_path, keep=tmp_path)
    closed: list[str] = []

    def measure(stack: ExitStack, size: training.Size) -> Answer:
        (tmp_path / "fp8").mkdir()
        stack.callback(closed.append, size.name)
        if size is not training.SIZES[-1]:
            # The second is cuBLAS's, whose workspace is allocated at its first call.
            if size is training.SIZES[0]:
                raise torch.OutOfMemoryError("CUDA out of memory")
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
        return Answer("fits", {"size": size.name})

    answer = training.at_the_largest(task, training.SIZES, measure)
    names = [size.name for size in training.SIZES]
    assert answer.figures == {"size": names[-1], "too_large": names[:-1]}
    assert closed == names
    for folder in tmp_path.iterdir():
        folder.rmdir()
    with pytest.raises(torch.OutOfMemoryError):
        training.at_the_largest(task, training.SIZES[:1], measure)


@pytest.mark.parametrize(
    ("free", "largest"), [(79, 4096), (44, 2048), (22, 2048), (14, 1024), (2, 1024)]
)
def test_the_size_goes_by_the_memory_that_is_free(
    free: int, largest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * 2**30, 80 * 2**30))
    task = Task(rehearsal=False, deadline=0, folder=tmp_path, keep=tmp_path)
    assert training.sizes(task, 2.4)[0].args["dim"] == largest


@pytest.mark.parametrize(("free", "width"), [(78, 4096), (44, 2048), (14, 1024)])
def test_longer_steps_and_a_larger_vocabulary_fit_an_h100(
    free: int, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * 2**30, 80 * 2**30))
    task = Task(rehearsal=False, deadline=0, folder=tmp_path, keep=tmp_path)
    size = training.sizes(task, 2.4, training.LONG)[0]
    assert (size.args["dim"], size.samples, size.micro_batch) == (width, 4, 4)
    size = training.sizes(task, 2.2, training.VOCABULARY)[0]
    assert (size.args["dim"], size.args["vocab"]) == (width, 128_256)


@pytest.mark.slow
def test_longer_steps_and_a_larger_vocabulary_are_rehearsed(tmp_path: Path) -> None:
    for name, row in (("long", training.long_step), ("vocabulary", training.vocabulary)):
        folder = tmp_path / name
        folder.mkdir()
        deadline = time.monotonic() + 600
        answer = row(Task(rehearsal=True, deadline=deadline, folder=folder, keep=folder))
        assert not answer.failed
        figures = answer.figures
        assert figures["samples"] == (4 if name == "long" else 1)
        assert ("loss_chunk" in figures["model"]) == (name == "vocabulary")
        for contender in figures["contenders"].values():
            assert contender["ratio"]["median"] > 0
        assert figures["contenders"]["16 bit"]["rung"] == "autocast:bf16"


def test_sizes_count_the_parameters_of_the_model() -> None:
    from harness.models.gpt import build

    with torch.device("meta"):
        for size in (*training.SIZES, training.TOY, training.SMALL, training.VOCABULARY[2]):
            model = build(**size.args)  # pyright: ignore[reportArgumentType]
            assert sum(parameter.numel() for parameter in model.parameters()) == size.parameters
