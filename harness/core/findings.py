"""What a check found that is no error, or not yet one: `harness doctor` lists findings, and never raises for one.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.core.errors import ExitCode, Problem

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
        return f"{self.code}: {Problem(self.what, self.where, self.why, self.fix)}"


def warning(code: str, where: str, what: str, why: str, fix: str) -> Finding:
    """A finding that keeps no run from starting."""
    return Finding(code, "warning", where, what, why, fix)


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
