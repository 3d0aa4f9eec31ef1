"""The page of known issues of AITER's tuners, read: an issue's line of output. And tests/aiter/known_issues.md: the
places in AITER's repository that print or cause each issue."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.paths import ROOT

_HEADING = re.compile(r"^## (\S+)\n", re.M)
_EXAMPLE = re.compile(r"^\*\*Printed[^:]*:\*\* `(.*)`$", re.M)
_SOURCE = re.compile(r"^- `(\S+)` (prints|has) `(.+)`, (\S+)(?: to (\S+))?$", re.M)


@dataclass(frozen=True, slots=True)
class UpstreamSource:
    """A file that `prints` a text, with {} for what is filled in at run time, or that `has` code which causes the
    issue; true of every version from `since` to `until`."""

    path: str
    verb: str
    says: str
    since: str
    until: str


def sections(page: str = "docs/reference/known-issues.md") -> dict[str, str]:
    """The text below each heading of a page, by the issue's name."""
    _, *found = _HEADING.split((ROOT / page).read_text())
    return dict(zip(found[::2], found[1::2], strict=True))


def example(section: str) -> str:
    """The line of output of a section."""
    found = _EXAMPLE.search(section)
    assert found is not None, section
    return found[1]


def sources() -> dict[str, list[UpstreamSource]]:
    """The places in AITER's repository, by the issue's name."""
    places = {}
    for name, section in sections("tests/aiter/known_issues.md").items():
        found = _SOURCE.findall(section)
        assert len(found) == section.count("\n- "), f"a place that cannot be read: {section}"
        places[name] = [
            UpstreamSource(path, verb, says.replace(r"\x1b", "\x1b").replace(r"\n", "\n"), since, until or since)
            for path, verb, says, since, until in found
        ]
    return places
