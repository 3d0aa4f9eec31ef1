"""The page of known issues of AITER's tuners.

`python -m tests.support.known_issues_page > docs/reference/known-issues.md`
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from worker.text import clean
from worker.tuners.aiter.known_issue import VERSIONS, KnownIssue
from worker.tuners.aiter.known_issues import ISSUES

_HEAD = """# Known issues of AITER's tuners

Each entry: the issue (its reason in records; what it blames, a shape only once a second GPU confirms it), the line that
shows it, where AITER prints or causes it, why, what gemmfleet does, advice, until when. What GPUs and drivers print is
from documentation and reports.

**Isolates the candidate:** the shape in flight runs alone next, without the candidate that was running
([salvage](../explanation/aiter.md#faults)).

Printed by `python -m tests.support.known_issues_page`.
"""


def as_markdown() -> str:
    """The page of the docs."""
    lines = [_HEAD, f"Versions: {', '.join(name for name, _, _ in VERSIONS)} ({VERSIONS[-1][1]})."]
    for issue in ISSUES:
        lines += ["", f"## {issue.name}", "", _summary(issue)]
        for heading, text in _sections(issue):
            lines += ["", f"**{heading}:** {text}"]
    return "\n".join(lines) + "\n"


def _summary(issue: KnownIssue) -> str:
    marks = [f"`{issue.reason}`"] if issue.reason else []
    marks.append(issue.blames)
    if issue.exit_codes:
        codes = ", ".join(map(str, issue.exit_codes))
        marks.append(f"exit code{'s' if len(issue.exit_codes) > 1 else ''} {codes}")
    if issue.runbook:
        marks.append(f"runbook: {', '.join(issue.runbook)}")
    return f"{issue.title} ({'; '.join(marks)})."


def _sections(issue: KnownIssue) -> Iterator[tuple[str, str]]:
    yield "Printed" + (f" by {issue.printed_by}" if issue.printed_by != "AITER" else ""), _code(issue.example)
    if issue.sources:
        yield "Seen", f"{'; '.join(_seen_in(issue))}."
    yield "Why", _placeholders(issue.why)
    action = [issue.action, "Isolates the candidate." if issue.isolates else ""]
    if any(action):
        yield "gemmfleet", " ".join(p for p in action if p)
    if issue.advice:
        yield "Advice", _placeholders(issue.advice)
    if issue.until:
        yield "Until", f"{issue.until}."


def _seen_in(issue: KnownIssue) -> Iterator[str]:
    """Per file of AITER: the first and last version that print the line; none for code that causes it."""
    for path in dict.fromkeys(s.path for s in issue.sources):
        names = {v for s in issue.sources if s.path == path and s.kind == "text" for v in s.versions()}
        known = [name for name, _, _ in VERSIONS if name in names]
        if not known:
            yield f"`{path}`"
        else:
            span = known[0] if len(known) == 1 else f"{known[0]} to {known[-1]}"
            yield f"{'always' if len(known) == len(VERSIONS) else span} (`{path}`)"


def _placeholders(text: str) -> str:
    """`{name}` of a text as the reader of the page sees it: `<name>`."""
    return re.sub(r"\{(\w+)\}", r"`<\1>`", text)


def _code(text: str) -> str:
    plain = clean(text).replace("\n", " ").strip()
    return f"`` {plain} ``" if "`" in plain else f"`{plain}`"


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
