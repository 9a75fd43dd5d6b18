"""`engine.compile: blocks` through the command line: alone, on two ranks, refused, and given up for eager."""

from __future__ import annotations

import shutil
import socket
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.runs import BIN, ROOT, events, metrics, train

BLOCKS = "engine.compile=blocks"


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_what_cannot_be_compiled_is_refused_before_any_work(tmp_path: Path) -> None:
    """Of the reasons, the one that a machine without a GPU can have: no compiler to be found."""
    arguments = ("--recipe", "fp8_dynamic", "--name", "refused", BLOCKS)
    done = train(tmp_path, *arguments, PATH=str(tmp_path), CXX="no-such-compiler")
    assert done.returncode == 2, done.stdout
    assert "no C++ compiler" in done.stdout
    assert "engine.compile=none" in done.stdout
    assert not (tmp_path / "runs" / "refused" / "journal.jsonl").exists()


@pytest.mark.parametrize(
    "recipe",
    ["fp8_dynamic", "fp8_block"],
)
@pytest.mark.nightly
def test_the_torchao_rung_trains_alike_eager_and_compiled(tmp_path: Path, recipe: str) -> None:
    """Scales of tensors and of rows; statistics are sampled at the first of these steps and not at the others."""
    found = {}
    for name, more in {"eager": [], "compiled": [BLOCKS]}.items():
        done = train(tmp_path, "--recipe", recipe, "--name", name, "train.steps=6", *more)
        assert done.returncode == 0, done.stdout
        run = tmp_path / "runs" / name
        found[name] = [loss for _, loss in metrics(run)]
        assert events(run, "compile.eager") == []
    assert len(found["eager"]) == 6
    assert found["compiled"] == pytest.approx(found["eager"], rel=0.01)


@pytest.mark.nightly
def test_it_trains_alike_eager_compiled_and_on_two_ranks(tmp_path: Path) -> None:
    launchers = {
        "torchrun": [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--master-port",
            free_port(),
        ],
        "deepspeed": [
            str(BIN / "deepspeed"),
            "--num_accelerators",
            "2",
            "--master_port",
            free_port(),
        ],
    }
    found = {}
    for name, launcher in {
        "eager": [sys.executable],
        "alone": [sys.executable],
        **launchers,
    }.items():
        compiled = [] if name == "eager" else [BLOCKS]
        done = train(
            tmp_path, "--recipe", "fp8_hybrid", "--name", name, *compiled, launcher=launcher
        )
        assert done.returncode == 0, done.stdout
        run = tmp_path / "runs" / name
        found[name] = [loss for _, loss in metrics(run)]
        assert events(run, "compile.eager") == []
    for name, losses in found.items():
        assert losses == pytest.approx(found["eager"], rel=0.01), name


def compiled_run(folder: Path, module: str, function: str, steps: int) -> Path:
    """The folder of a finished run with compiled blocks, of a model in a file beside this one."""
    shutil.copy(ROOT / "tests" / "e2e" / f"{module}.py", folder)
    config = yaml.safe_load((ROOT / "configs" / "tiny.yaml").read_text())
    config["model"] = {"target": f"{module}:{function}"}
    (folder / "own.yaml").write_text(yaml.safe_dump(config))
    arguments = ("--config", "own.yaml", "--name", "own", f"train.steps={steps}", BLOCKS)
    done = train(folder, *arguments, PYTHONPATH=str(folder))
    assert done.returncode == 0, done.stdout
    return folder / "runs" / "own"


@pytest.mark.nightly
def test_a_later_run_takes_what_an_earlier_one_compiled(tmp_path: Path) -> None:
    """Its compiler writes no file of its own, and the losses are the same."""
    cache = tmp_path / "cache"
    kept: list[set[Path]] = []
    losses: list[list[float]] = []
    for name in ("earlier", "later"):
        arguments = ("--recipe", "fp8_hybrid", "--name", name, "train.steps=3", BLOCKS)
        done = train(tmp_path, *arguments, TORCHINDUCTOR_CACHE_DIR=str(cache))
        assert done.returncode == 0, done.stdout
        assert f"its code is kept in {cache}" in " ".join(done.stdout.split())
        kept.append({path for path in cache.rglob("*") if path.is_file()})
        losses.append([loss for _, loss in metrics(tmp_path / "runs" / name)])
    assert any(path.suffix == ".so" for path in kept[0])
    assert kept[1] == kept[0]
    assert losses[1] == losses[0]


@pytest.mark.slow
def test_a_fall_back_to_eager_is_one_event(tmp_path: Path) -> None:
    run = compiled_run(tmp_path, "restless_model", "restless", 6)
    told = events(run, "compile.eager")
    assert len(told) == 1
    assert "recompile_limit (2)" in told[0]["text"]
    assert "restless_model.py" in told[0]["text"]
    assert len(metrics(run)) == 6


@pytest.mark.slow
def test_blocks_that_are_called_by_a_method_are_named(tmp_path: Path) -> None:
    """The plan says that blocks are compiled, and torch compiles nothing of these."""
    run = compiled_run(tmp_path, "aside_model", "Aside", 3)
    (told,) = events(run, "compile.eager")
    assert told["step"] == 1
    assert told["text"].startswith("blocks.0 and 1 more: not called as a module")
