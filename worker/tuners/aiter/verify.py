"""`worker verify`: runs AITER's own production operators with a tuned table."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker import PACKAGE_PARENT
from worker.aiter_tree.locate import NotATreeError
from worker.device import identify
from worker.families import FAMILIES
from worker.process import exit_words, run_in_foreground
from worker.protocol.paths import AITER_ROOT_ENV
from worker.text import clean
from worker.tuners.aiter.environment import (
    environment,
)
from worker.tuners.aiter.findings import inspect
from worker.tuners.aiter.image import tree_here
from worker.tuners.aiter.launch import TUNED, UNTUNED
from worker.tuners.aiter.modules import link_shipped_modules
from worker.tuners.aiter.script import TunerScript
from worker.tuners.aiter.session import BUILD_QUIET_S

VERIFY_MARK = "GEMMFLEET-VERIFY "


def verify(table: Path, name: str, slot_env: Mapping[str, str], until_eof: bool) -> int:
    """`worker verify`: run AITER's own production operators with a tuned table, by `--run_config` if it is there.

    Prints what AITER prints, between two lines of ours: which AITER it is, and how the script ended. Status 0 if the
    operators could be run at all.
    """
    here = identify()
    gfx = str(here["gfx"] or "")
    try:
        tree, notes = tree_here(gfx, name)
    except NotATreeError as e:
        return _report(supported=False, why=str(e))
    found = inspect(tree, gfx).families.get(name)
    answer: dict[str, Any] = {
        "gfx": gfx,
        "cu_num": here["cu_num"],
        "root": str(tree.root),
        "version": tree.version,
        "commit": tree.commit,
        "notes": list(notes)[:10],
    }
    if found is None:
        return _report(supported=False, why=f"this AITER has no script of {name}", **answer)
    lacks = "" if found.has("--run_config") else "this AITER has no --run_config (it came on 2026-04-14)"
    if lacks and not FAMILIES[name].format:
        return _report(supported=False, why=f"{lacks}, and bench has no inputs for {name}", **answer)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=os.environ.get("TMPDIR")) as scratch:
        folder = Path(scratch)
        for inside in ("jit/build", "tmp"):
            (folder / inside).mkdir(parents=True)
        link_shipped_modules(folder / "jit", tree.package)
        argv = _verify_command(found, name, table, folder)
        how = f"the operator itself: {lacks}" if lacks else ""
        env = {**environment({**os.environ, **slot_env}, tree.root, folder, here), "AITER_LOG_TUNED_CONFIG": "1"}
        fault = _import_fault(env, tree.root)
        if fault:
            return _report(supported=False, why=f"the AITER in {tree.root} cannot be imported: {fault}", **answer)
        _report(supported=True, table=str(folder / TUNED), how=how, **answer)
        if lacks:
            argv = [sys.executable, "-m", "worker.bench.verify", name, str(folder / TUNED)]
            path = os.pathsep.join([str(PACKAGE_PARENT), env["PYTHONPATH"]])
            env |= {FAMILIES[name].env: str(folder / TUNED), AITER_ROOT_ENV: str(tree.root), "PYTHONPATH": path}
        code = run_in_foreground(argv, env, tree.root, until_eof=until_eof)
    print(flush=True)
    return _report(code=code)


def _import_fault(env: Mapping[str, str], root: Path) -> str:
    """The last line of an `import aiter` that fails, or "". Otherwise every row would fail for this one reason."""
    argv = [sys.executable, "-c", "import aiter"]
    try:
        done = subprocess.run(argv, env=env, cwd=root, capture_output=True, timeout=BUILD_QUIET_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no end within {BUILD_QUIET_S:g} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.decode(errors="replace").splitlines()
    return clean(lines[-1], 300) if lines else exit_words(done.returncode)


def _verify_command(script: TunerScript, name: str, table: Path, folder: Path) -> list[str]:
    """The command line, with copies of the table and a list of its shapes, because the script has no default list."""
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
    """Print one of our lines; return 0."""
    print(VERIFY_MARK + json.dumps(what), flush=True)
    return 0
