"""An example whose library is missing ends with one line that says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from loop_support import ROOT

from tests.support.matrix import rest_nightly

# Set before the example runs: `import name` raises ModuleNotFoundError, and find_spec finds nothing.
WITHOUT = """
import runpy, sys
sys.modules[sys.argv[1]] = None
runpy.run_path(sys.argv[2], run_name="__main__")
"""
NEEDS = {
    "with_lightning": {"lightning": "lightning"},
    "with_accelerate": {"accelerate": "accelerate"},
    "with_trainer": {"transformers": "accelerate,hf", "accelerate": "accelerate,hf"},
    "with_huggingface": {"transformers": "hf", "tokenizers": "hf"},
    "with_lora": {"peft": "peft,hf", "transformers": "peft,hf"},
    "with_tokenizer": {"tokenizers": "hf"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "library"),
    rest_nightly(
        [(name, each) for name, known in NEEDS.items() for each in known],
        # Each example, and each library.
        ("with_lightning", "lightning"),
        ("with_accelerate", "accelerate"),
        ("with_trainer", "accelerate"),
        ("with_huggingface", "transformers"),
        ("with_lora", "peft"),
        ("with_tokenizer", "tokenizers"),
    ),
)
def test_a_missing_library_is_one_line_that_says_what_to_install(
    example: str, library: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", WITHOUT, library, str(ROOT / "examples" / f"{example}.py")]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert library in line
    assert line.endswith(f"pip install -e '.[{NEEDS[example][library]}]'")
