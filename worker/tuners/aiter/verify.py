"""`worker verify`: AITER's own production operators run with a tuned table (`--run_config`), if the version has it.

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

from worker.aiter_tree.locate import NotATreeError
from worker.device import identify
from worker.families import FAMILIES
from worker.process import run_in_foreground
from worker.tuners.aiter.findings import TunerScript, inspect
from worker.tuners.aiter.launch import TUNED, UNTUNED, chip_of, environment
from worker.tuners.aiter.modules import link_shipped_modules
from worker.tuners.aiter.session import tree_here

MARK = "GEMMFLEET-VERIFY "


def main(table: Path, name: str, slot_env: Mapping[str, str], until_eof: bool) -> int:
    """Verify the rows of `table`. Status 0 if the script could be run at all, or has no --run_config."""
    here = identify()
    gfx = str(here["gfx"] or "")
    try:
        tree, notes = tree_here(gfx, name)
    except NotATreeError as e:
        return _report(supported=False, why=str(e))
    found = (inspect(tree, gfx) if gfx.startswith("gfx") else inspect(tree)).families.get(name)
    answer: dict[str, Any] = {
        "gfx": gfx, "cu_num": here["cu_num"], "root": str(tree.root), "version": tree.version, "commit": tree.commit,
        "notes": list(notes)[:10],
    }  # fmt: skip
    if found is None:
        return _report(supported=False, why=f"this AITER has no script of {name}", **answer)
    if not found.has("--run_config"):
        return _report(supported=False, why="this AITER has no --run_config (it came on 2026-04-14)", **answer)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=os.environ.get("TMPDIR")) as scratch:
        folder = Path(scratch)
        for inside in ("jit/build", "tmp"):
            (folder / inside).mkdir(parents=True)
        link_shipped_modules(folder / "jit", tree.package)
        argv = _command(found, name, table, folder)
        _report(supported=True, table=str(folder / TUNED), **answer)
        env = environment({**os.environ, **slot_env}, tree.root, folder, chip=chip_of(here))
        try:
            code = run_in_foreground(argv, {**env, "AITER_LOG_TUNED_CONFIG": "1"}, tree.root, until_eof=until_eof)
        except OSError as e:
            print(f"{argv[0]}: {e}", flush=True)
            code = 127
    print(flush=True)
    return _report(code=code)


def _command(script: TunerScript, name: str, table: Path, folder: Path) -> list[str]:
    """The command line, with copies of the table and a list of its shapes: the script reads no list of its own."""
    family, unused = FAMILIES[name], folder / "unused.csv"
    for copy in (folder / TUNED, unused):
        copy.write_bytes(table.read_bytes())
    with table.open(newline="") as f, (folder / UNTUNED).open("w", newline="") as to:
        writer = csv.writer(to, lineterminator="\n")
        writer.writerow(family.key_names)
        writer.writerows([row.get(c, "") for c in family.key_names] for row in csv.DictReader(f))
    words = [sys.executable, str(script.path), "--run_config", str(folder / TUNED), "-i", str(folder / UNTUNED)]
    return [*words, "-o", str(unused), *(f for f in family.aiter.flags if script.has(f))]


def _report(**what: Any) -> int:
    """Print a line of ours; 0."""
    print(MARK + json.dumps(what), flush=True)
    return 0
