"""Reads the files of an AITER tree: its scripts, the workarounds that it needs, whether the shim fits.

`inspect(root)` works for a checkout or an installed package; image.py, `worker verify` and `worker probe` call it. It
does not import AITER and needs no GPU. If a file cannot be read, `problems` says so, and the answers are the careful
ones. Flags are only read here; `make test-aiter` runs real scripts with them.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
    """Findings on a tree for a chip."""

    tree: Tree
    gfx: str
    families: Mapping[str, TunerScript]
    """The tuner script of each family that has one here."""
    asm_dir: str
    """The result of AITER's get_asm_dir(): `hsa/{gfx}` or `hsa`, "" if unknown."""
    workarounds: Mapping[str, Applicability]
    """The verdict on each workaround, by its name."""
    k256_sound: bool
    """Scales are laid out correctly also if K is not a multiple of 256."""
    promised: bool
    """The tree is in one of WINDOWS."""
    files: Mapping[str, str]
    """sha256 of the files that decide about candidates and verdicts, by name."""
    problems: tuple[str, ...]
    misfit: str
    """The reason why the shim cannot be used on its mp_tuner.py, "" if it can."""

    def as_json(self) -> dict[str, Any]:
        """The document that `worker probe --aiter-root` prints (docs/how-to/new-aiter.md)."""
        families = {}
        for name, script in self.families.items():
            path = str(script.path.relative_to(self.tree.root))
            families[name] = {"script": path, "flags": dict(script.flags), "columns": list(script.columns)}
        return {
            "tree": self.tree.as_json(),
            "gfx": self.gfx,
            "promised": self.promised,
            "families": families,
            "asm_dir": self.asm_dir,
            "workarounds": {name: asdict(verdict) for name, verdict in self.workarounds.items()},
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
    utility = tree.package / "utility"
    quantiser = utility / "fp4_utils.py"
    mp_tuner = utility / "mp_tuner.py"
    scales = files.text(quantiser)
    # one group of 32 rows to the next has to count the padding (ROCm/aiter d6cefa9783, 2026-04-30, v0.1.14)
    is_k256_sound = bool(re.search(r"bs_offs_0\s*\*\s*2\s*\*\s*16\s*\*\s*scaleN_pad\b", scales))
    merges_tables = "model_configs" in files.text(core)  # since 2025-11-05
    trims_scales = bool(re.search(r":\s*scaleN_valid\s*\]", scales))  # since 2026-03
    hashes = {}
    for path in (core, utility / "base_tuner.py", mp_tuner, quantiser, *tree.scripts.values()):
        text = files.text(path)
        if text:
            hashes[files.name(path)] = hashlib.sha256(text.encode()).hexdigest()
    return Findings(
        tree=tree,
        gfx=gfx,
        families={name: read_script(files, FAMILIES[name], path) for name, path in tree.scripts.items()},
        asm_dir=asm_dir(files),
        workarounds={name: workaround.predicate(files, gfx) for name, workaround in WORKAROUNDS.items()},
        k256_sound=is_k256_sound,
        promised=is_k256_sound or (merges_tables and not trims_scales),
        files=hashes,
        problems=tuple(files.problems),
        misfit=shim_misfit(files.text(mp_tuner)),
    )


def shim_misfit(source: str) -> str:
    """The reason why the shim cannot wrap the functions of this mp_tuner.py, "" if it can."""
    try:
        nodes = ast.parse(source).body
    except (SyntaxError, ValueError) as e:
        return f"{MP_TUNER} cannot be read: {e}"
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    worker = functions.get("worker")
    group = functions.get("work_group")
    if worker is None or group is None:
        return "it has no functions worker and work_group"
    if "info" not in [parameter.arg for parameter in worker.args.args]:
        return "its function worker takes no info"
    called = [getattr(node.func, "id", "") for node in ast.walk(group) if isinstance(node, ast.Call)]
    if "worker" not in called:
        return "its function work_group does not call worker"
    returned = [node.value for node in ast.walk(worker) if isinstance(node, ast.Return)]
    triples = [value for value in returned if isinstance(value, ast.Tuple) and len(value.elts) == 3]
    if not returned or len(triples) < len(returned):
        return "its function worker does not return (info, us, error)"
    return ""
