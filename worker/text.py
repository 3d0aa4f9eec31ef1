"""Text from tuners and logs made fit to be stored and shown."""

from __future__ import annotations

import os
import re

MAX_DETAIL = 2000
"""Bytes of UTF-8 in a record's detail."""

_TERMINAL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # OSC, DCS and the like, up to their end
    r"|\x1b[ -/]*[0-~]",
    re.DOTALL,
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(text: str, limit: int = MAX_DETAIL, *, keep: str = "start") -> str:
    """`text` without terminal sequences and control characters, at most `limit` bytes of its start or end."""
    plain = _CONTROL.sub("", _TERMINAL.sub("", text.replace("\r", "\n"))).strip()
    data = plain.encode()
    if len(data) > limit:
        data = data[:limit] if keep == "start" else data[len(data) - limit :]
    return data.decode(errors="ignore").strip()


def tail(fd: int, since: int, limit: int = 4096) -> str:
    """The cleaned end of the file from offset `since` on, at most `limit` bytes; "" if it cannot be read."""
    try:
        size = os.fstat(fd).st_size
        start = max(since, size - limit)
        return clean(os.pread(fd, max(0, size - start), start).decode(errors="replace"), limit, keep="end")
    except OSError:
        return ""
