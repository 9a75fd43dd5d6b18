"""Speed and soundness of this machine: what `harness doctor --speed` and `--card` measure."""
