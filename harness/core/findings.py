"""What a check found that is no error, or not yet one: `harness doctor` lists findings, and never raises for one.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.core.errors import ExitCode, Problem, shown

Severity = Literal["warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check found. `dataclasses.asdict` of it is JSON-able.

    code: `<area>.<name>`; the area is machine, versions, model, numerics, casts, optimizer, data or config.
    severity: "warning": the run would start; "error": it would be refused, or end.
    where, what, why, fix: as of a `Problem`.
    """

    code: str
    severity: Severity
    where: str
    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        lines = [f"{self.code}: {self.where}: {self.what}"]
        if not self.where:
            lines = [f"{self.code}: {self.what}"]
        if self.why:
            lines.append(f"    why: {self.why}")
        if self.fix:
            lines.append(f"    fix: {self.fix}")
        text = "\n".join(lines)
        return shown(text)


def refused(code: str, problems: Iterable[Problem]) -> list[Finding]:
    """An error for each problem that a start of the run would raise."""
    found: list[Finding] = []
    for problem in problems:
        # A problem that says all in `what` has no reason besides.
        why = problem.why or "harness train refuses to start"
        fix = problem.fix or "correct it"
        found += [Finding(code, "error", problem.where, problem.what, why, fix)]
    return found


def exit_code(findings: Sequence[Finding]) -> ExitCode:
    """4 if an error is one of the machine, 2 if there is any other, else 0."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if any(finding.code.startswith("machine.") for finding in errors):
        return ExitCode.MACHINE
    return ExitCode.USAGE if errors else ExitCode.DONE
