"""What the launchers' environments mean."""

from __future__ import annotations

import os
import socket

import pytest
import torch

from harness.core.errors import ConfigError
from harness.engines.process_group import (
    Launch,
    ProcessGroup,
    choose_device,
    join,
    leave,
    read_launch,
)

ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_no_launcher() -> None:
    assert read_launch({}) == Launch(0, 1, 0, 1, launched=False)


def test_torchrun_and_deepspeed() -> None:
    common = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **ADDRESS}
    expected = Launch(3, 4, 1, 2, launched=True)
    assert read_launch({**common, "LOCAL_WORLD_SIZE": "2"}) == expected
    assert read_launch({**common, "LOCAL_SIZE": "2"}) == expected
    assert read_launch(common).local_world_size == 4
    assert not read_launch(common).one_machine, "the launcher does not say"
    assert read_launch({**common, "LOCAL_WORLD_SIZE": "4"}).one_machine


def test_every_problem_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        read_launch({"RANK": "one", "WORLD_SIZE": "2", "MASTER_ADDR": "here"})
    text = str(caught.value)
    assert all(
        part in text
        for part in ("RANK is 'one'", "LOCAL_RANK is missing", "MASTER_PORT is missing")
    )
    with pytest.raises(ConfigError, match="RANK 2 is not below WORLD_SIZE 2"):
        read_launch({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **ADDRESS})


NO_NUMBERS = {
    "RANK": [
        "9" * 5000,
        "-1",
        "1e3",
        " 1",
        "1 ",
        "+1",
        "1_0",
        "0x1",
        "\u0663",
        "\u00b2",
        "1.0",
        "1\n",
        "",
    ],
    "WORLD_SIZE": ["9" * 5000, "0", "-2", "\u0662", "2.0", str(10**6 + 1)],
    "LOCAL_RANK": ["9" * 5000, "-1", "none", "\u0661"],
    "LOCAL_WORLD_SIZE": ["9" * 5000, "0", "two"],
    "LOCAL_SIZE": ["9" * 5000, "0", "two"],
    "MASTER_PORT": ["9" * 5000, "0", "-1", "70000", "29500 ", "http", "\u0669\u0669"],
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in NO_NUMBERS.items() for text in texts]
)
def test_variables_that_are_no_numbers_are_named(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_launch({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **ADDRESS, name: text})
    (problem,) = caught.value.problems
    assert problem.what.startswith(f"{name} is ")
    assert len(problem.what) < 150, "a long one is clipped"


@pytest.mark.parametrize("size", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
def test_a_local_rank_that_its_machine_does_not_have_is_named(size: str) -> None:
    with pytest.raises(ConfigError, match=f"LOCAL_RANK 2 is not below {size} 2"):
        read_launch({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", size: "2", **ADDRESS})


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for the CPU choice")
def test_without_a_gpu_the_device_is_the_cpu() -> None:
    assert choose_device(Launch(local_rank=5)) == torch.device("cpu")


@pytest.mark.parametrize(("one_machine", "interface"), [(True, "lo"), (False, None)])
def test_on_one_machine_gloo_listens_on_loopback(
    one_machine: bool, interface: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """test_listening looks at the sockets; where a machine's name leads to loopback, they would be there anyway."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "set here so that it is put back")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "WORLD_SIZE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    join(Launch(launched=True, one_machine=one_machine), torch.device("cpu"), 60.0)
    try:
        assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
    finally:
        leave()


def test_alone_collectives_return_their_argument() -> None:
    join(Launch(), torch.device("cpu"), 1.0)
    group = ProcessGroup(torch.device("cpu"))
    values = torch.tensor([1.0, float("inf")])
    assert (group.rank, group.world_size) == (0, 1)
    assert torch.equal(group.mean(values), values)
    assert torch.equal(group.max(values), values)
    assert group.broadcast({"step": 3}) == {"step": 3}
    group.barrier()
    leave()
    leave()
