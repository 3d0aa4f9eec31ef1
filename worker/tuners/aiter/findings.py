"""Reads the files of an AITER tree: its scripts, the workarounds that it needs, whether the shim fits.

`inspect(root)` works for a checkout or an installed package. It does not import AITER and needs no GPU. If a file
cannot be read, `problems` says so, and the answers are the careful ones. Flags are only read here; `make test-aiter`
runs real scripts with them.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.aiter_tree.locate import DEFAULT_GFX, Tree, TreeFiles, tree_at
from worker.families import FAMILIES
from worker.tuners.aiter.script import TunerScript, read_script
from worker.tuners.aiter.workarounds import WORKAROUNDS, Applicability, asm_dir

SHIM = Path(__file__).parent / "shim"
MP_TUNER = "aiter/utility/mp_tuner.py"
WINDOWS = "2025-11 to 2026-03, and v0.1.14 or later"
"""The AITERs that gemmfleet promises to drive."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings on a tree. `asm_dir`: the result of get_asm_dir(), `hsa/{gfx}` or `hsa`, "" if unknown. `k256_sound`:
    scales are laid out correctly if K is not a multiple of 256. `promised`: the tree is in one of WINDOWS. `files`:
    hashes by name. `misfit`: why the shim cannot be used on its mp_tuner.py, "" if it can."""

    tree: Tree
    gfx: str
    families: Mapping[str, TunerScript]
    asm_dir: str
    workarounds: Mapping[str, Applicability]
    k256_sound: bool
    promised: bool
    files: Mapping[str, str]
    problems: tuple[str, ...]
    misfit: str

    def as_json(self) -> dict[str, Any]:
        """The document that `worker probe --aiter-root` prints (docs/how-to/new-aiter.md)."""
        families = {
            name: {
                "script": str(script.path.relative_to(self.tree.root)),
                "flags": dict(script.flags),
                "columns": list(script.columns),
            }
            for name, script in self.families.items()
        }
        workarounds = {n: {"verdict": w.verdict, "evidence": list(w.evidence)} for n, w in self.workarounds.items()}
        return {
            "tree": self.tree.as_json(),
            "gfx": self.gfx,
            "promised": self.promised,
            "families": families,
            "asm_dir": self.asm_dir,
            "workarounds": workarounds,
            "k256_sound": self.k256_sound,
            "files": dict(self.files),
            "problems": list(self.problems),
        }


def inspect(root: Path | Tree, gfx: str = DEFAULT_GFX) -> Findings:
    """Findings on the tree at `root` for a chip. Raises NotATreeError if it is not a tree of AITER."""
    gfx = gfx if gfx.startswith("gfx") else DEFAULT_GFX
    tree = root if isinstance(root, Tree) else tree_at(Path(root), gfx=gfx)
    files = TreeFiles(tree)
    core = tree.package / "jit" / "core.py"
    quantiser = tree.package / "utility" / "fp4_utils.py"
    scales = files.text(quantiser)
    # one group of 32 rows to the next has to count the padding (ROCm/aiter d6cefa9783, 2026-04-30, v0.1.14)
    sound = bool(re.search(r"bs_offs_0\s*\*\s*2\s*\*\s*16\s*\*\s*scaleN_pad\b", scales))
    merges_tables = "model_configs" in files.text(core)  # since 2025-11-05
    trims_scales = bool(re.search(r":\s*scaleN_valid\s*\]", scales))  # since 2026-03
    tuners = [tree.package / "utility" / name for name in ("base_tuner.py", "mp_tuner.py")]
    texts = {path: files.text(path) for path in (core, *tuners, quantiser, *tree.scripts.values())}
    return Findings(
        tree=tree,
        gfx=gfx,
        families={name: read_script(files, FAMILIES[name], path) for name, path in tree.scripts.items()},
        asm_dir=asm_dir(files),
        workarounds={workaround.name: workaround.predicate(files, gfx) for workaround in WORKAROUNDS.values()},
        k256_sound=sound,
        promised=sound or (merges_tables and not trims_scales),
        files={files.name(path): hashlib.sha256(text.encode()).hexdigest() for path, text in texts.items() if text},
        problems=tuple(files.problems),
        misfit=shim_misfit(files.text(tree.package / "utility" / "mp_tuner.py")),
    )


def shim_misfit(source: str) -> str:
    """The reason why the shim cannot wrap the functions of this mp_tuner.py, "" if it can."""
    try:
        nodes = ast.parse(source).body
    except (SyntaxError, ValueError) as e:
        return f"{MP_TUNER} cannot be read: {e}"
    functions = {n.name: n for n in nodes if isinstance(n, ast.FunctionDef)}
    worker, group = functions.get("worker"), functions.get("work_group")
    if worker is None or group is None:
        return "it has no functions worker and work_group"
    if "info" not in [a.arg for a in worker.args.args]:
        return "its function worker takes no info"
    if not any(isinstance(n, ast.Call) and getattr(n.func, "id", "") == "worker" for n in ast.walk(group)):
        return "its function work_group does not call worker"
    returns = [n.value for n in ast.walk(worker) if isinstance(n, ast.Return)]
    if not returns or not all(isinstance(r, ast.Tuple) and len(r.elts) == 3 for r in returns):
        return "its function worker does not return (info, us, error)"
    return ""
