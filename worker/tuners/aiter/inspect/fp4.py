"""4-bit shapes whose K is no multiple of 256: one scale covers 32 elements, and scales are padded to eight."""

from __future__ import annotations

import re

from worker.tuners.aiter.inspect.script import Script
from worker.tuners.aiter.tree.reading import Evidence, Source

PRODUCTS = re.compile(r"^(?P<indent>\s*)(?P<name>[xw]_f32) = (?P=name) \* (?P<scales>[xw]_scales_f32)\s*$")
"""The lines of run_torch() where an operand meets its scales."""
_TRIMMED = r":\s*scaleN_valid\s*\]"
_ROW_GROUP = re.compile(r"bs_offs_0\s*\*\s*2\s*\*\s*16\s*\*\s*(\w+)")


def sound(quantiser: Source | None) -> tuple[bool, list[Evidence]]:
    """Whether shuffled scales lie where kernels look for them when K is no multiple of 256: the step from one group
    of 32 rows to the next has to count the padding (ROCm/aiter d6cefa9783). Unknown counts as not."""
    if quantiser is None:
        return False, [Evidence("aiter/utility/fp4_utils.py", 0, "is not there: whether K % 256 is sound is unknown")]
    for number, line in enumerate(quantiser.text.split("\n"), 1):
        m = _ROW_GROUP.search(line)
        if m:
            return m[1] == "scaleN_pad", [quantiser.at(number)]
    return False, [quantiser.missing("steps from row group to row group in no way known here: counted as unsound")]


def trim_verdict(quantiser: Source | None, script: Script | None) -> tuple[str, list[Evidence]]:
    """Whether the reference of the a4w4 script has to trim the scales it gets, for it multiplies them by operands
    that are as wide as K (the quantiser does it by itself since ROCm/aiter e6af9a487d)."""
    if script is None:
        return "harmless", [Evidence("csrc", 0, "no a4w4 script here, so there is no reference to trim for")]
    lines = products(script.source.text)
    ours = [script.source.at(n) for n in lines]
    if quantiser is None:
        missing = Evidence("aiter/utility/fp4_utils.py", 0, "is not there: whether scales come padded is unknown")
        return "harmless", [missing, *ours]
    trimmed = quantiser.find(_TRIMMED)
    if trimmed:
        return "harmless", [trimmed, *ours]
    if not ours:
        return "harmless", [script.source.missing("multiplies operands and scales in no line known here")]
    padded = quantiser.find(r"scaleN\s*=\s*.*\*\s*8\b") or quantiser.missing("returns scales untrimmed")
    return "needed", [padded, *ours]


def products(text: str) -> list[int]:
    """The numbers of those lines, from 1."""
    return [n for n, line in enumerate(text.split("\n"), 1) if PRODUCTS.match(line)]
