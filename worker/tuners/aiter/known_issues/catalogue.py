"""The catalogue of known faults of AITER's tuners, and the finding of one in what a tuner printed.

`python -m worker.tuners.aiter.known_issues.catalogue --markdown` prints docs/reference/known-issues.md.
"""

from __future__ import annotations

import re
import sys

from worker.text import clean
from worker.tuners.aiter.known_issues.faults import FAULTS, RESULTS
from worker.tuners.aiter.known_issues.images import IMAGE
from worker.tuners.aiter.known_issues.pattern import Diagnosis, Pattern
from worker.tuners.aiter.known_issues.setup import SETUP

_CHATTER = ("unsupported_gemm", "topk_fault", "zero_time", "missing_asm_list", "jit_lock_broken", "not_finished")
"""Said of one candidate, or beside the point: it explains a failure only where nothing else does."""

_CONSEQUENCES = ("hang", "wrong_results", "interrupted", "batch_error")

_IN_PART = (*FAULTS, *IMAGE, *SETUP, *RESULTS)
PATTERNS: tuple[Pattern, ...] = (
    *(p for p in _IN_PART if p.name not in (*_CHATTER, *_CONSEQUENCES)),
    *(p for n in _CONSEQUENCES for p in _IN_PART if p.name == n),
    *(p for p in _IN_PART if p.name in _CHATTER),
)
"""All of them, the one that explains most first."""

BY_NAME: dict[str, Pattern] = {p.name: p for p in PATTERNS}

RUNBOOK: tuple[str, ...] = (
    "ASM kernel path", "Column name case", "K-alignment crash", "SSH escaping", "CK-Tile unsupported shapes",
    "Gluon missing in Docker", "Docker `$!` escaping", "N=576 GPU faults", "K=29568 unsupported",
    "mp=8 GPU memory faults", "Node 1 GPU health",
)  # fmt: skip
"""The rows of the table of known issues that teams tuned by before."""

MAX_TEXT = 1_000_000


def diagnose(text: str, returncode: int | None) -> Diagnosis | None:
    """The known fault that best explains why a tuner ended so, None where none is seen.

    `text`: the end of its output, both streams. `returncode`: as subprocess gives it (-N for a signal), None where it
    was ended by us. A text wins over an exit code, but for a process that the host killed.
    """
    plain = "\n".join(clean(line, 4000) for line in text[-MAX_TEXT:].splitlines())
    by_exit = next((p for p in PATTERNS if returncode is not None and returncode in p.exits), None)
    chatter: Diagnosis | None = None
    for p in PATTERNS:
        m = p.search(plain)
        if m is None:
            continue
        found = Diagnosis(p, _line_at(plain, m), {k: v for k, v in m.groupdict().items() if v})
        if p.name not in _CHATTER:
            return found if by_exit is None or p.name not in _CONSEQUENCES else Diagnosis(by_exit)
        chatter = chatter or found
    return Diagnosis(by_exit) if by_exit is not None else chatter


def _line_at(text: str, m: re.Match[str]) -> str:
    start = text.rfind("\n", 0, m.start()) + 1
    end = text.find("\n", m.end())
    return clean(text[start : end if end >= 0 else len(text)], 400)


_WHOSE = {
    "shape": "the shape, once it is confirmed on a second GPU",
    "slot": "the GPU or its node",
    "image": "the image",
    "setup": "how it was set up",
    "nobody": "nobody",
}


def as_markdown() -> str:
    """docs/reference/known-issues.md."""
    lines = [
        "# Known issues of AITER's tuners",
        "",
        "What gemmfleet knows of how AITER's tuners fail, who is to blame, what it does by itself and what it",
        "tells you. The text below is the catalogue itself",
        "(`python -m worker.tuners.aiter.known_issues.catalogue --markdown`).",
        "Sources are files of ROCm/aiter at the commit where they were read; `make test-aiter AITER_GIT=PATH`",
        "compares every one with a clone, at each version that it is claimed for. How each date behaves,",
        "and what was run from the real files, is in [AITER](../explanation/aiter.md). No MI355X was at hand: what",
        "GPUs and drivers print is from their own documentation and from reports, and marked as theirs.",
        "",
        "| name | what it is | blames | reason |",
        "|---|---|---|---|",
    ]
    lines += [f"| [`{p.name}`](#{p.name}) | {p.title} | {p.whose} | {_code(p.reason)} |" for p in PATTERNS]
    for p in PATTERNS:
        lines += ["", f"## {p.name}", "", f"{p.title}.", "", f"- Printed by {p.origin}: {_code(_plain(p.example))}"]
        if p.exits:
            lines.append(f"- Exit codes that mean it: {', '.join(map(str, p.exits))}")
        lines.append(f"- Whose fault: {_WHOSE[p.whose]}." + (f" Reason: `{p.reason}`." if p.reason else ""))
        lines.append(f"- What gemmfleet does: {_groups(p.do)}")
        lines.append(f"- What you should do: {_groups(p.tell)}")
        if p.runbook:
            lines.append(f"- In the runbook: {'; '.join(p.runbook)}")
        for s in p.sources:
            until = "" if s.until == s.since else f" to {s.until}"
            what = "prints" if s.kind == "text" else "brings it about:"
            lines.append(f"- Source: `{s.path}` at {s.commit} ({s.since}{until}) {what} {_code(_plain(s.says))}")
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    if not text:
        return ""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _plain(text: str) -> str:
    return clean(text).replace("\n", " ")


def _groups(text: str) -> str:
    """`{name}` of a sentence as the reader of the page sees it: <name>."""
    return re.sub(r"\{(\w+)\}", r"`<\1>`", text)


if __name__ == "__main__":
    if sys.argv[1:] != ["--markdown"]:
        raise SystemExit("usage: python -m worker.tuners.aiter.known_issues.catalogue --markdown")
    sys.stdout.write(as_markdown())
