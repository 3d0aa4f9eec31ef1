"""What an entry of the catalogue of known faults is, and what is made of one that was met. Pure; stdlib only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Whose = Literal["shape", "slot", "image", "setup", "nobody"]
Reason = Literal[
    "fault", "hang", "oom", "error", "disk_full", "cancelled", "no_candidate", "wrong_result", "unsupported", ""
]
"""A gemmfleet reason; "" where it alone ends nothing."""

VERSIONS: tuple[tuple[str, str, str], ...] = (
    ("v0.1.5", "d4ea3cf1d6", "2025-08"),
    ("v0.1.7.post5", "22122345c0", "2025-12-08"),
    ("v0.1.8", "9402062ebd", "2025-12-17"),
    ("v0.1.9.post1", "0011ff440b", "2026-01-06"),
    ("v0.1.10", "da29487171", "2026-01-15"),
    ("v0.1.10.post3", "6a0e7b26cc", "2026-02-12"),
    ("v0.1.12.post1", "7b570738c8", "2026-04-10"),
    ("v0.1.13", "cdcfa833bd", "2026-05-01"),
    ("v0.1.16", "0730b33fcf", "2026-06-13"),
    ("v0.1.20", "fc2e5d57fb", "2026-08-18"),
    ("newest", "e4048607a5", "2026-08-22"),
)
"""The versions that the sources were read at: name, commit, day; oldest first."""

_NAMES = tuple(name for name, _, _ in VERSIONS)


TINY = (
    "Every kernel takes this shape, so it is not to blame: the GPU, its driver or the image is. See dmesg and rocm-smi "
    "of the node, try the image on another GPU, or another image on this one."
)
"""The advice where a shape of our own faulted."""


@dataclass(frozen=True, slots=True)
class Source:
    """A place in AITER's repository that prints the text (`kind` "text") or brings it about ("code").

    `says` is the text there, with {} for what is filled in at run time. True of every version of VERSIONS from
    `since` to `until`.
    """

    path: str
    says: str
    since: str = "v0.1.5"
    until: str = "newest"
    kind: Literal["text", "code"] = "text"

    @property
    def commit(self) -> str:
        """The commit that it was read at: the oldest of its versions."""
        return next(commit for name, commit, _ in VERSIONS if name == self.since)

    def versions(self) -> tuple[str, ...]:
        """The names of the versions that have it."""
        return _NAMES[_NAMES.index(self.since) : _NAMES.index(self.until) + 1]


@dataclass(frozen=True, slots=True)
class Pattern:
    """One known fault.

    `regex` finds it in output (several lines of it; the first match counts). `exits`: exit codes that mean it even
    without a text, -N for a signal. `example`: a line as it is printed. `tell` may name groups of the regex as {name}.
    `origin`: who prints the text where it is not AITER. `runbook`: the row of the runbook's table that it answers.
    """

    name: str
    title: str
    regex: str
    reason: Reason
    whose: Whose
    do: str
    tell: str
    example: str
    sources: tuple[Source, ...]
    exits: tuple[int, ...] = ()
    origin: str = "AITER"
    runbook: tuple[str, ...] = ()

    def search(self, text: str) -> re.Match[str] | None:
        """The first place where the text has it."""
        return re.search(self.regex, text, re.MULTILINE) if self.regex else None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A known fault that was met. `line`: the line that says it, "" where the exit code does."""

    pattern: Pattern
    line: str = ""
    groups: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.pattern.name

    @property
    def reason(self) -> Reason:
        return self.pattern.reason

    @property
    def whose(self) -> Whose:
        return self.pattern.whose

    @property
    def tell(self) -> str:
        """What to tell the user."""
        return self.pattern.tell.format_map(_Said(self.groups))

    def detail(self, said_before: str = "", *, tiny: bool = False) -> str:
        """For a record: what it is, what was printed (unless that was said before), what to do.

        `tiny`: it was met on a shape of our own that every kernel takes, so no advice about the shape is given.
        """
        said = f" ({self.line})" if self.line and self.line not in said_before else ""
        return f"{self.pattern.title}{said}. {TINY if tiny and self.whose == 'shape' else self.tell}"


class _Said(dict[str, str]):
    """Groups that did not take part in the match are a dash."""

    def __missing__(self, key: str) -> str:
        return "-"
