"""Runs the checks one after the other and says what they found."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from db.session import Database
from jobs.settings import Settings
from jobs.source import first_line
from jobs.upkeep.checks import CHECKS, Check, Found

Show = Callable[[str, Found | None, float], None]
"""Called with a check's name before it runs, and again with what it found and the seconds it took."""


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    what: str
    num: int
    example: str | None
    remedy: str
    repaired: bool = False

    @property
    def line(self) -> str:
        such = f", such as {self.example}" if self.example else ""
        return f"{self.what}: {self.num}{such}; {'repaired' if self.repaired else self.remedy}"


@dataclass
class Report:
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each check that ran."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_healthy(self) -> bool:
        return all(finding.repaired for finding in self.findings)

    @property
    def summary(self) -> str:
        num, repaired = len(self.findings), sum(finding.repaired for finding in self.findings)
        said = f"{len(self.seconds)} checks: {num or 'no'} finding{'' if num == 1 else 's'}"
        return f"{said}, {repaired} repaired" if repaired else said

    def as_dict(self) -> dict[str, Any]:
        findings = [asdict(finding) for finding in self.findings]
        return {"healthy": self.is_healthy, "findings": findings, "seconds": self.seconds}


def examine(
    database: Database, settings: Settings, *, repair: bool = False, show: Show = lambda name, found, seconds: None
) -> Report:
    """Run every check; with `repair`, do what mends its finding and look again."""
    report = Report()
    may_repair = repair
    for check in CHECKS:
        show(check.name, None, 0.0)
        started_s = time.perf_counter()
        finding = _look(check, database, settings)
        if finding is not None and check.mend is not None and may_repair:
            check.mend(database, settings)
            finding = replace(finding, repaired=_look(check, database, settings) is None)
        seconds = report.seconds[check.name] = round(time.perf_counter() - started_s, 3)
        show(check.name, Found(finding.num, finding.example) if finding else Found(0, None), seconds)
        if finding is None:
            continue
        report.findings.append(finding)
        if check.is_ground:
            may_repair = False
            if check is CHECKS[0]:  # of tables and columns that are not these, nothing can be asked
                break
    return report


def _look(check: Check, database: Database, settings: Settings) -> Finding | None:
    try:
        found = check.find(database, settings)
    except SQLAlchemyError as error:  # a damaged page, a value that is no JSON: that is a finding, too
        reason = first_line(getattr(error, "orig", None) or error)
        return Finding(check.name, f"could not check that {check.name}", 1, reason, "look at the database's log")
    return Finding(check.name, check.what, found.num, found.example, check.remedy) if found.num else None
