"""The shim in AITER's processes: what it knows, leaves out and keeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.standins.aiter.kernel_lists import CK2, tree
from tests.support.files import write_files
from worker.aiter_tree.kernel_lists import KernelLists
from worker.aiter_tree.locate import tree_at
from worker.protocol import Spec, SpecShape, TableKernel
from worker.tuners.aiter.blocked import BlockedEntry, CandidateId, SlotIdentity
from worker.tuners.aiter.choice import CandidateChoice, chosen_candidates
from worker.tuners.aiter.findings import SHIM, shim_misfit

MP_TUNER = """
def worker(gpu_id, info, func, args, kwargs, ref=None):
    if func == "raises":
        print(f"run gpu func warning: info:{info} boom")
        return info, -1, 1.0
    return info, 1.0, 0.0

def work_group(tasks):
    return [worker(0, *t) for t in tasks]
"""


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (MP_TUNER, ""),
        (MP_TUNER.replace("info", "what"), "takes no info"),
        (MP_TUNER.replace("return info, 1.0, 0.0", "return info"), "does not return (info, us, error)"),
        (MP_TUNER.replace("worker(0, *t)", "t"), "does not call worker"),
        (MP_TUNER.replace("def work_group", "def other"), "no functions worker and work_group"),
        ("def worker(:", "cannot be read"),
    ],
)
def test_the_shim_is_used_only_on_what_it_knows(source: str, why: str) -> None:
    found = shim_misfit(source)
    assert bool(found) == bool(why)
    assert why in found


def shimmed(folder: Path, tasks: str, choice: CandidateChoice, func: str = "None") -> tuple[str, list[dict[str, Any]]]:
    """Output of a pool with these tasks in an image with a sitecustomize of its own, and the shim's journal."""
    write_files(folder, {
        "aiter/__init__.py": "", "aiter/utility/__init__.py": "", "aiter/utility/mp_tuner.py": MP_TUNER,
        "sitecustomize.py": "import builtins; builtins.IMAGE_SAYS = 'hello'\n",
    })  # fmt: skip
    program = f"tasks = [(i, {func}, (), {{}}) for i in {tasks}]\nfrom aiter.utility import mp_tuner\n"
    program += "print(IMAGE_SAYS, mp_tuner.work_group(tasks))"
    choice.write(folder / "blocked.jsonl")
    env = {**os.environ, "PYTHONPATH": f"{SHIM}:{folder}", "GEMMFLEET_AITER_WATCH": str(folder)}
    said = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert ("hello " in said.stdout, said.stderr) == (True, "")
    return said.stdout, [json.loads(line) for line in (folder / "candidates.jsonl").read_text().splitlines()]


def test_the_shim_leaves_out_what_is_blocked_and_keeps_what_a_candidate_said(tmp_path: Path) -> None:
    five = CandidateId(("256", "1", "2", "3"), ("5", "0", ""))
    entries = {five: BlockedEntry(SlotIdentity("s", "i"), "a8w8", five, "fault", "", 1.0)}
    tasks = "[((256, 1, 2, 3), n, 0, '') for n in (4, 5)]"
    printed, steps = shimmed(tmp_path, tasks, CandidateChoice(entries), func="'raises'")
    assert [f"{s['event']} {s['candidate'][0]}" for s in steps] == ["begin 4", "end 4", "blocked 5"]
    assert "((256, 1, 2, 3), 5, 0, ''), inf, 1.0)" in printed
    assert steps[1]["said"] == "run gpu func warning: info:((256, 1, 2, 3), 4, 0, '') boom"


def test_the_shim_finds_kernels_of_a_table_by_name_and_unnamed_ones_by_this_trees_number(tmp_path: Path) -> None:
    tasks = (
        "[(k, n, s, name) for k in (('gfx950', 256, 1, 2, 3), ('gfx950', 256, 4, 2, 3))"
        " for n, s, name in ((0, 0, ''), (1, 0, ''), (1, 1, ''), (7, 0, '_ZN_asm'))]"
    )
    old = [("ck", "0", CK2, "0"), ("asm", "1", "_ZN_asm", "0"), ("asm", "7", "_ZN_gone", "0")]
    spec = Spec("a", "r", 1, family="a4w4_blockscale", shapes=(SpecShape(5, {"M": 1, "N": 2, "K": 3}),))
    spec = replace(spec, only={"5": [TableKernel(*k)._asdict() for k in old]})
    chosen = chosen_candidates(KernelLists(tree_at(tree(tmp_path / "tree"))), "gfx950", spec)
    first = {"libtype": "ck", "numbers": ["1"], "name": CK2, "split": "0"}
    assert chosen[0]["only"][0] == first, "number 1 here, 0 in the table's image"
    _, steps = shimmed(tmp_path / "image", tasks, CandidateChoice(only=chosen))
    ran = [(s["key"][2], *s["candidate"][:2]) for s in steps if s["event"] == "end"]
    assert ran == [("1", "1", "0"), ("1", "7", "0"), *(("4", n, s) for n, s in ("00", "10", "11", "70"))]
