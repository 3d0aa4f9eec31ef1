"""Known faults of AITER trees in MXFP4 (a4w4): folder of ASM kernels, columns of their list, scales padded in K.

One scale covers 32 elements of K, and scales are padded to eight: K that is no multiple of 256 is a case of its own.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from worker.aiter_tree.locate import Tree
from worker.aiter_tree.reading import Evidence, SourceFile, TreeReader, called
from worker.tuners.aiter.inspect.script import Script

A4W4 = "a4w4_blockscale"
LIST = "f4gemm/f4gemm_bf16_per1x32Fp4.csv"
"""The a4w4 script's list below get_asm_dir(), unless the script names another."""
_TILES = ("tile_m", "tile_M", "tile_n", "tile_N")

PRODUCTS = re.compile(r"^(?P<indent>\s*)(?P<name>[xw]_f32) = (?P=name) \* (?P<scales>[xw]_scales_f32)\s*$")
"""The lines of run_torch() where an operand meets its scales."""
_TRIMMED = r":\s*scaleN_valid\s*\]"
_ROW_GROUP = re.compile(r"bs_offs_0\s*\*\s*2\s*\*\s*16\s*\*\s*(\w+)")


def asm_dir(core: SourceFile | None) -> tuple[str, list[Evidence]]:
    """Result of get_asm_dir(), below the tree's meta folder: `hsa/{gfx}` or `hsa`; "" where it is unknown."""
    if core is None or core.tree is None:
        return "", []
    function = next((n for n in core.walk() if isinstance(n, ast.FunctionDef) and n.name == "get_asm_dir"), None)
    returned = next((n for n in ast.walk(function) if isinstance(n, ast.Return)), None) if function else None
    if returned is None or returned.value is None:
        return "", [core.missing("get_asm_dir() is not defined here, or returns nothing")]
    seen: list[Evidence] = [core.at(returned.lineno)]
    try:
        value = _evaluate(core, returned.value, seen, 0)
    except ValueError as e:
        return "", [*seen, core.missing(f"get_asm_dir() cannot be read: {e}")]
    parts = [p for p in value.split("/") if p not in ("", ".")]
    if parts and parts[0] in ("{AITER_META_DIR}", "{AITER_ROOT_DIR}"):
        return "/".join(parts[1:]), seen
    return "", [*seen, core.missing(f"get_asm_dir() leads out of the tree: {value}")]


def list_of(script: Script | None) -> str:
    """The list's path below get_asm_dir() as the script has it."""
    for node in script.source.walk() if script else ():
        if isinstance(node, ast.JoinedStr) and any(
            isinstance(v, ast.FormattedValue) and called(v.value) == "get_asm_dir" for v in node.values
        ):
            text = "".join(str(v.value) for v in node.values if isinstance(v, ast.Constant))
            if text.endswith(".csv"):
                return text.strip("/")
    return LIST


def symlink_verdict(
    tree: Tree, reader: TreeReader, script: Script | None, gfx: str, where: str, seen: list[Evidence]
) -> tuple[str, list[Evidence]]:
    """Verdict on linking the chip's lists to where get_asm_dir() leads: lists of any family may be missing there."""
    if not where:
        return "harmless", [
            *seen,
            Evidence("aiter/jit/core.py", 0, "where get_asm_dir() leads is unknown: not applied"),
        ]
    rel = list_of(script)
    real, at = tree.meta / "hsa" / gfx, tree.meta / where.format(gfx=gfx)
    if real == at and _there(real / rel):
        return "harmless", [*seen, Evidence(reader.name(real / rel), 0, "is where get_asm_dir() leads")]
    names = [rel, *(n for n in _folders(real) if n != rel.split("/")[0])]
    missed = [n for n in names if _there(real / n) and not _there(at / n)]
    if missed:
        return "needed", [
            *seen,
            Evidence(reader.name(at / missed[0]), 0, "is where get_asm_dir() leads, and is not there"),
            Evidence(reader.name(real / missed[0]), 0, "is where it lies"),
        ]
    if not _there(real / rel):
        return "harmless", [*seen, Evidence(reader.name(real / rel), 0, f"there is no list of kernels for {gfx} here")]
    return "harmless", [*seen, Evidence(reader.name(at / rel), 0, "is where get_asm_dir() leads")]


def case_verdict(
    tree: Tree, reader: TreeReader, script: Script | None, gfx: str, where: str
) -> tuple[str, list[Evidence]]:
    """Verdict on giving the script the list's names of its columns.

    Never the list the script's: a C++ struct is made of the list's header, so whoever renames it (the older guides'
    fix) breaks the production kernel too.
    """
    rel = list_of(script)
    places = [tree.meta / (where or "hsa/{gfx}").format(gfx=gfx) / rel, tree.meta / "hsa" / gfx / rel]
    table = next((s for p in places if (s := reader.source(p)) is not None), None)
    if script is None or table is None:
        what = "no a4w4 script here" if script is None else f"no {rel} for {gfx} here"
        return "harmless", [Evidence(reader.name(tree.meta), 0, f"{what}, so there is nothing to agree on")]
    header = [c.strip() for c in table.text.split("\n", 1)[0].split(",")]
    theirs = table.at(1)
    named = _tile_columns(script.source)
    if not named:
        return "harmless", [theirs, script.source.missing("names no tile column in quotes")]
    names = {name for name, _ in named}
    ours = list(dict.fromkeys(line for _, line in named))[:2]
    if names <= set(header):
        if any(n in header for n in ("tile_M", "tile_N")):
            more = _struct(tree, reader)
            return "harmful", [theirs, *ours, *more]
        return "harmless", [theirs, *ours]
    if {n.lower() for n in names} <= {c.lower() for c in header}:
        return "needed", [theirs, *ours]
    return "harmless", [theirs, *ours, script.source.missing("script and list differ by more than the case of letters")]


def _tile_columns(source: SourceFile) -> list[tuple[str, Evidence]]:
    """Tile columns that the script names in quotes; the bare words are variables at every date."""
    out: dict[str, Evidence] = {}
    for node in source.walk():
        if isinstance(node, ast.Constant) and node.value in _TILES:
            out.setdefault(str(node.value), source.at(node.lineno))
    return list(out.items())


def _struct(tree: Tree, reader: TreeReader) -> list[Evidence]:
    code = reader.source(tree.meta / "csrc" / "py_itfs_cu" / "asm_gemm_a4w4.cu")
    found = code.find(r"\btile_M\b") if code else None
    return [found] if found else []


def _there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _folders(path: Path) -> list[str]:
    try:
        return sorted(p.name for p in path.iterdir() if p.is_dir())
    except OSError:
        return []


def _evaluate(core: SourceFile, node: ast.expr, seen: list[Evidence], depth: int) -> str:
    """A path as text, with {AITER_META_DIR}, {AITER_ROOT_DIR} and {gfx} in it. Raises ValueError."""
    if depth > 8:
        raise ValueError("it goes in circles")
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            _evaluate(core, v.value if isinstance(v, ast.FormattedValue) else v, seen, depth + 1) for v in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _evaluate(core, node.left, seen, depth + 1) + _evaluate(core, node.right, seen, depth + 1)
    if isinstance(node, ast.Subscript) and re.match(r"gfxs?\Z", ast.unparse(node.value)):
        return "{gfx}"
    name = called(node)
    if isinstance(node, ast.Call) and re.match(r"get_gfx(_\w+)?\Z", name):
        return "{gfx}"
    if isinstance(node, ast.Call) and name == "join":
        return "/".join(_evaluate(core, a, seen, depth + 1) for a in node.args)
    if isinstance(node, ast.Call) and name in ("abspath", "realpath", "normpath", "str", "Path") and node.args:
        return _evaluate(core, node.args[0], seen, depth + 1)
    if isinstance(node, ast.Name):
        if node.id in ("AITER_META_DIR", "AITER_ROOT_DIR"):
            return f"{{{node.id}}}"
        if node.id == "gfx":
            return "{gfx}"
        for other in core.walk():
            if isinstance(other, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == node.id for t in other.targets
            ):
                seen.append(core.at(other.lineno))
                return _evaluate(core, other.value, seen, depth + 1)
        raise ValueError(f"{node.id} is set nowhere in this file")
    raise ValueError(f"no rule for `{ast.unparse(node)[:80]}`")


def scales_sound(quantiser: SourceFile | None) -> tuple[bool, list[Evidence]]:
    """True if shuffled scales lie where kernels look for them when K is no multiple of 256: the step from one group
    of 32 rows to the next has to count the padding (ROCm/aiter d6cefa9783). Unknown counts as not."""
    if quantiser is None:
        return False, [Evidence("aiter/utility/fp4_utils.py", 0, "is not there: whether K % 256 is sound is unknown")]
    for number, line in enumerate(quantiser.text.split("\n"), 1):
        m = _ROW_GROUP.search(line)
        if m:
            return m[1] == "scaleN_pad", [quantiser.at(number)]
    return False, [quantiser.missing("steps from row group to row group in no way known here: counted as unsound")]


def trim_verdict(quantiser: SourceFile | None, script: Script | None) -> tuple[str, list[Evidence]]:
    """Verdict on trimming the scales in the reference of the a4w4 script, which multiplies them by operands
    that are as wide as K (the quantiser does it by itself since ROCm/aiter e6af9a487d)."""
    if script is None:
        return "harmless", [Evidence("csrc", 0, "no a4w4 script here, so there is no reference to trim for")]
    lines = products(script.source.text)
    ours = [script.source.at(n) for n in lines]
    if quantiser is None:
        missing = Evidence("aiter/utility/fp4_utils.py", 0, "is not there: whether scales come padded is unknown")
        return "harmless", [missing, *ours]
    trimmed = quantiser.find(_TRIMMED)
    if trimmed:
        return "harmless", [trimmed, *ours]
    if not ours:
        return "harmless", [script.source.missing("multiplies operands and scales in no line known here")]
    padded = quantiser.find(r"scaleN\s*=\s*.*\*\s*8\b") or quantiser.missing("returns scales untrimmed")
    return "needed", [padded, *ours]


def products(text: str) -> list[int]:
    """The numbers of those lines, from 1."""
    return [n for n, line in enumerate(text.split("\n"), 1) if PRODUCTS.match(line)]
