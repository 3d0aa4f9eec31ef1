"""`worker verify`: runs AITER's own production operators with a tuned table.

AITER's script does it by --run_config, which came on 2026-04-14; for an older one worker/bench/verify.py calls the
operator itself. `gemmfleet verify` on the controller starts this on a node and reads what is printed:

    GEMMFLEET-VERIFY {"supported": true, "table": "...", "how": "", "gfx": "gfx950", ...}
    ... what AITER prints ...
    GEMMFLEET-VERIFY {"code": 0}
"""

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
from worker.families import FAMILIES, Family
from worker.process import exit_words, run_in_foreground
from worker.protocol.paths import AITER_ROOT_ENV
from worker.text import clean
from worker.tuners.aiter.environment import environment
from worker.tuners.aiter.findings import inspect
from worker.tuners.aiter.image import tree_here
from worker.tuners.aiter.launch import TUNED, UNTUNED
from worker.tuners.aiter.modules import link_shipped_modules
from worker.tuners.aiter.script import TunerScript
from worker.tuners.aiter.session import BUILD_QUIET_S

VERIFY_MARK = "GEMMFLEET-VERIFY "


def verify(table: Path, family_name: str, slot_env: Mapping[str, str], until_eof: bool) -> int:
    """Run AITER's own production operators with a tuned table. Return 0 if they could be run at all.

    Prints what AITER prints, between two lines of ours: which AITER it is, and how the script ended. `until_eof`: end
    the run when our standard input closes.
    """
    here = identify()
    gfx = str(here["gfx"] or "")
    try:
        tree, notes = tree_here(gfx, family_name)
    except NotATreeError as e:
        return _report(supported=False, why=str(e))
    answer: dict[str, Any] = {
        "gfx": gfx,
        "cu_num": here["cu_num"],
        "root": str(tree.root),
        "version": tree.version,
        "commit": tree.commit,
        "notes": list(notes)[:10],
    }
    family = FAMILIES[family_name]
    script = inspect(tree, gfx).families.get(family_name)
    if script is None:
        return _report(supported=False, why=f"this AITER has no script of {family_name}", **answer)
    runs_tables = script.has("--run_config")
    how = "" if runs_tables else "the operator itself: this AITER has no --run_config (it came on 2026-04-14)"
    if not runs_tables and not family.format:
        why = how.removeprefix("the operator itself: ")
        return _report(supported=False, why=f"{why}, and bench has no inputs for {family_name}", **answer)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=os.environ.get("TMPDIR")) as scratch:
        folder = Path(scratch)
        for inside in ("jit/build", "tmp"):
            (folder / inside).mkdir(parents=True)
        link_shipped_modules(folder / "jit", tree.package)
        command = _script_command(script, family, table, folder)
        env = {**environment({**os.environ, **slot_env}, tree.root, folder, here), "AITER_LOG_TUNED_CONFIG": "1"}
        fault = _import_fault(env, tree.root)
        if fault:
            return _report(supported=False, why=f"the AITER in {tree.root} cannot be imported: {fault}", **answer)
        _report(supported=True, table=str(folder / TUNED), how=how, **answer)
        if not runs_tables:
            command = [sys.executable, "-m", "worker.bench.verify", family_name, str(folder / TUNED)]
            env[family.env] = str(folder / TUNED)
            env[AITER_ROOT_ENV] = str(tree.root)
            env["PYTHONPATH"] = os.pathsep.join([str(PACKAGE_PARENT), env["PYTHONPATH"]])
        code = run_in_foreground(command, env, tree.root, until_eof=until_eof)
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


def _script_command(script: TunerScript, family: Family, table: Path, folder: Path) -> list[str]:
    """The command line, with copies of the table and a list of its shapes, because the script has no default list."""
    unused = folder / "unused.csv"
    for copy in (folder / TUNED, unused):
        copy.write_bytes(table.read_bytes())
    with table.open(newline="") as f, (folder / UNTUNED).open("w", newline="") as untuned:
        writer = csv.writer(untuned, lineterminator="\n")
        writer.writerow(family.key_names)
        for row in csv.DictReader(f):
            writer.writerow([row.get(column, "") for column in family.key_names])
    words = [sys.executable, str(script.path), "--run_config", str(folder / TUNED), "-i", str(folder / UNTUNED)]
    words += ["-o", str(unused)]
    return words + [flag for flag in family.aiter.flags if script.has(flag)]


def _report(**fields: Any) -> int:
    """Print one of our lines; return 0."""
    print(VERIFY_MARK + json.dumps(fields), flush=True)
    return 0
