"""Runs Python programs in forked processes, which saves the seconds that a new interpreter needs for imports.

They are real processes: tests can signal, kill and wait for them. Each process that runs tests has a server of its own.
The server imports torch and other libraries, computes nothing, and forks for every program. A fork of it behaves as a
new interpreter does (`tests/support/test_warm.py` compares them).

Three kinds of tests need a new interpreter instead: tests of launchers, tests that depend on a process's own command
line or first environment, and tests of what an import costs or leaves out.

As a program (`python warm.py FD MODULE...`) this file is the server.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
THREADS = "1"
"""OMP_NUM_THREADS of every process here. torch reads it while it is imported, so it cannot change afterwards."""
PATIENCE = 540.0
"""Seconds. Long enough that no test fails on a busy machine, and short enough that a hanging run ends."""
_WARM = (
    "torch._dynamo", "torch.distributed.tensor", "safetensors.torch", "safetensors.numpy", "numpy.ctypeslib",
    "pydantic", "typer", "rich.progress", "yaml",
)  # fmt: skip
"""Libraries that a training run imports. The harness is imported anew, but for what `modules` of a start names."""


class Process:
    """A forked program, with the interface of `subprocess.Popen` that tests use."""

    def __init__(self, status: int) -> None:
        # A pipe from the server: first the process's id, at its end the exit code.
        self._status = status
        self.returncode: int | None = None
        self.pid = self._number()

    def _number(self) -> int:
        message = os.read(self._status, 4)
        if len(message) != 4:
            raise RuntimeError("the server of warm processes is gone")
        return struct.unpack("i", message)[0]

    def poll(self) -> int | None:
        """The exit code, negative for the signal that ended it; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, as `poll`. Raises TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            ended = select.poll()
            ended.register(self._status, select.POLLIN)
            if not ended.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = self._number()
            os.close(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Server:
    def __init__(self, modules: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": THREADS,
            "DS_ACCELERATOR": "cpu",
        }
        with theirs:
            process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._process = process

    def start(self, request: Mapping[str, Any], stdout: int, stderr: int) -> Process:
        ours, theirs = os.pipe()
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [stdout, stderr, theirs])
        finally:
            os.close(theirs)
        return Process(ours)

    def stop(self) -> None:
        """End the server and wait for it, so that its processor time counts as that of the tests."""
        self._socket.close()
        self._process.wait(PATIENCE)


@functools.cache
def _server(modules: tuple[str, ...]) -> _Server:
    server = _Server(modules)
    atexit.register(server.stop)
    return server


def start(
    program: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    stdout: int,
    stderr: int,
    file_limit: int | None = None,
    modules: tuple[str, ...] = (),
) -> Process:
    """Start `python *program` in `folder`, in a session of its own, and return at once.

    program: a script, `-m` with a module, or `-c` with code; then its arguments.
    environment: the whole environment of the process.
    stdout, stderr: descriptors. The caller keeps and closes them.
    file_limit: the most bytes that a file may have (RLIMIT_FSIZE).
    modules: modules that are already imported, for tests that are not about imports. Each choice has its own server.

    The process ignores no signals, even if the tests run under nohup or with &.
    """
    if environment.get("OMP_NUM_THREADS") != THREADS:
        raise ValueError(
            f"a warm process has {THREADS} thread: OMP_NUM_THREADS={environment.get('OMP_NUM_THREADS')}"
        )
    request = {
        "program": list(map(str, program)),
        "folder": str(folder),
        "environment": dict(environment),
    }
    return _server(modules).start(request | {"file_limit": file_limit}, stdout, stderr)


def run(
    program: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    timeout: float = PATIENCE,
    apart: bool = False,
    file_limit: int | None = None,
    modules: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """As `start`, but wait for the end. apart: whether stderr is kept apart from stdout.

    Raises TimeoutExpired after `timeout` seconds; the process is then killed.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        stderr = errors if apart else output
        process = start(
            program, folder, environment, output.fileno(), stderr.fileno(), file_limit, modules
        )
        try:
            code = process.wait(timeout)
        except BaseException:
            process.kill()
            raise
        for file in (output, errors):
            file.seek(0)
        texts = (file.read().decode(errors="replace") for file in (output, errors))
        return subprocess.CompletedProcess(list(program), code, *texts)


def ignore_nothing() -> None:
    """Restore the signals to what a terminal starts a program with. Under nohup or with & some are ignored."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _become(request: Mapping[str, Any], stdout: int, stderr: int, status: int) -> None:
    """In the child: take over session, signals, output, folder, environment and limits of the request."""
    os.setsid()
    ignore_nothing()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for each in (stdout, stderr):
        os.close(each)
    # The server's own streams remember whether what they were opened on can seek.
    sys.stdout, sys.stderr = _opened_again(sys.stdout), _opened_again(sys.stderr)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["file_limit"]:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"], request["file_limit"]))
    os.write(status, struct.pack("i", os.getpid()))
    os.close(status)


def _opened_again(stream: Any) -> TextIO:
    return open(
        stream.fileno(),
        "w",
        encoding=stream.encoding,
        errors=stream.errors,
        buffering=1 if stream.line_buffering else -1,
        closefd=False,
    )


def _execute(program: Sequence[str]) -> None:
    """Do what `python *program` does: set sys.path and sys.argv, then run the program as __main__."""
    import runpy

    first, *rest = program
    extra = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    here = {"-m": os.getcwd(), "-c": ""}.get(first, str(Path(first).resolve().parent))
    own = str(Path(__file__).parent)
    sys.path[:] = [here, *extra, *(path for path in sys.path if path not in (own, str(ROOT)))]
    importlib.invalidate_caches()
    stop: Any = sys.modules.get("harness.stop")
    if stop is not None:
        # It was imported in the server, and looks up its launcher at its import.
        stop._PARENT, stop._GRANDPARENT = stop._launchers()
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.argv = ["-m", *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


def _serve(link: socket.socket, modules: Sequence[str]) -> Sequence[str]:
    """Fork for every request until the tests have ended. Returns only in the child: the program to execute."""
    # A module may ask to come before torch (paper_device).
    for module in (*modules, *_WARM):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(link, 1 << 20, 3)
        if not message:
            sys.exit()
        if os.fork() == 0:
            break
        for each in descriptors:
            os.close(each)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
    # A process between server and program waits for the program, so that the server can answer the next request.
    link.close()
    stdout, stderr, status = descriptors
    request = json.loads(message)
    child = os.fork()
    if child == 0:
        _become(request, stdout, stderr, status)
        return request["program"]
    for each in (0, 1, 2, stdout, stderr):
        os.close(each)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # The test may have ended without waiting for the exit code.
    with contextlib.suppress(BrokenPipeError):
        os.write(status, struct.pack("i", code))
    os._exit(0)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as _link:
        _program = _serve(_link, sys.argv[2:])
    _execute(_program)
