"""Reads the files of an AITER tree: scripts and their options, the workarounds that it needs, whether the shim fits.

`inspect(root)` works for a checkout or an installed package. It does not import AITER and needs no GPU. If a file
cannot be read, `problems` says so, and the answers are the careful ones. Flags are only read here; `make test-aiter`
runs real scripts with them.

A workaround is applied only if its predicate holds for the files of that tree. It changes a scratch copy, and the
record has hashes of each file before and after. If it changes nothing, it is refused.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.aiter_tree.locate import DEFAULT_GFX, ScratchTree, Tree, TreeFiles, digest, tree_at
from worker.families import FAMILIES, Family
from worker.text import clean

A4W4 = "a4w4_blockscale"
LIST = "f4gemm/f4gemm_bf16_per1x32Fp4.csv"
"""The a4w4 script's list of ASM kernels, below get_asm_dir()."""
_PRODUCTS = re.compile(r"^(?P<indent>[ \t]*)(?P<name>[xw]_f32) = (?P=name) \* (?P<scales>[xw]_scales_f32)[ \t]*$", re.M)
"""The lines of the a4w4 script's run_torch() where an operand meets its scales."""
_TRIMMED = r"\g<indent>\g<name> = \g<name> * \g<scales>[..., : \g<name>.shape[-1]]"
_TILES = re.compile(r"""["'](tile_[mMnN])["']""")
Edit = tuple[str, "bytes | str"]
"""Path below the root, and its new content, or where it is to lead as a link."""


class WorkaroundRefusedError(Exception):
    """A workaround that is not applied; the text says why."""


@dataclass(frozen=True, slots=True)
class Applicability:
    """Verdict on a workaround (`needed`, `harmless` if it would change nothing, or `harmful`) and its evidence: texts
    of the form `file:line: what stands there`."""

    verdict: str
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Workaround:
    """`predicate`: whether a tree's files need it for a chip; `fix`: what it changes in the scratch copy. `source`: the
    commits of ROCm/aiter that brought and mended the fault. `families`: whose runs it is for, empty for all.
    `only_odd_k`: only for shapes whose K has to be padded."""

    name: str
    predicate: Callable[[TreeFiles, str], Applicability]
    fix: Callable[[TreeFiles, str, ScratchTree], list[Edit]]
    source: str
    families: tuple[str, ...] = ()
    only_odd_k: bool = False


Applied = Mapping[str, Any]
"""Record of a workaround in use: `name`, `source`, `evidence`, `files` with hashes before and after ("": no file)."""


def needed(found: Findings, family: Family, keys: Iterable[Mapping[str, object]] = ()) -> list[str]:
    """The workarounds that a family's shapes need on this tree, in the order in which to apply them."""
    step = family.aiter.pads_k_to
    odd = step and any(int(str(k.get("K") or 0)) % step for k in keys)
    return [
        w.name
        for w in WORKAROUNDS.values()
        if found.workarounds[w.name].verdict == "needed"
        and (not w.families or family.name in w.families)
        and (odd or not w.only_odd_k)
    ]


def prepare(found: Findings, names: Iterable[str], folder: Path) -> tuple[ScratchTree, tuple[Applied, ...]]:
    """A scratch copy in `folder` with these workarounds, which are needed on this tree.

    Raises WorkaroundRefusedError and OSError; the real tree is as it was, whatever happens.
    """
    scratch = ScratchTree.make(found.tree, folder)
    return scratch, tuple(_apply(name, found, scratch) for name in names)


def _apply(name: str, found: Findings, scratch: ScratchTree) -> Applied:
    workaround, evidence = WORKAROUNDS[name], found.workarounds[name].evidence
    files = []
    for rel, new in workaround.fix(TreeFiles(found.tree), found.gfx, scratch):
        before = digest(scratch.folder / rel)
        scratch.write(rel, new) if isinstance(new, bytes) else scratch.link(rel, new)
        files.append({"file": rel, "sha256_before": before, "sha256_after": digest(scratch.folder / rel)})
    if workaround.predicate(TreeFiles(scratch.tree), found.gfx).verdict == "needed":
        raise WorkaroundRefusedError(f"{name} was tried on a scratch copy and mended nothing: {'; '.join(evidence)}")
    return {"name": name, "source": workaround.source, "files": files, "evidence": list(evidence)}


def asm_dir(files: TreeFiles) -> str:
    """Result of get_asm_dir(), below the tree's meta folder: `hsa/{gfx}` or `hsa`; "" if it is unknown."""
    core = files.text(files.tree.package / "jit" / "core.py")
    body = re.search(r"^def get_asm_dir\(\)[^\n]*\n(?:[ \t][^\n]*\n)*?[ \t]+return ([^\n]+)", core, re.M)
    value = body[1].strip() if body else ""
    if re.fullmatch(r"\w+", value):
        given = re.search(rf"^[ \t]*{value}\s*=\s*([^\n]+)", core, re.M)
        value = given[1] if given else ""
    return "hsa/{gfx}" if "gfx" in value else "hsa" if "hsa" in value else ""


def _is_list_missed(files: TreeFiles, gfx: str) -> Applicability:
    """Each family has its lists in one of the chip's folders."""
    where, meta = asm_dir(files), files.tree.meta
    seen = files.at(files.tree.package / "jit" / "core.py", r"AITER_ASM_DIR\s*=|def get_asm_dir")
    there = meta / where.format(gfx=gfx)
    missed = [p for p in sorted((meta / "hsa" / gfx).glob("*/")) if p.is_dir() and not (there / p.name).exists()]
    if not where or not missed:
        return Applicability("harmless", (*seen, f"get_asm_dir() leads to {where or 'a folder that is unknown'}"))
    lies = f"{files.name(missed[0])}: is where it lies"
    return Applicability("needed", (*seen, f"{files.name(there / missed[0].name)}: is where AITER looks", lies))


def _link_lists(files: TreeFiles, gfx: str, scratch: ScratchTree) -> list[Edit]:
    """Every folder of hsa/<gfx> also where get_asm_dir() looks."""
    real = files.tree.meta / "hsa"
    below = (scratch.tree.meta / "hsa").relative_to(scratch.folder)
    names = sorted(p.name for p in (real / gfx).iterdir())
    return [((below / n).as_posix(), f"{gfx}/{n}") for n in names if not os.path.lexists(real / n)]


def _list_header(files: TreeFiles, gfx: str) -> tuple[Path | None, list[str]]:
    """The a4w4 script's list of ASM kernels, and its columns."""
    places = (files.tree.meta / (w or "hsa").format(gfx=gfx) / LIST for w in (asm_dir(files), "hsa/{gfx}"))
    path = next((p for p in places if p.is_file()), None)
    return path, [c.strip() for c in files.text(path).split("\n", 1)[0].split(",")] if path else []


def _is_case_mixed(files: TreeFiles, gfx: str) -> Applicability:
    """Never the list is given the script's names: a C++ struct is made of the list's header, so whoever renames it (the
    older guides' fix) breaks the production kernel too."""
    (path, columns), script = _list_header(files, gfx), files.tree.scripts.get(A4W4)
    if script is None or path is None:
        what = "no a4w4 script" if script is None else f"no {LIST} for {gfx}"
        return Applicability("harmless", (f"{what} here, so there is nothing to agree on",))
    header, names = set(columns), set(_TILES.findall(files.text(script)))
    evidence = (*files.at(path, r"\A"), *files.at(script, _TILES.pattern))
    if names and not names <= header and {n.lower() for n in names} <= {c.lower() for c in header}:
        return Applicability("needed", evidence)
    if names and names <= header and header & {"tile_M", "tile_N"}:
        struct = files.at(files.tree.meta / "csrc" / "py_itfs_cu" / "asm_gemm_a4w4.cu", r"\btile_M\b")
        return Applicability("harmful", (*evidence, *struct))
    return Applicability("harmless", evidence)


def _case_of_list(files: TreeFiles, gfx: str, scratch: ScratchTree) -> list[Edit]:
    """The list's own names of its columns in the script."""
    theirs = {c.lower(): c for c in _list_header(files, gfx)[1]}
    return _edited(scratch, lambda text: _TILES.sub(lambda m: m[0].replace(m[1], theirs[m[1].lower()]), text))


def _is_reference_padded(files: TreeFiles, gfx: str) -> Applicability:
    """The reference of the a4w4 script multiplies padded scales by operands that are as wide as K (the quantiser trims
    them by itself since ROCm/aiter e6af9a487d)."""
    script, quantiser = files.tree.scripts.get(A4W4), files.tree.package / "utility" / "fp4_utils.py"
    ours = files.at(script, _PRODUCTS.pattern) if script else []
    trimmed = files.at(quantiser, r":\s*scaleN_valid\s*\]")
    if trimmed or not ours or not files.text(quantiser):
        return Applicability("harmless", (*trimmed, *ours))
    return Applicability("needed", (*files.at(quantiser, r"scaleN\s*=\s*.*\*\s*8\b"), *ours))


def _trim_scales(files: TreeFiles, gfx: str, scratch: ScratchTree) -> list[Edit]:
    """Scales no wider than their operand in the reference. Operands stay whole: only padding goes."""
    return _edited(scratch, lambda text: _PRODUCTS.sub(_TRIMMED, text))


def _edited(scratch: ScratchTree, edit: Callable[[str], str]) -> list[Edit]:
    """The a4w4 script of the copy, as it is now, edited."""
    path = scratch.tree.scripts[A4W4]
    text = edit(TreeFiles(scratch.tree).text(path))
    ast.parse(text)  # nothing that does not parse is ever run
    return [(path.relative_to(scratch.folder).as_posix(), text.encode())]


WORKAROUNDS: dict[str, Workaround] = {
    w.name: w
    for w in (
        Workaround(
            "asm_dir_symlink", _is_list_missed, _link_lists,
            "ROCm/aiter ce08b75719 (2026-01-13) to cfb9de7325 (2026-01-16): aiter/jit/core.py",
        ),
        Workaround(
            "tile_column_case", _is_case_mixed, _case_of_list,
            "ROCm/aiter 9b01b0d818 (2025-11-22) to 0e38ec8038 (2025-12-19): the a4w4 script", (A4W4,),
        ),
        Workaround(
            "k_trim", _is_reference_padded, _trim_scales,
            "ROCm/aiter until e6af9a487d (2026-03-18): aiter/utility/fp4_utils.py", (A4W4,), only_odd_k=True,
        ),
    )
}  # fmt: skip
"""In the order in which they are applied."""


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
    """Findings on the tree at `root` for a chip. Raises NotATreeError if it is not a tree of AITER."""
    gfx = gfx if gfx.startswith("gfx") else DEFAULT_GFX
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
        shim_misfit(files.text(tree.package / "utility" / "mp_tuner.py")),
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
