"""Facts of each version of AITER, as its files were read by hand; the probe has to find the same.

`python -m tests.aiter.versions` (with AITER_GIT) prints the table of docs/explanation/aiter.md as the probe answers.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
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
    """A tag. `sort`, `timeout`: how the a4w4 script takes these options, "-" where it has none."""

    tag: str
    asm_dir: str
    case: str
    trim: str
    k256: bool
    promised: bool
    sort: str
    timeout: str
    families: int = 9


_CHIP, _HSA = "hsa/{gfx}", "hsa"
_NO, _YES, _BAD = "harmless", "needed", "harmful"
VERSIONS = (
    #        tag              asm_dir  case  trim  k256   promised sort  timeout
    Version("v0.1.5", _CHIP, _NO, _YES, False, False, "flag", "-", 8),
    Version("v0.1.6", _CHIP, _NO, _YES, False, False, "flag", "-"),
    Version("v0.1.7", _CHIP, _NO, _YES, False, True, "flag", "-"),
    Version("v0.1.7.post5", _CHIP, _YES, _YES, False, True, "flag", "-"),
    Version("v0.1.8", _CHIP, _YES, _YES, False, True, "flag", "-"),
    Version("v0.1.9", _CHIP, _BAD, _YES, False, True, "flag", "-"),
    Version("v0.1.10", _HSA, _BAD, _YES, False, True, "flag", "value"),
    Version("v0.1.11", _CHIP, _BAD, _YES, False, True, "value", "value"),
    Version("v0.1.13", _CHIP, _BAD, _NO, False, False, "value", "value"),
    Version("v0.1.14", _CHIP, _BAD, _NO, True, True, "value", "value"),
    Version("v0.1.19", _CHIP, _BAD, _NO, True, True, "value", "value"),
    Version("e4048607a5", _CHIP, _BAD, _NO, True, True, "value", "value", 10),
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
    flags = found.families["a4w4_blockscale"].flags
    return Version(
        tag=tag,
        asm_dir=found.asm_dir,
        case=found.workarounds["tile_column_case"].verdict,
        trim=found.workarounds["k_trim"].verdict,
        k256=found.k256_sound,
        promised=found.promised,
        sort=flags["--sort"],
        timeout=flags.get("--timeout", "-"),
        families=len(found.families),
    )


def cells(v: Version) -> dict[str, str]:
    """The version's values by the names that the table of docs/explanation/aiter.md gives them."""
    needed = {_YES: "**needed**"}
    return {
        "`asm_dir_symlink`": "**needed**" if v.asm_dir == _HSA else "harmless",
        "`tile_column_case`": needed.get(v.case, v.case),
        "`k_trim`": needed.get(v.trim, v.trim),
        "K % 256 sound": "yes" if v.k256 else "no",
        "promised": "yes" if v.promised else "no",
    }


def table(versions: Sequence[Version]) -> str:
    """The rows of the table in docs/explanation/aiter.md: each fact's value in the first version, then its changes."""
    first, *others = versions
    before = cells(first)
    changes = {fact: [value] for fact, value in before.items()}
    for version in others:
        now = cells(version)
        for fact, value in now.items():
            if value != before[fact]:
                changes[fact].append(f"`{version.tag}` {value}")
        before = now
    return "\n".join(f"| {fact} | {'; '.join(values)} |" for fact, values in changes.items())


def main() -> None:
    """Print the rows of the table."""
    found = []
    for version in VERSIONS:
        with tempfile.TemporaryDirectory() as folder:
            found.append(read(version.tag, inspect(tree_of(version.tag, Path(folder)))))
    print(table(found))


if __name__ == "__main__":
    main()
