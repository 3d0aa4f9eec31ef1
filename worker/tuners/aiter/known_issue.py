"""Known issues of AITER's tuners, as data: an issue, its sources in AITER's repository, its diagnosis in output.

A new one takes three steps: a `KnownIssue` in `known_issues`, before the issues that follow from it, with a line of
real output as `example`; its sources, compared with a clone by `make test-aiter AITER_GIT=PATH`; the
page printed again by `python -m tests.support.known_issues_page`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Blames = Literal["shape", "slot", "image", "setup", "nobody"]
FailureReason = Literal[
    "fault", "hang", "oom", "error", "disk_full", "cancelled", "no_candidate", "wrong_result", "unsupported", ""
]
"""A reason of gemmfleet's records; "" for an issue that ends nothing by itself."""
Rank = Literal["cause", "consequence", "remark"]
"""A cause explains a failure; a consequence explains it where no cause is found; a remark only where nothing else is,
for it concerns one candidate or no failure at all."""

VERSIONS: tuple[tuple[str, str, str], ...] = (
    ("v0.1.7.post5", "22122345c0", "2025-12-08"),
    ("v0.1.8", "9402062ebd", "2025-12-17"),
    ("v0.1.9.post1", "0011ff440b", "2026-01-06"),
    ("v0.1.10", "da29487171", "2026-01-15"),
    ("v0.1.10.post3", "6a0e7b26cc", "2026-02-12"),
    ("v0.1.14", "bd0534e963", "2026-05-15"),
    ("v0.1.16", "0730b33fcf", "2026-06-13"),
    ("v0.1.20", "fc2e5d57fb", "2026-08-18"),
    ("newest", "e4048607a5", "2026-08-22"),
)
"""Versions of the two promised ranges that the sources were read at: name, commit, day; oldest first."""

_NAMES = tuple(name for name, _, _ in VERSIONS)

MP = "aiter/utility/mp_tuner.py"
BASE = "aiter/utility/base_tuner.py"


OWN_SHAPE_ADVICE = (
    "Every kernel takes this shape, so it is not to blame: the GPU, its driver or the image is. See dmesg and rocm-smi "
    "of the node, try the image on another GPU, or another image on this one."
)
"""Advice for a fault of one of gemmfleet's own tiny shapes."""


@dataclass(frozen=True, slots=True)
class UpstreamSource:
    """A place in AITER's repository that prints the text (`kind` "text") or causes the issue ("code").

    `says` is the text there, with {} for what is filled in at run time. True of every version of VERSIONS from
    `since` to `until`.
    """

    path: str
    says: str
    since: str = "v0.1.7.post5"
    until: str = "newest"
    kind: Literal["text", "code"] = "text"

    def versions(self) -> tuple[str, ...]:
        """Names of the versions that have it."""
        return _NAMES[_NAMES.index(self.since) : _NAMES.index(self.until) + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownIssue:
    """One entry of the catalogue. Texts may name groups of `regex` as {name}.

    `regex` finds it in output (multi-line; the first match counts), `example` is a line as it is printed by
    `printed_by`. `exit_codes` mean it even without a text, -N for a signal. `reason` and `blames` are what a failure is
    recorded as. Then: `why` it happens, `action` of gemmfleet (`isolates`: the candidate is isolated too), `advice` for
    the user, `until` which date or version it occurs ("": still open). `runbook`: rows of RUNBOOK that it answers.
    """

    name: str
    title: str
    regex: str
    example: str
    reason: FailureReason
    blames: Blames
    why: str
    action: str = ""
    advice: str = ""
    until: str = ""
    isolates: bool = False
    rank: Rank = "cause"
    exit_codes: tuple[int, ...] = ()
    printed_by: str = "AITER"
    runbook: tuple[str, ...] = ()
    sources: tuple[UpstreamSource, ...] = ()

    def search(self, text: str) -> re.Match[str] | None:
        """The first match in the text."""
        return re.search(self.regex, text, re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A known issue met in a tuner's output. `line` shows it, "" where the exit code does."""

    issue: KnownIssue
    line: str = ""
    groups: Mapping[str, str] = field(default_factory=dict)

    @property
    def explanation(self) -> str:
        """Cause, advice and end of the issue, with the groups of the match filled in."""
        parts = (self.issue.why, self.issue.advice, f"Until {self.issue.until}." if self.issue.until else "")
        return " ".join(p for p in parts if p).format_map(_DashForMissing(self.groups))

    def detail(self, already_shown: str = "", *, own_shape: bool = False) -> str:
        """Text of a failure record: the title, the line (unless `already_shown` has it), the explanation.

        `own_shape`: it happened on a shape of gemmfleet's own that every kernel takes; no advice about the shape then.
        """
        line = f" ({self.line})" if self.line and self.line not in already_shown else ""
        return f"{self.issue.title}{line}. " + (
            OWN_SHAPE_ADVICE if own_shape and self.issue.blames == "shape" else self.explanation
        )


class _DashForMissing(dict[str, str]):
    """A group that took no part in the match is a dash."""

    def __missing__(self, key: str) -> str:
        return "-"
