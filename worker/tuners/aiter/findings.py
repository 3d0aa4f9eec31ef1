"""Reads the files of an AITER tree: its scripts and their options, which workarounds it needs, whether the shim fits.

`inspect(root)` answers for a checkout or an installed package. It imports nothing of AITER and needs no GPU. A file
that cannot be read is a sentence in `problems`; the answers are then the careful ones. Flags are read here and nowhere
else: `make test-aiter` compares them with the scripts' own parsers.
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
from worker.families import FAMILIES, Family
from worker.text import clean
from worker.tuners.aiter.workarounds import WORKAROUNDS, Applicability, asm_dir

SHIM = Path(__file__).parent / "shim"
MP_TUNER = "aiter/utility/mp_tuner.py"
WINDOWS = "2025-11 to 2026-03, and v0.1.14 or later"
"""The AITERs that gemmfleet promises to drive."""
_FLAG_ACTIONS = frozenset(("store_true", "store_false", "store_const", "append_const", "count", "help", "version"))


@dataclass(frozen=True, slots=True)
class TunerScript:
    """One family's script. `flags`: each long option, `flag` or `value`. `columns`: those of its untuned CSV, in
    AITER's words."""

    path: Path
    flags: Mapping[str, str]
    columns: tuple[str, ...]

    def has(self, flag: str) -> bool:
        return flag in self.flags


@dataclass(frozen=True, slots=True)
class Findings:
    """`asm_dir`: what get_asm_dir() returns, `hsa/{gfx}` or `hsa`, "" if unknown. `k256_sound`: scales are laid out
    rightly where K is no multiple of 256. `promised`: the tree lies in one of WINDOWS. `files`: hashes by name."""

    tree: Tree
    gfx: str
    families: Mapping[str, TunerScript]
    asm_dir: str
    workarounds: Mapping[str, Applicability]
    k256_sound: bool
    promised: bool
    files: Mapping[str, str]
    problems: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The document that `worker probe --aiter-root` prints (docs/how-to/new-aiter.md)."""
        families = {
            name: {
                "script": str(script.path.relative_to(self.tree.root)), "flags": dict(script.flags),
                "columns": list(script.columns),
            }
            for name, script in self.families.items()
        }  # fmt: skip
        workarounds = {n: {"verdict": w.verdict, "evidence": list(w.evidence)} for n, w in self.workarounds.items()}
        return {
            "tree": self.tree.as_json(), "gfx": self.gfx, "promised": self.promised, "families": families,
            "asm_dir": self.asm_dir, "workarounds": workarounds, "k256_sound": self.k256_sound,
            "files": dict(self.files), "problems": list(self.problems),
        }  # fmt: skip


def inspect(root: Path | Tree, gfx: str = DEFAULT_GFX) -> Findings:
    """Findings on the tree at `root` for a chip. Raises NotATreeError if there is none."""
    tree = root if isinstance(root, Tree) else tree_at(Path(root), gfx=gfx)
    files = TreeFiles(tree)
    core, quantiser = tree.package / "jit" / "core.py", tree.package / "utility" / "fp4_utils.py"
    scales = files.text(quantiser)
    # one group of 32 rows to the next has to count the padding (ROCm/aiter d6cefa9783, 2026-04-30, v0.1.14)
    sound = bool(re.search(r"bs_offs_0\s*\*\s*2\s*\*\s*16\s*\*\s*scaleN_pad\b", scales))
    merges, trims = "model_configs" in files.text(core), bool(re.search(r":\s*scaleN_valid\s*\]", scales))
    inside = (tree.package / "utility" / name for name in ("base_tuner.py", "mp_tuner.py"))
    hashed = [core, *inside, quantiser, *dict.fromkeys(tree.scripts.values())]
    return Findings(
        tree,
        gfx,
        {name: _script(files, FAMILIES[name], path) for name, path in tree.scripts.items()},
        asm_dir(files),
        {w.name: w.predicate(files, gfx) for w in WORKAROUNDS.values()},
        sound,
        sound or (merges and not trims),  # tables are merged since 2025-11-05, scales trimmed since 2026-03
        {files.name(p): hashlib.sha256(text.encode()).hexdigest() for p in hashed if (text := files.text(p))},
        tuple(files.problems),
    )


def _script(files: TreeFiles, family: Family, path: Path) -> TunerScript:
    """The family's script, with the columns of the list of shapes that AITER ships for it."""
    listed = files.text(files.tree.package / "configs" / family.untuned_csv).split("\n", 1)[0]
    columns = tuple(c.strip() for c in listed.split(",") if c.strip())
    return TunerScript(path, _flags(files, path, set()), columns or family.to_aiter(family.key_names))


def _flags(files: TreeFiles, path: Path, seen: set[Path]) -> dict[str, str]:
    """The long options of a script and of the tuners that it imports, read flatly: whatever is added is an option, but
    for those of an imported tuner that the script takes back (`if "--splitK" in action.option_strings`)."""
    seen.add(path)
    try:
        nodes = list(ast.walk(ast.parse(files.text(path))))
    except (SyntaxError, ValueError, RecursionError) as e:
        files.problem(f"{files.name(path)} is no Python that can be parsed here: {clean(str(e), 120)}")
        return {}
    out: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and any("Tuner" in a.name for a in node.names):
            parts = node.module.split(".")
            here = [path.parent, *sorted((files.tree.meta / "hsa").glob("gfx*"))]
            places = [files.tree.package.parent] if parts[0] == "aiter" else here
            found = (place.joinpath(*parts).with_suffix(".py") for place in places)
            other = next((p for p in found if p.is_file() and p not in seen), None)
            out |= _flags(files, other, seen) if other else {}
    for node in nodes:
        if isinstance(node, ast.Compare) and ast.unparse(node).endswith(".option_strings"):
            out.pop(str(getattr(node.left, "value", "")), None)
    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            action = {k.arg: k.value for k in node.keywords}.get("action")
            both = getattr(action, "attr", "") == "BooleanOptionalAction"
            kind = "flag" if both or getattr(action, "value", None) in _FLAG_ACTIONS else "value"
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            long = [n for n in names if n.startswith("--")]
            out |= dict.fromkeys([*long, *(f"--no-{n[2:]}" for n in long if both)], kind)
    return out


@dataclass(frozen=True, slots=True)
class ShimFit:
    """Fit of the shim to a tree's mp_tuner.py; `why` not. Hashes are sha256."""

    why: str
    target_sha256: str = ""
    shim_sha256: str = ""

    @property
    def fits(self) -> bool:
        return not self.why

    def as_json(self) -> dict[str, str]:
        """Data for provenance."""
        return {
            "name": "candidate_journal", "target": MP_TUNER, "sha256": self.target_sha256,
            "shim_sha256": self.shim_sha256, "state": f"not used: {self.why}" if self.why else "used",
        }  # fmt: skip


def shim_fit(package: Path) -> ShimFit:
    """Read `package`/utility/mp_tuner.py (`package`: the folder `aiter`). Needs no import and no GPU."""
    try:
        source = (package / "utility" / "mp_tuner.py").read_bytes()
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError) as e:
        return ShimFit(f"{MP_TUNER} cannot be read: {e}")
    hashes = (hashlib.sha256(s).hexdigest() for s in (source, (SHIM / "sitecustomize.py").read_bytes()))
    return ShimFit(_misfit({n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}), *hashes)


def _misfit(functions: Mapping[str, ast.FunctionDef]) -> str:
    """Reason that the shim cannot wrap these functions, "" if it can."""
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
