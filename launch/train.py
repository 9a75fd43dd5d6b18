#!/usr/bin/env python3
"""Train under deepspeed, torchrun or alone: the same as `harness train`, from a source tree without installation."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness.cli import train_main

if __name__ == "__main__":
    train_main()
