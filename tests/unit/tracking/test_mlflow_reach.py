"""Whether an MLflow server answers."""

from __future__ import annotations

import socket

import pytest

from harness.tracking.reach import unanswered


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "http_proxy",
        "HTTP_PROXY",
        "https_proxy",
        "HTTPS_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)


def test_a_server_that_listens_is_no_finding() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert unanswered(f"http://127.0.0.1:{server.getsockname()[1]}") is None


def test_one_that_does_not_is_named_without_its_password() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    finding = unanswered(f"http://me:sEcr3t@127.0.0.1:{port}/path?token=sEcr3t")
    assert finding is not None
    assert finding.where == f"127.0.0.1:{port}"
    assert "sEcr3t" not in str(finding)


@pytest.mark.parametrize(
    "uri", ["sqlite:///mlflow.db", "databricks", "http://host:99999", "nosuch://host", ""]
)
def test_what_is_no_server_is_not_asked(uri: str) -> None:
    assert unanswered(uri) is None


@pytest.mark.parametrize("name", ["http_proxy", "ALL_PROXY"])
def test_behind_a_proxy_nothing_is_tried(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert unanswered("http://198.51.100.1:5000") is None
