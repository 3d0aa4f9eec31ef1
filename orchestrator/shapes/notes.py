"""Counts of what was cleaned in a shapes file, and the sentences made of them."""

from __future__ import annotations

_SENTENCES = {
    "spaces": ("dropped spaces around 1 cell", "dropped spaces around {n} cells"),
    "quotes": (
        "read 1 line with quoted cells as if it had none",
        "read {n} lines with quoted cells as if they had none",
    ),
    "zeros": ("dropped leading zeros of 1 cell", "dropped leading zeros of {n} cells"),
    "booleans": ("wrote 1 cell as AITER's True or False", "wrote {n} cells as AITER's True or False"),
    "blank": ("dropped 1 blank line", "dropped {n} blank lines"),
    "repeats": ("dropped 1 duplicate row", "dropped {n} duplicate rows"),
}


class Notes:
    """Counts by kind (the keys above), each with the place where it first was."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._first: dict[str, str] = {}

    def count(self, kind: str, line: int, like: int | None = None) -> None:
        """One more of `kind` in `line`; `like` is the line that it repeats."""
        n = self._counts.get(kind, 0)
        self._counts[kind] = n + 1
        if not n:
            self._first[kind] = f"line {line}" + (f" repeats line {like}" if like else "")

    def sentences(self) -> list[str]:
        """One sentence a kind, with the count and the first place."""
        out = []
        for kind, (one, many) in _SENTENCES.items():
            n = self._counts.get(kind, 0)
            if n:
                out.append(f"{(one if n == 1 else many).format(n=n)} (first: {self._first[kind]})")
        return out
