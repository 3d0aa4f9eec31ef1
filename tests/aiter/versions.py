"""Facts of each version of AITER, as its files were read by hand; the probe has to find the same.

`python -m tests.aiter.versions` (with AITER_GIT) prints the table of docs/explanation/aiter.md as the probe answers.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.aiter.checkout import git, take_out
from worker.tuners.aiter.findings import Findings, inspect

FILES = (
    "aiter/jit/core.py", "aiter/utility/base_tuner.py", "aiter/utility/mp_tuner.py", "aiter/utility/fp4_utils.py",
    "csrc/py_itfs_cu/asm_gemm_a4w4.cu", "op_tests/test_opus_a8w8_bmm.py", "csrc/opus_gemm/opus_gemm_common.py",
)  # fmt: skip
UNTUNED = re.compile(r"aiter/configs/[^/]*untuned[^/]*\.csv")
ENDINGS = ("_tune.py", "/fmoe_2stages/tune.py", "/gemm_tuner.py", "/GemmTuner.py", "/f4gemm_bf16_per1x32Fp4.csv")


@dataclass(frozen=True, slots=True)
class Version:
    """A tag. `link`, `case`, `trim`: verdicts on the workarounds; `families`: how many it has scripts of."""

    tag: str
    link: str
    case: str
    trim: str
    k256: bool
    promised: bool
    families: int = 9


_NO, _YES, _BAD = "harmless", "**needed**", "harmful"
VERSIONS = (
    Version("v0.1.5", _NO, _NO, _YES, k256=False, promised=False, families=8),
    Version("v0.1.6", _NO, _NO, _YES, k256=False, promised=False),
    Version("v0.1.7", _NO, _NO, _YES, k256=False, promised=True),
    Version("v0.1.7.post5", _NO, _YES, _YES, k256=False, promised=True),
    Version("v0.1.8", _NO, _YES, _YES, k256=False, promised=True),
    Version("v0.1.9", _NO, _BAD, _YES, k256=False, promised=True),
    Version("v0.1.10", _YES, _BAD, _YES, k256=False, promised=True),
    Version("v0.1.11", _NO, _BAD, _YES, k256=False, promised=True),
    Version("v0.1.13", _NO, _BAD, _NO, k256=False, promised=False),
    Version("v0.1.14", _NO, _BAD, _NO, k256=True, promised=True),
    Version("v0.1.19", _NO, _BAD, _NO, k256=True, promised=True),
    Version("e4048607a5", _NO, _BAD, _NO, k256=True, promised=True, families=10),
)


def tree_of(tag: str, folder: Path) -> Path:
    """The files of a version that the probe reads, written below `folder`."""
    try:
        there = git("ls-tree", "-r", "--name-only", tag).decode().split("\n")
    except subprocess.CalledProcessError as e:
        raise LookupError(f"AITER_GIT has no {tag}: it has to be a whole clone, with its tags") from e
    take_out(tag, folder, *(p for p in there if p in FILES or p.endswith(ENDINGS) or UNTUNED.fullmatch(p)))
    return folder


def read(tag: str, found: Findings) -> Version:
    """The probe's answers in the form of the table."""
    link, case, trim = (
        w.verdict.replace("needed", _YES)
        for w in (found.workarounds[n] for n in ("asm_dir_symlink", "tile_column_case", "k_trim"))
    )
    assert found.problems == ()
    return Version(tag, link, case, trim, found.k256_sound, found.promised, len(found.families))


def table(versions: Sequence[Version]) -> str:
    """The rows of the table in docs/explanation/aiter.md: each fact's value in the first version, then its changes."""
    rows = []
    for fact in ("link", "case", "trim", "k256", "promised"):
        values = [(v.tag, {True: "yes", False: "no"}.get(value := getattr(v, fact), value)) for v in versions]
        changes = [f"`{tag}` {now}" for (_, before), (tag, now) in pairwise(values) if now != before]
        rows.append(f"| {_NAMES[fact]} | {'; '.join([values[0][1], *changes])} |")
    return "\n".join(rows)


_NAMES = {
    "link": "`asm_dir_symlink`", "case": "`tile_column_case`", "trim": "`k_trim`", "k256": "K % 256 sound",
    "promised": "promised",
}  # fmt: skip

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(table([read(v.tag, inspect(tree_of(v.tag, Path(folder, v.tag)))) for v in VERSIONS]))
