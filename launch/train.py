#!/usr/bin/env python3
"""Train under deepspeed, torchrun or alone: the same as `harness train`, from a source tree without installation."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness.stop import end_while_importing

end_while_importing()  # before what takes its time

from harness.cli import train_main  # noqa: E402

if __name__ == "__main__":
    train_main()
