"""A tracking server that fails on demand: a TCP proxy, before a real `mlflow server` or before nothing.

Also the other faults of row 18: a database that another process holds, and a name that cannot be resolved.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path

FAULTS = {
    "refuse": "nothing listens",
    "error": "answers 500",
    "denied": "answers 401: other credentials",
    "hang": "never answers",
    "swallow": "writes, but the answer is lost",
    "no_name": "name not found",
}
ERROR = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
SHARE = "share"
"""Not in FAULTS: most requests succeed."""
BUSY = "HTTP/1.1 429 Too Many Requests\r\nRetry-After: {}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
DENIED = b"HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Basic\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
METHODS = (b"GET", b"POST", b"PATCH", b"DELETE")
# Put before everything else on PYTHONPATH: name resolution fails while the file is there.
NO_NAMES = """
import os, socket
_real = socket.getaddrinfo
def getaddrinfo(*given, **named):
    if os.path.exists({flag!r}):
        open({flag!r}, "a").write("asked\\n")
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return _real(*given, **named)
socket.getaddrinfo = getaddrinfo
"""
LOCKER = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
database.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


class Proxy:
    """Listens on a port of its own. fault: "" passes everything on to `upstream`, else one of

    "refuse" (nothing listens), "error" (500 to every request), "denied" (401 to every request), "hang" (accepts and
    never answers), "swallow" (the server does what it is asked, but whoever asks it to write never hears so), "no_name"
    (see NO_NAMES), "share" (three in ten requests fail: 429 with Retry-After, 500, or done with the answer lost).
    hits: how often each fault met a connection; nobody can count those that were refused. "dead": found no upstream.
    """

    def __init__(self, folder: Path, upstream: int = 0) -> None:
        self.hits: Counter[str] = Counter()
        self._upstream = upstream
        self._fault = ""
        self._chance = random.Random(0)
        self._open: set[socket.socket] = set()
        self._flag = folder / "no-names"
        self.python_path = folder / "site"
        self.python_path.mkdir(parents=True)
        (self.python_path / "sitecustomize.py").write_text(NO_NAMES.format(flag=str(self._flag)))
        self._listener = self._listen(0)
        self.port: int = self._listener.getsockname()[1]

    @property
    def uri(self) -> str:
        return f"http://localhost:{self.port}"

    @contextlib.contextmanager
    def outage(self, fault: str) -> Iterator[None]:
        """The fault lasts as long as the block; connections from before and within do not outlive their ends."""
        self.switch(fault)
        try:
            yield
        finally:
            self.switch("")

    def fired(self, fault: str, refused: int) -> int:
        """How often the outage of now was met. refused: attempts that failed so, which only their maker can count."""
        if fault == "refuse":
            return refused
        return self._flag.read_text().count("asked") if fault == "no_name" else self.hits[fault]

    def close(self) -> None:
        """Nothing listens any more."""
        self.switch("refuse")

    def switch(self, fault: str) -> None:
        """From now on `fault`; connections from before do not outlive it."""
        was, self._fault = self._fault, fault
        if fault == was:
            return
        if fault == "refuse":
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        elif was == "refuse":
            self._listener = self._listen(self.port)
        if fault == "no_name":
            self._flag.touch()
        elif was == "no_name":
            self._flag.unlink()
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _listen(self, port: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        fault = self._fault
        self._open.add(client)
        try:
            if fault in ("error", "denied", "hang"):
                if client.recv(1 << 16):
                    self.hits[fault] += 1
                if fault != "hang":
                    client.sendall(ERROR if fault == "error" else DENIED)
                while client.recv(1 << 16):
                    pass
            elif fault == SHARE:
                self._relay_share(client)
            else:
                self._relay(client, fault)
        except OSError:
            pass
        finally:
            self._open.discard(client)
            client.close()

    def _relay_share(self, client: socket.socket) -> None:
        """One request, and its answer unless it is one of those that fail."""
        request = _whole_request(client)
        if not request:
            return
        kind = self._chance.choice(("429", "500", "lost")) if self._chance.random() < 0.3 else ""
        self.hits[kind or "passed"] += 1
        if kind == "429":
            moment = formatdate(time.time() + 1, usegmt=True)
            client.sendall(BUSY.format(self._chance.choice(("0", "1", moment))).encode())
            return
        if kind == "500":
            client.sendall(ERROR)
            return
        with socket.create_connection(("127.0.0.1", self._upstream)) as server:
            head, _, body = request.partition(b"\r\n\r\n")
            lines = [
                line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")
            ]
            server.sendall(b"\r\n".join([*lines, b"Connection: close", b"", body]))
            answer = b"".join(iter(lambda: server.recv(1 << 16), b""))
        if kind != "lost":
            client.sendall(answer)

    def _relay(self, client: socket.socket, fault: str) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self._upstream))
        except ConnectionRefusedError:
            self.hits["dead"] += 1
            return
        with server:
            writes = False
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    if ready is client:
                        if data.startswith(METHODS):
                            writes = (
                                not data.startswith(b"GET")
                                and b"search" not in data.partition(b"\r\n")[0]
                            )
                        server.sendall(data)
                    elif fault == "swallow" and writes:
                        self.hits[fault] += 1
                        return
                    else:
                        client.sendall(data)


def _whole_request(client: socket.socket) -> bytes:
    """Head and body of a request; empty if there comes none."""
    request = b""
    while b"\r\n\r\n" not in request:
        data = client.recv(1 << 16)
        if not data:
            return b""
        request += data
    head, _, body = request.partition(b"\r\n\r\n")
    lengths = [
        line.partition(b":")[2]
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length:")
    ]
    missing = int(lengths[0]) - len(body) if lengths else 0
    while missing > 0:
        data = client.recv(1 << 16)
        if not data:
            return b""
        request, missing = request + data, missing - len(data)
    return request


@contextlib.contextmanager
def held(database: Path) -> Iterator[None]:
    """Another process has the SQLite file for itself (BEGIN EXCLUSIVE) as long as the block lasts."""
    holder = subprocess.Popen(
        [sys.executable, "-c", LOCKER, str(database)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    try:
        yield
    finally:
        holder.communicate(timeout=300)


class RealServer:
    """An `mlflow server` on `<folder>/mlflow.db`, whose port stays the same when it is killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Until it answers."""
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--port",
            str(self.port),
            "--workers",
            "1",
        ]
        store = f"sqlite:///{self.folder / 'mlflow.db'}"
        command += ["--backend-store-uri", store, "--default-artifact-root", str(self.folder)]
        with (self.folder / "server.log").open("ab") as log:
            server = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            )
        self._process = server
        wait_for(lambda: _healthy(self.port, server), 120)

    def kill(self) -> None:
        """SIGKILL to it and its workers."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, 9)
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def real_server(folder: Path) -> Iterator[int]:
    """The port of an `mlflow server` on `<folder>/mlflow.db`, ended when the block ends."""
    server = RealServer(folder)
    try:
        server.start()
        yield server.port
    finally:
        server.kill()


def _healthy(port: int, server: subprocess.Popen[bytes]) -> bool:
    assert server.poll() is None, "mlflow server ended; see server.log"
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    """Until the condition holds; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain"
        time.sleep(0.02)
