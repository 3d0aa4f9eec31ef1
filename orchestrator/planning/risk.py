"""Shapes that are run in groups of their own, because a kernel may fault on them (AITER only).

A class is no verdict: 17 rows that AITER ships have an N that is no multiple of 128, and the K layout depends on the
image. It keeps what a fault would take along small.
"""

from __future__ import annotations

from collections.abc import Mapping

LARGEST_BYTES = 64 << 30
"""Operands, output and float32 references above this may not fit beside AITER's copies of them."""


def risk(tuner: str, family: str, key: Mapping[str, int | str]) -> str:
    """The class in words, "" for none."""
    if tuner != "aiter":
        return ""
    if family == "fmoe":
        return ""
    m, n, k = (int(key[c]) for c in ("M", "N", "K"))
    found = []
    if family == "a4w4_blockscale" and k % 256:
        found.append("K is no multiple of 256")
    if family != "a16w16" and n % 128:
        found.append("N is no multiple of 128")
    if family == "a16w16" and (n % 64 or k % 64):
        found.append("N or K is no multiple of 64")
    if 4 * int(key.get("B", 1)) * (m * k + n * k + m * n) > LARGEST_BYTES:
        found.append("its references take more than 64 GiB")
    return ", ".join(found)
