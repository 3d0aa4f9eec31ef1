"""Capabilities of an AITER tree, read from its files: no import of aiter, no GPU, no version looked up in a table.

`inspect(root)` answers for a checkout or an installed package. Files that are missing, unreadable or written in a way
that no rule here knows are sentences in `problems`; answers then lean to the careful side, as the evidence shows.

Kinds of candidate that a shape should have on a chip are read too, for AITER may lose one silently (another chip's name
in the environment, a list of kernels that is not where it is looked for). Each kind comes with its conditions on a
shape: `COLUMN % N,...` (a multiple of one of them) or `COLUMN = VALUE,...`.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from worker.aiter_tree.locate import DEFAULT_GFX, Tree, tree_at
from worker.aiter_tree.reading import Evidence, TreeReader, read_text
from worker.families import FAMILIES, Family, fp8_cell
from worker.tuners.aiter.inspect import version_facts
from worker.tuners.aiter.inspect.a4w4 import (
    A4W4,
    LIST,
    asm_dir,
    case_verdict,
    scales_sound,
    symlink_verdict,
    trim_verdict,
)
from worker.tuners.aiter.inspect.script import (
    OWN,
    Script,
    arguments,
    ignored,
    key_columns,
    read_script,
    undefined_defaults,
)

Kinds = dict[str, list[str]]
"""Kind (as in libtype) to its conditions, all of which have to hold."""
_BOTH = ("ck", "cktile")

_BF16 = "bf16gemm/bf16gemm_fp32bf16.csv"
WORKAROUNDS = ("asm_dir_symlink", "tile_column_case", "k_trim")


def expected(tree: Tree, family: Family, gfx: str, words: tuple[str, ...] = ()) -> Kinds:
    """Kinds of candidate of a family's shapes. `words`: the user's further arguments for the script."""
    script = tree.scripts.get(family.name)
    if script is None:
        return {}
    try:
        text = read_text(script)
    except (OSError, ValueError):
        return {}

    def rows(rel: str) -> list[dict[str, str]]:
        return _rows(tree.meta / "hsa" / gfx / rel) if rel.split("/")[0] in text else []

    only, rule = family.aiter.only_backend, _FAMILIES.get(family.name)
    found = rule(text, rows, gfx) if rule else {only: list[str]()} if only else {}
    wanted = _wanted(words)
    return {kind: where for kind, where in found.items() if wanted is None or kind in wanted}


def _a4w4(text: str, rows: Callable[[str], list[dict[str, str]]], gfx: str) -> Kinds:
    return {"ck": [], **({"asm": []} if rows(LIST) else {})}


def _blockscale(text: str, rows: Callable[[str], list[dict[str, str]]], gfx: str) -> Kinds:
    return {"ck": [], **_cktile(text, [])}


def _blockscale_bpreshuffle(text: str, rows: Callable[[str], list[dict[str, str]]], gfx: str) -> Kinds:
    shuffled = [r for r in rows("fp8gemm_blockscale/fp8gemm_bf16_blockscale.csv") if r.get("bpreshuffle") == "1"]
    return {**_blockscale(text, rows, gfx), **_asm(shuffled, [])}


def _a8w8_bpreshuffle(text: str, rows: Callable[[str], list[dict[str, str]]], gfx: str) -> Kinds:
    fp8 = [f"q_dtype_w = {fp8_cell(gfx)}"]
    int8 = ["q_dtype_w = torch.int8"]
    return {"ck": fp8, **_cktile(text, fp8), **_asm(rows("i8gemm/i8gemm_bf16_perTokenI8.csv"), int8)}


def _a16w16(text: str, rows: Callable[[str], list[dict[str, str]]], gfx: str) -> Kinds:
    if "get_asm_dir" not in text:  # gradlib's wrapper, whose tuner always tries hipBLASLt
        return {"hipblaslt": []}
    shuffled = sorted({"True" if r.get("bPreshuffle") == "1" else "False" for r in rows(_BF16)})
    plain = ["bias = False", "scaleAB = False", "dtype = torch.bfloat16", "K % 64", "N % 64"]
    return {"asm": [*plain, "bpreshuffle = " + ",".join(shuffled)]} if shuffled else {}


_FAMILIES: dict[str, Callable[[str, Callable[[str], list[dict[str, str]]], str], Kinds]] = {
    A4W4: _a4w4,
    "a8w8_blockscale": _blockscale,
    "a8w8_blockscale_bpreshuffle": _blockscale_bpreshuffle,
    "a8w8_bpreshuffle": _a8w8_bpreshuffle,
    "a16w16": _a16w16,
    "fmoe": lambda text, rows, gfx: {},  # which kinds a shape has depends on its quantisation in many ways
}


def _cktile(text: str, where: list[str]) -> Kinds:
    return {"cktile": where} if '"cktile"' in text or "'cktile'" in text else {}


def _asm(rows: list[dict[str, str]], where: list[str]) -> Kinds:
    tiles = sorted({int(n) for r in rows if (n := r.get("tile_n", r.get("tile_N", ""))).isdigit() and int(n)})
    return {"asm": [*where, "N % " + ",".join(map(str, tiles))]} if tiles else {}


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        lines = csv.DictReader(io.StringIO(read_text(path)), skipinitialspace=True)
        return [{str(k).strip(): str(v).strip() for k, v in line.items()} for line in lines]
    except (OSError, ValueError, csv.Error):
        return []


def _wanted(words: tuple[str, ...]) -> set[str] | None:
    """The kinds that `--libtype` leaves, None for all."""
    out: set[str] = set()
    taking = False
    for word in words:
        if word.startswith("-"):
            name, sep, word = word.partition("=")
            taking = name == "--libtype"
            if not sep:
                continue
        if taking:
            out |= set(word.split(","))
    if not out or "all" in out:
        return None
    return out | set(_BOTH) if "both" in out else out


@dataclass(frozen=True, slots=True)
class Applicability:
    """Verdict on a workaround (`needed`, `harmless` if it would change nothing, or `harmful`) and its evidence."""

    verdict: str
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class FamilyFindings:
    """One family's script in this tree.

    `flags`: each long option, `flag` or `value`. `key_columns`: what its tables are keyed by, gfx and cu_num among
    them. `defaults`: of options whose default the files show. `ignored`: options that it offers and does nothing with
    when it tunes. `broken`: why the script cannot run at all, "" where nothing speaks against it.
    """

    path: Path
    flags: Mapping[str, str]
    key_columns: tuple[str, ...]
    defaults: Mapping[str, object] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    broken: str = ""
    topk_fault: bool = False
    profile_keeps_last_batch: bool = False
    prefers_hipblaslt: bool = False
    timeout_from_submission: bool = False

    def has(self, flag: str) -> bool:
        return flag in self.flags

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns of its untuned CSV."""
        return tuple(c for c in self.key_columns if c not in OWN)

    @property
    def default_timeout(self) -> int | None:
        """AITER's own limit of a task in seconds; None where it waits for ever or has no such option."""
        value = self.defaults.get("--timeout")
        return value if isinstance(value, int) else None


@dataclass(frozen=True, slots=True)
class TreeFacts:
    """Facts that differ between dates; those of the a4w4 script where a family may differ (see FamilyFindings)."""

    shared_base: bool = False
    topk_fault: bool = False
    profile_keeps_last_batch: bool = False
    timeout_from_submission: bool = False
    has_gfx_column: bool = False
    exits_nonzero: bool = False
    groups_reindexed: bool = False
    pool_restarts: bool = False
    checks_partial_writes: bool = False
    clears_stale_locks: bool = False
    duplicates_fatal: bool = False


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings on a tree. `asm_dir`: what get_asm_dir() returns, `hsa/{gfx}` or `hsa`, "" where unknown."""

    tree: Tree
    gfx: str
    families: Mapping[str, FamilyFindings]
    asm_dir: str
    workarounds: Mapping[str, Applicability]
    k256_sound: bool
    facts: TreeFacts
    evidence: Mapping[str, tuple[Evidence, ...]]
    files: Mapping[str, str]
    problems: tuple[str, ...]

    def kinds(self, family: str) -> Kinds:
        """Kinds of candidate that the family's shapes should have on this chip, with their conditions."""
        return expected(self.tree, FAMILIES[family], self.gfx)


def inspect(root: Path | Tree, gfx: str = DEFAULT_GFX) -> Findings:
    """Findings on the tree at `root` for a chip. Raises NotATreeError where there is none."""
    tree = root if isinstance(root, Tree) else tree_at(Path(root), gfx=gfx)
    reader = TreeReader(tree.root)
    evidence: dict[str, tuple[Evidence, ...]] = {}
    scripts = {name: read_script(reader, tree, path) for name, path in tree.scripts.items()}
    families = {name: _family(tree, name, path, scripts[name], evidence) for name, path in tree.scripts.items()}
    a4w4 = scripts.get(A4W4)
    core = reader.source(tree.package / "jit" / "core.py")
    where, seen = asm_dir(core)
    quantiser = reader.source(tree.package / "utility" / "fp4_utils.py")
    sound, why = scales_sound(quantiser)
    evidence["k256_sound"] = tuple(why)
    judged = (
        symlink_verdict(tree, reader, a4w4, gfx, where, seen),
        case_verdict(tree, reader, a4w4, gfx, where),
        trim_verdict(quantiser, a4w4),
    )
    workarounds = {n: Applicability(v, tuple(e)) for n, (v, e) in zip(WORKAROUNDS, judged, strict=True)}
    facts = _facts(reader, tree, families, a4w4, evidence)
    of_pool = facts.timeout_from_submission
    families = {name: replace(family, timeout_from_submission=of_pool) for name, family in families.items()}
    files = {
        source.name: hashlib.sha256(source.text.encode()).hexdigest()
        for source in map(reader.source, _files(tree))
        if source is not None
    }
    return Findings(
        tree, gfx, families, where, workarounds, sound, facts, evidence, files, tuple(reader.problems)
    )  # fmt: skip


def _family(
    tree: Tree, name: str, path: Path, script: Script | None, evidence: dict[str, tuple[Evidence, ...]]
) -> FamilyFindings:
    if script is None:
        return FamilyFindings(path, {}, (), broken="the script cannot be read")
    options = arguments(script)
    flags = {long: o.kind for o in options for long in o.long}
    columns, where = key_columns(script)
    if where:
        evidence[f"{name}.key_columns"] = (where,)
    unused = ignored(script, options)
    if unused:
        evidence[f"{name}.ignored"] = tuple(unused.values())
    broken, broken_at = "", undefined_defaults(script)
    if broken_at:
        broken = f"it ends with a KeyError before it reads its arguments ({broken_at})"
    else:
        dies, broken_at = version_facts.loses_arguments(script)
        broken = f"it ends with an AttributeError at its first shape ({broken_at})" if dies else ""
        lacks, needed_at = version_facts.lacks_a_test(script, tree.meta)
        broken = broken or (f"it imports a file of op_tests/, which a wheel leaves out ({needed_at})" if lacks else "")
    facts = {
        "topk_fault": version_facts.topk_fault(script),
        "profile_keeps_last_batch": version_facts.profile_keeps_last_batch(script),
        "prefers_hipblaslt": version_facts.prefers_hipblaslt(script),
    }
    evidence.update({f"{name}.{what}": (at,) for what, (_, at) in facts.items() if at})
    return FamilyFindings(
        path,
        flags,
        columns,
        defaults={long: o.default for o in options for long in o.long if o.default is not ...},
        ignored=tuple(sorted(unused)),
        broken=broken,
        **{what: value for what, (value, _) in facts.items()},
    )


def _facts(
    reader: TreeReader,
    tree: Tree,
    families: Mapping[str, FamilyFindings],
    a4w4: Script | None,
    evidence: dict[str, tuple[Evidence, ...]],
) -> TreeFacts:
    base = reader.source(tree.package / "utility" / "base_tuner.py")
    pool = reader.source(tree.package / "utility" / "mp_tuner.py")
    first = families.get(A4W4) or next(iter(families.values()), None)
    read: dict[str, version_facts.Fact] = {
        "topk_fault": version_facts.topk_fault(a4w4),
        "profile_keeps_last_batch": version_facts.profile_keeps_last_batch(a4w4),
        "timeout_from_submission": version_facts.timeout_from_submission(pool),
        "exits_nonzero": version_facts.exits_nonzero(base),
        "groups_reindexed": version_facts.groups_reindexed(pool),
        "pool_restarts": version_facts.pool_restarts(pool),
        "checks_partial_writes": version_facts.checks_partial_writes(pool),
        "clears_stale_locks": version_facts.clears_stale_locks(
            reader.source(tree.package / "jit" / "utils" / "file_baton.py")
        ),
        "duplicates_fatal": version_facts.duplicates_fatal(reader.source(tree.package / "jit" / "core.py")),
    }
    evidence.update({name: (at,) for name, (_, at) in read.items() if at})
    return TreeFacts(
        shared_base=base is not None,
        has_gfx_column=bool(first and "gfx" in first.key_columns),
        **{name: value for name, (value, _) in read.items()},
    )


def _files(tree: Tree) -> list[Path]:
    """Files that distinguish states of a tree, also where no commit is known."""
    inside = ("jit/core.py", "utility/base_tuner.py", "utility/mp_tuner.py", "utility/fp4_utils.py")
    return [*(tree.package / name for name in inside), *dict.fromkeys(tree.scripts.values())]
