"""Facts of each version of AITER, as its files were read by hand; the probe has to find the same.

`python -m tests.aiter.versions` (with AITER_GIT) prints the table of docs/explanation/aiter.md as the probe answers.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.aiter.checkout import git, take_out
from worker.tuners.aiter.inspect.findings import Findings, inspect

FILES = (
    "aiter/jit/core.py", "aiter/jit/utils/file_baton.py", "aiter/utility/base_tuner.py", "aiter/utility/mp_tuner.py",
    "aiter/utility/fp4_utils.py", "csrc/py_itfs_cu/asm_gemm_a4w4.cu", "op_tests/test_opus_a8w8_bmm.py",
    "csrc/opus_gemm/opus_gemm_common.py",
)  # fmt: skip
ENDINGS = ("_tune.py", "/fmoe_2stages/tune.py", "/gemm_tuner.py", "/GemmTuner.py", "/f4gemm_bf16_per1x32Fp4.csv")


@dataclass(frozen=True, slots=True)
class Version:
    """A tag. `timeout`: default of --timeout, "-" where there is no such option; `profile`: what -o2 keeps."""

    tag: str
    asm_dir: str
    case: str
    trim: str
    k256: bool
    sort: str
    timeout: str
    gfx: bool
    exits: bool
    topk: bool
    profile: str
    restarts: bool
    clock: str
    families: int = 9
    broken: tuple[str, ...] = ()


_CHIP, _HSA = "hsa/{gfx}", "hsa"
_NO, _YES, _BAD = "harmless", "needed", "harmful"
_M = ("fmoe",)
VERSIONS = (
    #        tag              asm_dir  case  trim  k256   sort     timeout gfx    exit 1 topk   -o2    restart clock
    Version("v0.1.5", _CHIP, _NO, _YES, False, "flag", "-", False, False, False, "none", False, "-", 8),
    Version("v0.1.5.post2", _CHIP, _NO, _YES, False, "flag", "-", False, False, True, "all", False, "-", 8),
    Version("v0.1.6", _CHIP, _NO, _YES, False, "flag", "-", False, False, True, "last", False, "-"),
    Version("v0.1.7", _CHIP, _NO, _YES, False, "flag", "-", False, False, True, "last", False, "-"),
    Version("v0.1.7.post5", _CHIP, _YES, _YES, False, "flag", "-", False, False, True, "last", False, "-"),
    Version("v0.1.8", _CHIP, _YES, _YES, False, "flag", "-", False, False, True, "all", False, "-"),
    Version("v0.1.9", _CHIP, _BAD, _YES, False, "flag", "-", False, False, True, "all", False, "-"),
    Version("v0.1.9.post1", _CHIP, _BAD, _YES, False, "flag", "None", False, False, True, "all", True, "batch", 9, _M),
    Version("v0.1.10", _HSA, _BAD, _YES, False, "flag", "None", False, False, True, "all", True, "batch"),
    Version("v0.1.10.post3", _CHIP, _BAD, _YES, False, "value", "None", False, True, True, "all", True, "batch"),
    Version("v0.1.11", _CHIP, _BAD, _YES, False, "value", "None", False, True, True, "all", True, "batch"),
    Version("v0.1.12", _CHIP, _BAD, _NO, False, "value", "None", False, True, True, "all", True, "batch"),
    Version("v0.1.12.post2", _CHIP, _BAD, _NO, False, "value", "None", True, True, True, "all", True, "batch"),
    Version("v0.1.13", _CHIP, _BAD, _NO, False, "value", "None", True, True, False, "all", True, "batch"),
    Version("v0.1.14", _CHIP, _BAD, _NO, True, "value", "None", True, True, False, "all", True, "batch"),
    Version("v0.1.16", _CHIP, _BAD, _NO, True, "value", "None", True, True, False, "all", True, "batch"),
    Version("v0.1.19", _CHIP, _BAD, _NO, True, "value", "None", True, True, False, "all", True, "batch"),
    Version("v0.1.19.post2", _CHIP, _BAD, _NO, True, "value", "None", True, True, False, "all", True, "task"),
    Version("v0.1.20", _CHIP, _BAD, _NO, True, "value", "1800", True, True, False, "all", True, "task", 10),
    Version("e4048607a5", _CHIP, _BAD, _NO, True, "value", "1800", True, True, False, "all", True, "task", 10),
)  # fmt: skip


def tree_of(tag: str, folder: Path) -> Path:
    """The files of a version that the probe reads, written below `folder`."""
    try:
        there = git("ls-tree", "-r", "--name-only", tag).decode().split("\n")
    except subprocess.CalledProcessError as e:
        raise LookupError(f"AITER_GIT has no {tag}: it has to be a whole clone, with its tags") from e
    take_out(tag, folder, *(p for p in there if p in FILES or p.endswith(ENDINGS)))
    return folder


def read(tag: str, found: Findings) -> Version:
    """The probe's answers in the form of the table."""
    a4w4, facts = found.families["a4w4_blockscale"], found.facts
    profile = "last" if facts.profile_keeps_last_batch else "all"
    return Version(
        tag=tag,
        asm_dir=found.asm_dir,
        case=found.workarounds["tile_column_case"].verdict,
        trim=found.workarounds["k_trim"].verdict,
        k256=found.k256_sound,
        sort=a4w4.flags["--sort"],
        timeout=str(a4w4.default_timeout) if "--timeout" in a4w4.flags else "-",
        gfx=facts.has_gfx_column,
        exits=facts.exits_nonzero,
        topk=facts.topk_fault,
        profile=profile if "--profile_file" in a4w4.flags else "none",
        restarts=facts.pool_restarts,
        clock=("batch" if facts.timeout_from_submission else "task") if "--timeout" in a4w4.flags else "-",
        families=len(found.families),
        broken=tuple(n for n, f in found.families.items() if f.broken),
    )


def cells(v: Version) -> dict[str, str]:
    """The version's values by the names that the table of docs/explanation/aiter.md gives them."""
    yes = {True: "yes", False: "no"}
    needed = {_YES: "**needed**"}
    return {
        "`asm_dir_symlink`": "**needed**" if v.asm_dir == _HSA else "harmless",
        "`tile_column_case`": needed.get(v.case, v.case),
        "`k_trim`": needed.get(v.trim, v.trim),
        "K % 256 sound": yes[v.k256],
        "`--sort`": v.sort,
        "`--timeout`": v.timeout,
        "it counts from": {"batch": "batch handed in", "task": "task begun", "-": "-"}[v.clock],
        "gfx column": yes[v.gfx],
        "exit code 1 on failure": yes[v.exits],
        "topk fault": yes[v.topk],
        "`-o2` keeps": v.profile,
        "lost process noticed": yes[v.restarts],
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
