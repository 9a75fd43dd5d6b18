"""Chromium without a head, driven over its DevTools protocol: enough to open a page, ask it and photograph it."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")


def binary() -> str | None:
    """Where the browser is; None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of a running Chromium."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self._session, self._socket = self._loop.run_until_complete(self._connect())
        for domain in ("Page", "Runtime"):
            self.call(f"{domain}.enable")

    async def _connect(self) -> tuple[aiohttp.ClientSession, aiohttp.ClientWebSocketResponse]:
        session = aiohttp.ClientSession()
        async with session.get(f"{self._endpoint}/json") as answer:
            pages = [each for each in await answer.json() if each["type"] == "page"]
        return session, await session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, parameters), 60.0))

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        number = self._number
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            answer = json.loads((await self._socket.receive()).data)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def ask(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, address: str) -> None:
        """Go there, without waiting."""
        self.call("Page.navigate", url=address)

    def wait(self, script: str, seconds: float = 120.0) -> float:
        """Wait until a JavaScript expression is true; the seconds it took."""
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            with suppress(AssertionError):  # a page that is just being replaced
                if self.ask(f"Boolean({script})"):
                    return time.monotonic() - begun
            time.sleep(0.05)
        raise AssertionError(f"in vain after {seconds:.0f} s: {script}\n{self.text()[:2000]}")

    def text(self) -> str:
        """What a person reads on the page."""
        return str(self.ask("document.body ? document.body.innerText : ''"))

    def resize(self, width: int, height: int) -> None:
        """Give the page this room, in pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def photograph(self, path: Path) -> None:
        """The visible part as PNG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )

    def close(self) -> None:
        """Let go of the connection."""
        self._loop.run_until_complete(self._socket.close())
        self._loop.run_until_complete(self._session.close())
        self._loop.close()


@contextmanager
def browser(width: int = 1400, height: int = 900) -> Iterator[Browser]:
    """A fresh Chromium, ended afterwards."""
    found = binary()
    assert found is not None
    with tempfile.TemporaryDirectory() as profile:
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--no-first-run", "--remote-debugging-port=0", f"--user-data-dir={profile}", "--proxy-server=direct://",
            f"--window-size={width},{height}", "about:blank",
        ]  # fmt: skip
        process = subprocess.Popen(
            [found, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            page = Browser(_endpoint(Path(profile) / "DevToolsActivePort", process))
            page.resize(width, height)
            try:
                yield page
            finally:
                page.close()
        finally:
            process.terminate()
            process.wait(60)


def _endpoint(told: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, f"Chromium ended with {process.returncode}"
        if told.exists() and (lines := told.read_text().split()):
            return f"http://127.0.0.1:{lines[0]}"
        time.sleep(0.05)
    raise AssertionError("Chromium did not write its port")
