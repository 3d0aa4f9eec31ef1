"""Reads the files of an AITER tree: its scripts and their options, and which workarounds it needs.

`inspect(root)` answers for a checkout or an installed package. It imports nothing of AITER and needs no GPU. A file
that cannot be read is a sentence in `problems`; the answers are then the careful ones.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from worker.aiter_tree.locate import DEFAULT_GFX, Tree, read_text, tree_at
from worker.families import FAMILIES, Family
from worker.text import clean

A4W4 = "a4w4_blockscale"
LIST = "f4gemm/f4gemm_bf16_per1x32Fp4.csv"
"""The a4w4 script's list of ASM kernels, below get_asm_dir()."""
PRODUCTS = re.compile(r"^(?P<indent>[ \t]*)(?P<name>[xw]_f32) = (?P=name) \* (?P<scales>[xw]_scales_f32)[ \t]*$", re.M)
"""The lines of the a4w4 script's run_torch() where an operand meets its scales."""
_TILES = re.compile(r"""["'](tile_[mMnN])["']""")
_FLAG_ACTIONS = frozenset(("store_true", "store_false", "store_const", "append_const", "count", "help", "version"))
WINDOWS = "2025-11 to 2026-03, and v0.1.14 or later"
"""The AITERs that gemmfleet promises to drive."""


@dataclass(frozen=True, slots=True)
class Applicability:
    """Verdict on a workaround (`needed`, `harmless` if it would change nothing, or `harmful`) and its evidence: texts
    of the form `file:line: what stands there`."""

    verdict: str
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TunerScript:
    """One family's script. `flags`: each long option, `flag` or `value`, by the files until a run has asked the
    script's own --help. `columns`: those of its untuned CSV, in AITER's words."""

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
        return {
            "tree": self.tree.as_json(),
            "gfx": self.gfx,
            "promised": self.promised,
            "families": {
                name: {
                    "script": str(script.path.relative_to(self.tree.root)),
                    "flags": dict(script.flags),
                    "columns": list(script.columns),
                }
                for name, script in self.families.items()
            },
            "asm_dir": self.asm_dir,
            "workarounds": {
                name: {"verdict": found.verdict, "evidence": list(found.evidence)}
                for name, found in self.workarounds.items()
            },
            "k256_sound": self.k256_sound,
            "files": dict(self.files),
            "problems": list(self.problems),
        }


class _Files:
    """The files of a tree by their paths below its root, each read once. `problems`: what could not be read."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.problems: list[str] = []
        self.text = cache(self._read)

    def name(self, path: Path) -> str:
        return path.relative_to(self.tree.root).as_posix()

    def at(self, path: Path, pattern: str) -> list[str]:
        """The first place where a regular expression matches, as evidence; empty if there is none."""
        text = self.text(path)
        found = re.search(pattern, text, re.M)
        if found is None:
            return []
        number = text.count("\n", 0, found.start()) + 1
        return [f"{self.name(path)}:{number}: {clean(text.splitlines()[number - 1], 200)}"]

    def _read(self, path: Path) -> str:
        try:
            return read_text(path)
        except FileNotFoundError:
            return ""
        except (OSError, ValueError) as e:
            self.problems.append(f"{clean(self.name(path), 200)} cannot be read: {e}")
            return ""


def inspect(root: Path | Tree, gfx: str = DEFAULT_GFX) -> Findings:
    """Findings on the tree at `root` for a chip. Raises NotATreeError if there is none."""
    tree = root if isinstance(root, Tree) else tree_at(Path(root), gfx=gfx)
    files = _Files(tree)
    core, quantiser = tree.package / "jit" / "core.py", tree.package / "utility" / "fp4_utils.py"
    where = _asm_dir(files.text(core))
    trimmed = bool(files.at(quantiser, r":\s*scaleN_valid\s*\]"))
    # one group of 32 rows to the next has to count the padding (ROCm/aiter d6cefa9783, 2026-04-30, v0.1.14)
    sound = bool(re.search(r"bs_offs_0\s*\*\s*2\s*\*\s*16\s*\*\s*scaleN_pad\b", files.text(quantiser)))
    inside = (tree.package / "utility" / name for name in ("base_tuner.py", "mp_tuner.py"))
    hashed = [core, *inside, quantiser, *dict.fromkeys(tree.scripts.values())]
    return Findings(
        tree,
        gfx,
        {name: _script(files, FAMILIES[name], path) for name, path in tree.scripts.items()},
        where,
        {
            "asm_dir_symlink": _symlink(files, core, where, gfx),
            "tile_column_case": _case(files, where, gfx),
            "k_trim": _trim(files, quantiser, trimmed),
        },
        sound,
        sound
        or ("model_configs" in files.text(core) and not trimmed),  # merged since 2025-11-05, trimmed since 2026-03
        {files.name(p): hashlib.sha256(text.encode()).hexdigest() for p in hashed if (text := files.text(p))},
        tuple(files.problems),
    )


# --- scripts --------------------------------------------------------------------------------------------------------


def _script(files: _Files, family: Family, path: Path) -> TunerScript:
    """The family's script, with the columns of the list of shapes that AITER ships for it."""
    listed = files.text(files.tree.package / "configs" / family.untuned_csv).split("\n", 1)[0]
    columns = tuple(c.strip() for c in listed.split(",") if c.strip())
    return TunerScript(path, _flags(files, path, set()), columns or family.to_aiter(family.key_names))


def _flags(files: _Files, path: Path, seen: set[Path]) -> dict[str, str]:
    """The long options of a script and of the tuners that it imports, read flatly: whatever is added is an option, but
    for those of an imported tuner that the script takes back (`if "--splitK" in action.option_strings`)."""
    seen.add(path)
    try:
        tree = ast.parse(files.text(path))
    except (SyntaxError, ValueError, RecursionError) as e:
        files.problems.append(f"{files.name(path)} is no Python that can be parsed here: {clean(str(e), 120)}")
        return {}
    out: dict[str, str] = {}
    nodes = list(ast.walk(tree))
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
            words = {k.arg: k.value for k in node.keywords}
            action = words.get("action")
            both = getattr(action, "attr", "") == "BooleanOptionalAction"
            kind = "flag" if both or getattr(action, "value", None) in _FLAG_ACTIONS else "value"
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            long = [n for n in names if n.startswith("--")]
            out |= dict.fromkeys([*long, *(f"--no-{n[2:]}" for n in long if both)], kind)
    return out


# --- workarounds ----------------------------------------------------------------------------------------------------


def _asm_dir(core: str) -> str:
    """Result of get_asm_dir(), below the tree's meta folder: `hsa/{gfx}` or `hsa`; "" if it is unknown."""
    body = re.search(r"^def get_asm_dir\(\)[^\n]*\n(?:[ \t][^\n]*\n)*?[ \t]+return ([^\n]+)", core, re.M)
    value = body[1].strip() if body else ""
    if re.fullmatch(r"\w+", value):
        given = re.search(rf"^[ \t]*{value}\s*=\s*([^\n]+)", core, re.M)
        value = given[1] if given else ""
    return "hsa/{gfx}" if "gfx" in value else "hsa" if "hsa" in value else ""


def _symlink(files: _Files, core: Path, where: str, gfx: str) -> Applicability:
    """Verdict on linking the chip's folders to where get_asm_dir() leads: each family has its lists in one of them."""
    seen = files.at(core, r"AITER_ASM_DIR\s*=|def get_asm_dir")
    real, there = files.tree.meta / "hsa" / gfx, files.tree.meta / where.format(gfx=gfx)
    missed = [p for p in sorted(real.glob("*/")) if where and p.is_dir() and not (there / p.name).exists()]
    if not missed:
        return Applicability("harmless", (*seen, f"get_asm_dir() leads to {where or 'a folder that is unknown'}"))
    lies = f"{files.name(missed[0])}: is where it lies"
    return Applicability("needed", (*seen, f"{files.name(there / missed[0].name)}: is where AITER looks", lies))


def asm_list(tree: Tree, where: str, gfx: str) -> Path | None:
    """The a4w4 script's list of ASM kernels."""
    places = (tree.meta / (place or "hsa").format(gfx=gfx) / LIST for place in (where, "hsa/{gfx}"))
    return next((p for p in places if p.is_file()), None)


def _case(files: _Files, where: str, gfx: str) -> Applicability:
    """Verdict on giving the script the list's names of its columns.

    Never the list the script's: a C++ struct is made of the list's header, so whoever renames it (the older guides'
    fix) breaks the production kernel too.
    """
    path, script = asm_list(files.tree, where, gfx), files.tree.scripts.get(A4W4)
    if script is None or path is None:
        what = "no a4w4 script" if script is None else f"no {LIST} for {gfx}"
        return Applicability("harmless", (f"{what} here, so there is nothing to agree on",))
    header = {c.strip() for c in files.text(path).split("\n", 1)[0].split(",")}
    names = set(_TILES.findall(files.text(script)))
    evidence = (*files.at(path, r"\A"), *files.at(script, _TILES.pattern))
    if names and not names <= header and {n.lower() for n in names} <= {c.lower() for c in header}:
        return Applicability("needed", evidence)
    if names and names <= header and header & {"tile_M", "tile_N"}:
        struct = files.at(files.tree.meta / "csrc" / "py_itfs_cu" / "asm_gemm_a4w4.cu", r"\btile_M\b")
        return Applicability("harmful", (*evidence, *struct))
    return Applicability("harmless", evidence)


def _trim(files: _Files, quantiser: Path, trimmed: bool) -> Applicability:
    """Verdict on trimming the scales in the reference of the a4w4 script, which multiplies them by operands
    that are as wide as K (the quantiser does it by itself since ROCm/aiter e6af9a487d)."""
    script = files.tree.scripts.get(A4W4)
    ours = files.at(script, PRODUCTS.pattern) if script else []
    padded = files.at(quantiser, r"scaleN\s*=\s*.*\*\s*8\b")
    if trimmed or not ours or not files.text(quantiser):
        return Applicability("harmless", (*files.at(quantiser, r":\s*scaleN_valid\s*\]"), *ours))
    return Applicability("needed", (*padded, *ours))
