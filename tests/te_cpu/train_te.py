"""launch/train.py with Transformer Engine's own Python on the CPU; the same arguments. TE_VERSION chooses the wheel."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import te_install  # noqa: E402
import te_wheels  # noqa: E402

if __name__ == "__main__":
    te_install.install(te_wheels.unpacked(os.environ.get("TE_VERSION", te_wheels.NEWEST)))
    te_install.as_on_a_card()
    sys.argv[0] = str(ROOT / "launch" / "train.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
