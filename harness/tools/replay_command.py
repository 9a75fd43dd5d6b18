"""`harness replay`: its arguments. Torch is loaded once they are known to be right."""

from __future__ import annotations

from typing import Annotated

import typer

from harness.tools.shell import RunFolder


def command(
    run: RunFolder,
    step: Annotated[int, typer.Option(min=1, help="the step to run again")],
    anomaly: Annotated[bool, typer.Option("--anomaly", help="add autograd's own search for NaN")] = False,
) -> int:
    from harness.tools.replay import replay

    return replay(run, step, anomaly)
