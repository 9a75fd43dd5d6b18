"""Ends the runs of a drill that was killed: a process of its own, which outlives the drill. Torch-free.

    python -m harness.drill.keeper MARK

A drill that gets SIGKILL cannot end what it started. The keeper reads a pipe that only the drill holds open. The kernel
closes it when the drill ends, however that happens, and then the keeper ends every process with the drill's mark: runs,
their ranks, and servers, whichever session they are in. After a drill that ended by itself there is none left.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from harness.core.files import with_this_package
from harness.drill.child import end_marked


@contextmanager
def kept(mark: str) -> Iterator[None]:
    """Context in which the end of this process, also by SIGKILL, ends every process that has `mark`.

    Raises OSError if the keeper cannot be started.
    """
    line = [sys.executable, "-m", "harness.drill.keeper", mark]
    # A session of its own: signals to the drill's terminal or process group do not reach it. It holds none of the
    # drill's streams, whose readers wait for their end.
    with subprocess.Popen(
        line,
        env=with_this_package(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ):
        yield


def main() -> None:
    """Wait for the end of standard input, then end all that has the mark."""
    (mark,) = sys.argv[1:]
    sys.stdin.buffer.read()
    end_marked(mark)


if __name__ == "__main__":
    main()
