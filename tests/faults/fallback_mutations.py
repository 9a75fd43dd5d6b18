"""What the fallback sees, and when it acts."""

from __future__ import annotations

from mutation import Mutation

FALLBACK = (
    Mutation(
        16,
        "samples share no period with a fault",
        "    return block * every + drawn % every + 1\n",
        "    return block * every + every\n",
        "tests/unit/precision/test_sampled_faults.py",
    ),
)
