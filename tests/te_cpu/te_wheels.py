"""Transformer Engine's Python, as it is on PyPI: `python tests/te_cpu/te_wheels.py [VERSION...]` brings and unpacks it.

The wheel `transformer-engine` holds all of TE's Python and nothing compiled, 1 to 1.3 MB. Its SHA-256 is pinned here,
and it is unpacked unchanged into build/te/<version>. With no argument every version is brought. Exit code 1 if one
cannot be.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "build" / "te"
# version: SHA-256 of transformer_engine-<version>-py3-none-any.whl. The last one is what the project is written for.
WHEELS = {
    "2.18.0": "9d7c4bd74247e57eeed2af46f7b91c133cc405404953f1f3f2e38be8c47cdb7e",
    "2.19.0": "965d78429d287f7db6978bf299cfcecf68c730247f05cc830ecc6983a123bbc7",
    "2.20.2": "7dcfad943a1a55b2612db9a0e43697fe98c70f4c42ec391ba3a0f872f6ce2094",
}
NEWEST = "2.20.2"
HOW = "python tests/te_cpu/te_wheels.py brings them (4 MB, needs network)"


class Unavailable(Exception):
    """A wheel that cannot be had, or is not the one that is pinned."""


def unpacked(version: str) -> Path:
    """Where the wheel's files are or would be: the folder to put on sys.path."""
    return FOLDER / version


def is_here(version: str) -> bool:
    """Whether `fetch` finished."""
    return (unpacked(version) / "transformer_engine").is_dir()


def fetch(version: str) -> Path:
    """Bring the wheel, check it and unpack it; returns its folder. Raises Unavailable, with the reason."""
    if version not in WHEELS:
        raise Unavailable(f"no version {version}: {', '.join(WHEELS)} are pinned")
    if is_here(version):
        return unpacked(version)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as work:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
        ]
        command += ["--disable-pip-version-check", "--dest", work, f"transformer-engine=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(work).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise Unavailable(
                f"transformer-engine {version} could not be downloaded: {lines[-1] if lines else ''}"
            )
        found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
        if found != WHEELS[version]:
            raise Unavailable(f"{wheels[0].name} has SHA-256 {found}, pinned is {WHEELS[version]}")
        files = Path(work) / "files"
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(files)
        files.rename(unpacked(version))
    return unpacked(version)


def main(arguments: Sequence[str]) -> int:
    failed = False
    for version in arguments or WHEELS:
        try:
            print(f"Transformer Engine {version}: {fetch(version)}")
        except Unavailable as error:
            failed = True
            print(f"Transformer Engine {version}: {error}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
