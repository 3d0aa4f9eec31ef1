"""`worker verify`: AITER's own production operators run with a tuned table (`--run_config`), where the version has it.

It prints what AITER prints, between two lines of ours: which AITER it is, and how the script ended.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker import PACKAGE_PARENT
from worker.aiter_tree.locate import NotATreeError, choose
from worker.device.probe import identify
from worker.families import FAMILIES, Family
from worker.process import run_in_foreground
from worker.protocol.paths import AITER_ROOT_ENV
from worker.tuners.aiter.environment import chip_of, environment, link_shipped_modules
from worker.tuners.aiter.findings import inspect

MARK = "GEMMFLEET-VERIFY "


def main(table: Path, name: str, slot_env: Mapping[str, str], until_eof: bool) -> int:
    """Verify the rows of `table`. Status 0 where the script could be run at all, or has no --run_config."""
    family = FAMILIES[name]
    here = identify()
    gfx = str(here["gfx"] or "")
    chip = gfx if gfx.startswith("gfx") else ""
    try:
        tree, notes = choose(os.environ.get(AITER_ROOT_ENV, ""), family=family.name, gfx=chip)
    except NotATreeError as e:
        _report({"supported": False, "why": str(e)})
        return 0
    found = (inspect(tree, chip) if chip else inspect(tree)).families.get(family.name)
    answer: dict[str, Any] = {
        "gfx": gfx, "cu_num": here["cu_num"], "root": str(tree.root), "version": tree.version, "commit": tree.commit,
        "notes": list(notes)[:10],
    }  # fmt: skip
    if found is None or "--run_config" not in found.flags:
        why = "this AITER has no --run_config (it came on 2026-04-14)"
        if found is None:
            why = f"this AITER has no script of {name}"
        _report({"supported": False, "why": why, **answer})
        return 0
    with tempfile.TemporaryDirectory(prefix="verify-", dir=os.environ.get("TMPDIR")) as scratch:
        folder = Path(scratch)
        mine = folder / "tuned.csv"
        _report({"supported": True, "table": str(mine), **answer})
        mine.write_bytes(table.read_bytes())
        (folder / "jit" / "build").mkdir(parents=True)
        link_shipped_modules(folder / "jit", tree.package)
        code_folder = PACKAGE_PARENT
        env = environment(
            {**os.environ, **slot_env},
            paths=[tree.root],
            jit=folder / "jit",
            tmp=folder,
            worker_code=code_folder,
            chip=chip_of(here),
        )
        env["AITER_LOG_TUNED_CONFIG"] = "1"
        argv = [sys.executable, str(found.path), "--run_config", str(mine), "-i", str(_untuned(mine, family, folder))]
        argv += ["-o", str(folder / "unused.csv"), *(f for f in family.aiter.flags if f in found.flags)]
        (folder / "unused.csv").write_bytes(mine.read_bytes())
        try:
            code = run_in_foreground(argv, env, tree.root, until_eof=until_eof)
        except OSError as e:
            print(f"{argv[0]}: {e}", flush=True)
            code = 127
    print(flush=True)
    _report({"code": code})
    return 0


def _untuned(table: Path, family: Family, folder: Path) -> Path:
    """The table's shapes, so that the script reads no list of its own."""
    out = folder / "untuned.csv"
    with table.open(newline="") as f, out.open("w", newline="") as to:
        writer = csv.writer(to, lineterminator="\n")
        writer.writerow(family.key_names)
        writer.writerows([row.get(c, "") for c in family.key_names] for row in csv.DictReader(f))
    return out


def _report(what: Mapping[str, Any]) -> None:
    print(MARK + json.dumps(what), flush=True)
