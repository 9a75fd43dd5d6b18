"""Runs one row of a proof in this process: `python -m benchmarks.proof.child FOLDER`.

Reads FOLDER/request.json and writes FOLDER/result.json. While the row runs, FOLDER/partial.json has the figures so far.
Output on the screen is for people; no program reads it.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.proof.registry import Answer, NotHere, task_for
from harness.core.errors import one_line

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """End this process when its parent ends (Linux only), so that a killed proof leaves nothing on the card."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    except (OSError, AttributeError):
        return


def answer(folder: Path) -> dict[str, Any]:
    """Run the row. Returns its status ("passed", "failed", "not run"), reason, summary and figures."""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    try:
        module, _, function = request["target"].partition(":")
        task = task_for(request, lambda done: write(folder / "partial.json", done))
        found = getattr(import_module(module), function)(task)
        if not isinstance(found, Answer):
            raise TypeError(f"{request['target']} gave {type(found).__name__}, not an Answer")
        status = "failed" if found.failed else "passed"
        return {
            "status": status,
            "reason": found.failed,
            "summary": found.summary,
            "figures": found.figures,
        }
    except NotHere as error:
        return {"status": "not run", "reason": str(error), "summary": "", "figures": {}}
    except Exception as error:
        traceback.print_exc()
        return {"status": "failed", "reason": one_line(error), "summary": "", "figures": {}}


def write(path: Path, value: Any) -> None:
    """Write strict JSON, whole or not at all. Raises ValueError for a number that is not finite."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, allow_nan=False), encoding="utf-8")
    temporary.replace(path)


def main(folder: Path) -> None:
    die_with_parent()
    result = answer(folder)
    try:
        write(folder / "result.json", result)
    except (TypeError, ValueError) as error:
        write(
            folder / "result.json",
            {**result, "status": "failed", "reason": one_line(error), "figures": {}},
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
