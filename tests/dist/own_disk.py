"""`harness train` as a rank whose working folder no other rank sees, as on a machine without a shared disk."""

import os

from harness.cli import train_main

if __name__ == "__main__":
    os.chdir(f"disk-{os.environ['RANK']}")
    train_main()
