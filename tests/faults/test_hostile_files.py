"""Files that somebody else wrote: configs, recipes, overrides, DeepSpeed JSON, names. Row 24 of the fault matrix."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile import JSON, SCREEN, SECONDS, YAML, Trap

from harness.core.config import load_config, parse_overrides
from harness.core.errors import ConfigError
from harness.core.schema import read_yaml
from harness.engines.deepspeed_setup import build_config
from harness.precision.recipe import load_recipe
from harness.run_folder import choose_folder

pytestmark = pytest.mark.faults(24)

READERS: dict[str, Callable[[Path], object]] = {
    "config": lambda path: load_config(str(path)),
    "recipe": lambda path: load_recipe(str(path)),
}


def refused(path: Path, read: Callable[[Path], object]) -> str:
    """What `read` finds wrong with `path`: on one screen, soon, with the path and a fix."""
    begin = time.process_time()
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert time.process_time() - begin < SECONDS
    text = str(caught.value)
    assert str(path) in text
    assert len(text.splitlines()) <= SCREEN
    assert len(text) < 200 * SCREEN
    assert all(problem.fix for problem in caught.value.problems)
    text.encode()
    assert "\x1b" not in text
    return " ".join(problem.what for problem in caught.value.problems)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", YAML)
def test_hostile_yaml_is_refused_and_never_executed(tmp_path: Path, kind: str, reader: str) -> None:
    content, expected = YAML[kind]
    path = tmp_path / "given.yaml"
    path.write_bytes(content.replace(b"CANARY", str(tmp_path / "canary").encode()))
    assert expected in refused(path, READERS[reader])
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("reader", READERS)
def test_a_pickle_in_place_of_yaml_stays_asleep(tmp_path: Path, reader: str) -> None:
    trap = pickle.dumps(Trap(tmp_path / "canary"), protocol=0)
    (tmp_path / "given.yaml").write_bytes(trap)
    refused(tmp_path / "given.yaml", READERS[reader])
    assert not (tmp_path / "canary").exists()
    pickle.loads(trap)
    assert (tmp_path / "canary").exists(), "the trap works"


def test_the_constructors_that_are_refused_would_have_run(tmp_path: Path) -> None:
    import yaml

    content = YAML["apply"][0].replace(b"CANARY", str(tmp_path / "canary").encode())
    yaml.load(content, Loader=yaml.UnsafeLoader)
    assert (tmp_path / "canary").exists(), "the trap works"


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "socket", "sparse"])
def test_what_is_no_file_of_a_sane_size_is_refused_without_waiting(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "given.yaml"
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(path.name)
    else:
        with path.open("wb") as stream:
            stream.truncate(1 << 40)
    said = "is larger than" if kind == "sparse" else "is not a regular file"
    assert said in refused(path, read_yaml)
    for read in READERS.values():
        refused(path, read)


def test_a_byte_order_mark_and_a_link_named_by_the_user_are_fine(tmp_path: Path) -> None:
    (tmp_path / "there.yaml").write_bytes(b"\xef\xbb\xbftrain: {steps: 3}\n")
    (tmp_path / "link.yaml").symlink_to(tmp_path / "there.yaml")
    assert load_config(str(tmp_path / "link.yaml")).train.steps == 3


@pytest.mark.parametrize("kind", YAML)
def test_hostile_overrides_are_refused_with_their_key(tmp_path: Path, kind: str) -> None:
    content = YAML[kind][0].decode("utf-8", "surrogateescape").removeprefix("train: ")
    with pytest.raises(ConfigError) as caught:
        load_config("tiny", [f"data={content.replace('CANARY', str(tmp_path / 'canary'))}"])
    assert "data" in caught.value.problems[0].where
    assert len(str(caught.value).splitlines()) <= SCREEN
    assert not (tmp_path / "canary").exists()
    with pytest.raises(ConfigError, match="not an override"):
        parse_overrides([f"__class__.{'x' * 100}[0]=1"])


def deepspeed(path: Path) -> object:
    return build_config(
        zero_stage=1, micro_batch=2, accumulation=1, max_grad_norm=1.0, precision="bf16", tested_optimizer=True,
        user=str(path),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [*JSON, "pipe", "pickle", "unknown home"])
def test_hostile_deepspeed_json_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "given.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "unknown home":
        path = Path("~nobody-has-this-name/given.json")
    else:
        path.write_bytes(JSON[kind] if kind in JSON else pickle.dumps(Trap(tmp_path / "canary")))
    refused(path, deepspeed)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "/tmp/x",
        ".hidden",
        "a\0b",
        "a\nb",
        "\x1b[2J",
        "\udcff",
        "a" * 300,
        "*",
        "~",
        "~root",
        "--help",
        "-",
        "a?",
        "a[1]",
        "$HOME",
        "`id`",
        "a;b",
        "a&",
        "a|b",
        "'a'",
        "{a,b}",
        "a\\b",
    ],
)
def test_a_run_name_leads_nowhere_else_and_means_nothing_else(name: str) -> None:
    with pytest.raises(ConfigError, match="no folder name"):
        choose_folder("tiny", "fp32", name, "auto", 1)


@pytest.mark.parametrize(
    "name", ["a" * 5000 + ".yaml", "~nobody-has-this-name/x.yaml", "x" * 5000, "../" * 2000]
)
def test_impossible_paths_are_refused_by_name(name: str) -> None:
    for read in READERS.values():
        with pytest.raises(ConfigError, match=r"no such file|no config|no recipe"):
            read(name)  # pyright: ignore[reportArgumentType]
