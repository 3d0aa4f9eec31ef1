"""Text for people: text from tuners and logs cleaned, numbers in words, and the fault of a file (`Finding`)."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

MAX_DETAIL = 2000
"""Bytes of UTF-8 in a record's detail."""

# ECMA-48: control strings (OSC, DCS, ...) to their terminator, CSI sequences, two-byte escapes; and their C1 forms.
_SEQUENCES = re.compile(
    r"(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that a file breaks, as every check of tables and config files reports it."""

    level: Level
    rule: str
    path: str
    line: int
    """0 for the file itself."""
    text: str
    bucket: str = ""
    """The bucket of M of a config file; "" for a table, or if the finding is about none in particular."""

    @property
    def order(self) -> tuple[int, str, str, int]:
        """Its place among findings on config files: errors first, then by rule, file and line."""
        return LEVELS.index(self.level), self.rule, self.path, self.line


def plural(n: int, one: str, many: str = "") -> str:
    """`1 shape`, `5,000 shapes`; with `many` where an s is not enough: `1 entry`, `2 rows are`."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def and_more(names: Sequence[str], most: int) -> str:
    """The first names, and the number of the others: `a, b and 5 more`."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def byte_words(count: float) -> str:
    """`275 GiB`, `1.5 GiB`, `12 MiB`: a size of memory for people."""
    gib = count / 2.0**30
    if gib < 1:
        return f"{count / 2.0**20:,.0f} MiB"
    return f"{gib:,.0f} GiB" if gib >= 10 else f"{gib:.1f} GiB"


def did_you_mean(word: str, legal: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing. X: the legal word that begins with `word` or is most similar to it, ignoring
    case and a leading `torch.`."""
    words = list(legal)
    wanted = word[:40].lower()
    by_lower = {legal_word.lower().rpartition(".")[2]: legal_word for legal_word in words}
    by_lower |= {legal_word.lower(): legal_word for legal_word in words}
    similar = [lower for lower in by_lower if wanted and lower.startswith(wanted)]
    similar = similar or difflib.get_close_matches(wanted, by_lower, n=1, cutoff=0.5)
    return f"; did you mean {by_lower[similar[0]]}?" if similar else ""


def uncoloured(text: str) -> str:
    """`text` without terminal sequences (colours, titles, cursor movements), each removed whole. The only definition of
    them."""
    return text if text.isprintable() else _SEQUENCES.sub("", text)


def clean(text: str, limit: int = MAX_DETAIL, *, keep: str = "start") -> str:
    """`text` without terminal sequences and control characters, at most `limit` bytes of its start or end."""
    plain = _CONTROL.sub("", uncoloured(text).replace("\r", "\n")).strip()
    data = plain.encode()
    if len(data) > limit:
        data = data[:limit] if keep == "start" else data[len(data) - limit :]
    return data.decode(errors="ignore").strip()


OWN_LINE = "[worker "
"""Begins the worker's own lines in a slot's log, which explain no failure of the tuner."""


def tail(fd: int, since: int, limit: int = 4096) -> str:
    """The cleaned end of the file from offset `since` on, at most `limit` bytes; "" if it cannot be read."""
    try:
        size = os.fstat(fd).st_size
        start = max(since, size - limit)
        text = os.pread(fd, max(0, size - start), start).decode(errors="replace")
        if start > since and "\n" in text:  # a cut line may begin within a sequence
            text = text.partition("\n")[2]
        lines = [line for line in text.split("\n") if not line.startswith(OWN_LINE)]
        return clean("\n".join(lines), limit, keep="end")
    except OSError:
        return ""
