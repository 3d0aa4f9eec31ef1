"""Catalogue of known issues of AITER's tuners, and the search for them in a tuner's output."""

from __future__ import annotations

import re

from worker.text import clean
from worker.tuners.aiter.known_issues import Diagnosis, KnownIssue
from worker.tuners.aiter.known_issues.environment import IMAGE, SETUP
from worker.tuners.aiter.known_issues.execution import FAULTS, OUTCOMES

_RANKS = ("cause", "consequence", "remark")

ISSUES: tuple[KnownIssue, ...] = tuple(
    sorted((*FAULTS, *IMAGE, *SETUP, *OUTCOMES), key=lambda issue: _RANKS.index(issue.rank))
)
"""All known issues, the one that explains most first."""

BY_NAME: dict[str, KnownIssue] = {issue.name: issue for issue in ISSUES}

RUNBOOK: tuple[str, ...] = (
    "ASM kernel path", "Column name case", "K-alignment crash", "SSH escaping", "CK-Tile unsupported shapes",
    "Gluon missing in Docker", "Docker `$!` escaping", "N=576 GPU faults", "K=29568 unsupported",
    "mp=8 GPU memory faults", "Node 1 GPU health",
)  # fmt: skip
"""Rows of the table of known issues in the runbook that teams tuned by before."""

MAX_TEXT = 1_000_000


def diagnose(text: str, returncode: int | None) -> Diagnosis | None:
    """The known issue that best explains a tuner's end, None if there is none.

    `text`: the end of its output, both streams. `returncode`: as of subprocess (-N for a signal), None if gemmfleet
    ended it. A text has precedence over an exit code, except where the host killed the process.
    """
    plain = "\n".join(clean(line, 4000) for line in text[-MAX_TEXT:].splitlines())
    by_exit = next((i for i in ISSUES if returncode is not None and returncode in i.exit_codes), None)
    remark: Diagnosis | None = None
    for issue in ISSUES:
        m = issue.search(plain)
        if m is None:
            continue
        found = Diagnosis(issue, _line_at(plain, m), {k: v for k, v in m.groupdict().items() if v})
        if issue.rank != "remark":
            return found if by_exit is None or issue.rank == "cause" else Diagnosis(by_exit)
        remark = remark or found
    return Diagnosis(by_exit) if by_exit is not None else remark


def _line_at(text: str, m: re.Match[str]) -> str:
    start = text.rfind("\n", 0, m.start()) + 1
    end = text.find("\n", m.end())
    return clean(text[start : end if end >= 0 else len(text)], 400)
