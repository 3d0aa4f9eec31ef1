"""The document of `analyze`: the fastest valid row of each backend on each shape, speed-ups, share of the roofline.

The published figures are `data/reference_fp4.csv`, with their source in its first lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import combinations
from operator import itemgetter
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pandas as pd

from orchestrator.clean import text as clean
from orchestrator.errors import InputError
from orchestrator.families import GUIDE_FAMILY, backend_name, order
from orchestrator.files.cells import no_formula
from orchestrator.files.faults import escaped
from orchestrator.planning.roofline import CHIPS, Device, chip_of, roofline
from orchestrator.results.measurements import US, CleanLines, InputTable, InputTables, Layout, chunks, layout
from orchestrator.shapes.model import Key, element_type
from orchestrator.tables.keys import GFX_OF_CU_NUM
from worker import without_gc
from worker.families import Column, Family
from worker.text import did_you_mean, plural

LEAD = "asm"
"""The backend whose losses are listed: the one that AITER's dispatch prefers."""
COUNTED = ("no_time", "not_finite", "error_ratio")
"""The reasons why rows of a shape are left out; counts are kept in this order."""
MAX_GROUPS = 1_000_000
"""Shapes times backends. More is not a tuning result, and would not fit the memory."""
REFERENCE_FILE = Path(__file__).parent / "data" / "reference_fp4.csv"
OFF = 0.05
"""A published figure that deviates by more is marked."""
_DEVICE = ["gfx", "cu_num"]
Row = dict[str, Any]


def analyze(
    sources: InputTables, err_ratio: float | None = None, *, chip: str | None = None, reference: str | None = None
) -> dict[str, Any]:
    """Reads all sources and returns what is known of them as a JSON document (docs/reference/files.md).

    `rows` has a shape each; numbers are not rounded, None for none. `err_ratio`: the largest share of wrong elements
    that counts (default: the family's in AITER). fmoe is not judged: its columns hold text in percent, of measures
    that changed. `chip` names the roofline, `reference` the published figures to compare with. Raises InputError.
    """
    family = sources.family
    limit = family.aiter.err_ratio if err_ratio is None else err_ratio
    notes = list(sources.notes)
    with without_gc():
        with ThreadPoolExecutor(2) as threads:
            files = list(threads.map(lambda source: _File(source, family, limit), sources.files))
        notes += (note for f in files for note in f.lines.notes())
        best, wrong = (pd.concat(parts) for parts in zip(*((f.best, f.wrong) for f in files), strict=True))
        _adopt_unknown_device(best, wrong, family, notes)
        by = [*_DEVICE, *family.key_names, "backend"]
        best = _reduced(best, by).sort_values(by[2:])
        rows, pairs = _shape_rows(best, wrong, sources, notes)
        left_out_of = best.groupby("backend")[list(COUNTED)].sum()
        left_out = {reason: int(left_out_of[reason].sum()) for reason in COUNTED}
        left_out |= {"no_shape": sum(f.no_shape for f in files), "malformed": sum(f.lines.malformed for f in files)}
        if not rows and not any(left_out.values()):
            raise InputError([f"there are no rows in {', '.join(s.name for s in sources.files[:5])}", *notes])
        chips = _judge(rows, sources, chip or (reference if reference and reference.lower() in CHIPS else None), notes)
    wins = Counter(r["best"] for r in rows)
    backends = sorted(best[best.us.notna()].backend.unique(), key=order)
    shares = [r["roofline"]["share"] for r in rows if r["roofline"] and r["best"]]
    out: dict[str, Any] = {
        "title": sources.title,
        "family": family.name,
        "err_ratio": limit,
        "backends": backends,
        "rows": rows,
        "summary": {
            "shapes": len(rows),
            "wins": {b: wins[b] for b in backends},
            "pairs": [p for a, b in combinations(backends, 2) if (p := _pair(pairs, a, b))],
            "asm_loses": [r["shape"] for r in rows if (r["asm_over_best_other"] or 1) < 1],
            "beyond_err_ratio": [r["shape"] for r in rows if r["beyond_err_ratio"]],
            "no_backend": [r["shape"] for r in rows if not r["best"]],
            "roofline": {"chips": chips, "share": spread_of(shares)},
        },
        "left_out": {
            **left_out,
            "by_backend": {
                b: _counted(counts) for b, *counts in sorted(left_out_of.itertuples(), key=lambda r: order(r[0]))
                if any(counts)
            },
        },
        "inputs": [
            {"name": f.source.name, "bytes": f.source.path.stat().st_size, "rows": f.rows,
             "malformed": f.lines.malformed}
            for f in files
        ],
        "notes": list(dict.fromkeys(notes)),
    }  # fmt: skip
    if reference:
        out["reference"] = against_reference(out, reference)
    return out


def spread_of(shares: Sequence[float]) -> dict[str, float] | None:
    """Least, most and mean of some shares; None without any."""
    return {"min": min(shares), "max": max(shares), "mean": sum(shares) / len(shares)} if shares else None


def _shape_rows(
    best: pd.DataFrame, wrong: pd.DataFrame, sources: InputTables, notes: list[str]
) -> tuple[list[Row], pd.DataFrame]:
    """The shapes by device and key, not yet judged; and their times as a column a backend."""
    family = sources.family
    names = [*_DEVICE, *family.key_names]
    keys = pd.concat([best[names], wrong[names]])
    at = keys.groupby(names).ngroup().to_numpy()  # numbers from 0, in the order of devices and keys
    of_best, of_wrong = at[: len(best)], at[len(best) :]
    counts = best[list(COUNTED)].groupby(of_best).sum().to_numpy().tolist()
    every = _tuples(keys.iloc[np.unique(at, return_index=True)[1]], *names)
    rows = [_row(family, gfx, cu_num or None, key, c) for (gfx, cu_num, *key), c in zip(every, counts, strict=True)]
    flops = [family.flops(r["key"]) for r in rows]
    for i, (backend, us, kernel, err) in zip(of_best, _tuples(best, "backend", "us", "kernel", "err"), strict=True):
        if us is not None:
            found = {"tflops": flops[i] / us / 1e6, "us": us, "kernel": kernel, "err_ratio": err}
            rows[i]["backends"][backend] = found
    for i, (backend, kernel, err, us) in zip(of_wrong, _tuples(wrong, "backend", "kernel", "err", "us"), strict=True):
        rows[i]["beyond_err_ratio"].append({"backend": backend, "kernel": kernel, "err_ratio": err, "us": us})
    devices, there = {(r["gfx"], r["cu_num"]) for r in rows}, {tuple(r["key"].values()) for r in rows}
    device: Device = devices.pop() if len(devices) == 1 else ("", None)
    missing = dict.fromkeys(key for key in sources.requested if key not in there)
    rows += [_row(family, *device, key, (0, 0, 0)) for key in missing]
    rows.sort(key=lambda r: (r["gfx"], r["cu_num"] or 0, tuple(r["key"].values())))
    also = [c.name for c in family.columns if c.kind == "text" or c.legal]
    also = [name for name in also if len({r["key"][name] for r in rows}) > 1]
    sizes = [c.name for c in family.columns if c.kind == "int" and not c.legal]
    for r in rows:
        r["shape"] = key_text(r["key"], sizes, also)
    return rows, best.set_index([of_best, "backend"])["us"].unstack()


def _row(family: Family, gfx: str, cu_num: int | None, key: Sequence[int | str], counts: Sequence[int]) -> Row:
    return {
        "shape": "", "key": dict(zip(family.key_names, key, strict=True)), "gfx": gfx, "cu_num": cu_num, "backends": {},
        "best": None, "asm_over_best_other": None, "roofline": None, "left_out": _counted(counts),
        "beyond_err_ratio": [], "wrong_was_faster": False,
    }  # fmt: skip


def _counted(counts: Sequence[int]) -> dict[str, int]:
    return {reason: int(n) for reason, n in zip(COUNTED, counts, strict=True) if n} if any(counts) else {}


def key_text(key: Mapping[str, int | str], sizes: Sequence[str], also: Sequence[str]) -> str:
    """`16x1280x8192`, batch first, followed by `column=value` of the columns in `also`."""
    text = "x".join([str(key[name]) for name in sizes])
    return " ".join([text, *[f"{n}={str(key[n]).removeprefix('torch.')}" for n in also]]) if also else text


def _judge(rows: Sequence[Row], sources: InputTables, chip: str | None, notes: list[str]) -> list[dict[str, Any]]:
    """Fills in the winner of each shape and its share of the roofline; returns the chips. Raises InputError for an
    unknown `chip`."""
    devices = dict.fromkeys((r["gfx"], r["cu_num"]) for r in rows)
    known = {d: chip_of(d, sources.device_names, chip) for d in devices}
    limits = {d: roofline(sources.family, c) for d, (c, _) in known.items() if c is not None}
    typed, kinds = element_type(sources.family), {d: set[str]() for d in known}
    above: dict[str, list[tuple[float, str]]] = {"compute": [], "memory": []}
    for r in rows:
        device, key = (r["gfx"], r["cu_num"]), tuple(r["key"].values())
        of = r["backends"]
        ranked = sorted((x["us"], b) for b, x in of.items())
        r["best"] = won = ranked[0][1] if ranked else None
        if LEAD in of and (other := next((us for us, b in ranked if b != LEAD), None)):
            r["asm_over_best_other"] = other / of[LEAD]["us"]
        if wrong := r["beyond_err_ratio"]:
            r["wrong_was_faster"] = not ranked or min(w["us"] for w in wrong) < ranked[0][0]
        if device in limits and (roof := limits[device](key)):
            share = of[won]["tflops"] / roof.tflops if won else None
            r["roofline"] = {"tflops": roof.tflops, "bound": roof.bound, "intensity": roof.intensity, "share": share}
            if (kind := typed(key)) is not None:
                kinds[device].add(kind[0])
            if share is not None and share > 1:
                above[roof.bound].append((share, r["shape"]))
    if limits and not any(r["roofline"] for r in rows):
        notes.append(f"no roofline: the data sheets say nothing that fits {sources.family.name}")
    else:
        notes += [note for _, note in known.values() if note]
    notes += _above(above)
    return [
        {"gfx": gfx, "cu_num": cu_num, **(asdict(c) if c else {"name": None}), "types": sorted(kinds[gfx, cu_num])}
        for (gfx, cu_num), (c, _) in known.items()
    ]


def device_text(gfx: str, cu_num: int | None) -> str:
    """`gfx950 with 256 CUs`."""
    return f"{gfx or 'unknown chip'}{f' with {cu_num} CUs' if cu_num else ''}"


def _above(above: Mapping[str, list[tuple[float, str]]]) -> Iterator[str]:
    """Notes on winners that are faster than their roofline, the most striking one by name."""
    causes = {
        "compute": "the chip is another one (--chip), or the times are wrong",
        "memory": "the operands were in a cache, the chip is another one (--chip), or the times are wrong",
    }
    for bound, found in above.items():
        if found:
            share, shape = max(found, key=itemgetter(0))
            many = plural(len(found), "shape is", "shapes are")
            yield f"{many} above the {bound} roofline (most: {shape} at {share:.0%}): {causes[bound]}"


def _pair(us: pd.DataFrame, first: str, second: str) -> dict[str, Any] | None:
    """TFLOPS of `first` over those of `second` on the shapes that both have; the geometric mean does not depend on
    which of the two is divided by."""
    found = (us[second] / us[first]).dropna()
    if found.empty:
        return None
    return {
        "first": first, "second": second, "shapes": len(found), "wins": int((found > 1).sum()),
        "least": float(found.min()), "most": float(found.max()), "mean": float(found.mean()),
        "geomean": float(np.exp(np.log(found).mean())),
    }  # fmt: skip


def _tuples(frame: pd.DataFrame, *columns: str) -> Iterable[tuple[Any, ...]]:
    """The rows as tuples, None for NaN."""
    cells = (frame[c].astype(object).where(frame[c].notna(), None).tolist() for c in columns)
    return zip(*cells, strict=True)


def published() -> tuple[str, pd.DataFrame]:
    """(source of the published figures, the figures by chip, group, M, N, K)."""
    lines = REFERENCE_FILE.read_text().splitlines()
    source = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
    return source, pd.read_csv(REFERENCE_FILE, comment="#")


def against_reference(of: Mapping[str, Any], chip: str) -> dict[str, Any]:
    """Every published figure of the chip beside the winner here; `deviation` is measured / published - 1. Raises
    InputError."""
    source, figures = published()
    if chip.lower() not in (known := list(figures.chip.unique())):
        near = did_you_mean(chip, known)
        raise InputError(f"--reference {chip[:40]!r}{near}: there are figures of {', '.join(known)}")
    if of["family"] != GUIDE_FAMILY:
        raise InputError(f"--reference holds figures of {GUIDE_FAMILY}; these are results of {of['family']}")
    won: dict[Key, Row] = {}
    for r in of["rows"]:
        key, b = tuple(r["key"].values()), r["best"]
        if b and (key not in won or r["backends"][b]["us"] < won[key]["us"]):
            won[key] = {**{n: r["backends"][b][n] for n in ("tflops", "us")}, "backend": b}
    rows = figures[figures.chip == chip.lower()].drop(columns="chip").to_dict("records")
    for row in rows:
        here = won.get((row["M"], row["N"], row["K"]))
        deviation = here["tflops"] / row["tflops"] - 1 if here else None
        row |= {"measured": here, "deviation": deviation, "off": bool(here) and abs(deviation or 0.0) > OFF}
    return {"source": source, "rows": rows}


def write_csv(of: Mapping[str, Any], out: TextIO) -> None:
    """A line a shape: key columns, `<backend>_tflops,<backend>_us` each, best, kernel, asm_over_best_other, roofline.

    The file can be read by `analyze` again, as a benchmark.
    """
    last = ("best", "kernelName", "asm_over_best_other", "roofline_share", "rows_left_out")
    rows = []
    for r in of["rows"]:
        row: dict[str, object] = {"gfx": no_formula(r["gfx"]), "cu_num": r["cu_num"], **r["key"]}
        for b, best in r["backends"].items():
            row |= {f"{b}_tflops": f"{best['tflops']:.6g}", f"{b}_us": f"{best['us']:.6g}"}
        if won := r["best"]:
            row |= {"best": won, "kernelName": no_formula(r["backends"][won]["kernel"])}
        figures = {
            "asm_over_best_other": r["asm_over_best_other"],
            "roofline_share": (r["roofline"] or {}).get("share"),
        }
        row |= {name: f"{v:.4f}" for name, v in figures.items() if v is not None}
        rows.append({**row, "rows_left_out": sum(r["left_out"].values())})
    keys = list(of["rows"][0]["key"]) if rows else []
    measured = [f"{b}_{unit}" for b in of["backends"] for unit in ("tflops", "us")]
    columns = pd.Index(["gfx", "cu_num", *keys, *measured, *last])
    pd.DataFrame(rows, columns=columns, dtype=object).to_csv(out, index=False, lineterminator="\n")


def _adopt_unknown_device(best: pd.DataFrame, wrong: pd.DataFrame, family: Family, notes: list[str]) -> None:
    """Rows without gfx and cu_num belong to the one device that there is."""
    known = {(gfx, cu_num or None) for gfx, cu_num in best[_DEVICE].drop_duplicates().itertuples(index=False)}
    homeless = best[(best.gfx == "") & (best.cu_num == 0)][list(family.key_names)].drop_duplicates()
    known -= {("", None)}
    if not known or homeless.empty:
        return
    shapes = plural(len(homeless), "shape")
    if len(known) > 1:
        names = ", ".join(device_text(*d) for d in sorted(known, key=str))
        notes.append(f"{shapes} without a named device: kept apart from {names}")
        return
    (device,) = known
    for frame in (best, wrong):
        frame.loc[(frame.gfx == "") & (frame.cu_num == 0), _DEVICE] = device[0], device[1] or 0
    notes.append(f"{shapes} came without gfx and cu_num: taken as {device_text(*device)}")


class _File:
    """A file, read and reduced.

    `best`: a row a shape and backend, with its fastest valid row and the counts of those left out; `wrong`: the rows
    beyond the error ratio, the largest errors first.
    """

    def __init__(self, source: InputTable, family: Family, limit: float) -> None:
        self.source, self.family, self.limit = source, family, limit
        self.rows = self.no_shape = 0
        self.lines = CleanLines(source.path, len(source.header))
        found = layout(source.header, family)
        self.judged = "err" in found.at
        by = [c for c in (*family.key_names, *_DEVICE) if c in found.keys | found.at] + ["backend"]
        empty = pd.DataFrame(columns=[*by, "us", "err", "kernel", *COUNTED])
        groups, wrong = [], []
        for chunk in chunks(self.lines, found, family):
            for part in self._parts(chunk, found):
                rows = self._judged(part)
                wrong.append(rows[rows.error_ratio])
                rows.loc[rows.no_time | rows.not_finite | rows.error_ratio, "us"] = float("nan")
                groups.append(_reduced(rows, by))
        self.best = _named(_reduced(pd.concat(groups), by) if groups else empty, family)
        self.wrong = _named(pd.concat(wrong) if wrong else empty, family).sort_values(
            ["backend", "err", "us"], ascending=[True, False, True], na_position="first"
        )
        if len(self.best) > MAX_GROUPS:
            what = f"has more than {MAX_GROUPS} shapes and backends: these are not tuning results"
            raise InputError(f"{escaped(str(source.path))}: {what}")

    def _parts(self, chunk: pd.DataFrame, found: Layout) -> Iterable[pd.DataFrame]:
        """The measurements of a chunk: one frame, or of a wide benchmark one for each backend."""
        rows = chunk[[c for c in (*self.family.key_names, *_DEVICE, "err", "kernel", "kernel_id") if c in chunk]]
        rows = rows.assign(**{c: float("nan") for c in ("err", "kernel", "kernel_id") if c not in chunk})
        for backend in found.wide:
            yield rows.assign(backend=backend, us=chunk[backend + US])
        if not found.wide:
            yield rows.assign(**_candidates(chunk, self.family), us=chunk["us"])

    def _judged(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The rows that have a whole key, with a column for each reason to leave a row out."""
        whole = pd.Series(True, rows.index)
        for column in self.family.columns:
            if column.name in rows:
                whole &= _sound(rows[column.name], column)
        self.rows += len(rows)
        self.no_shape += len(rows) - int(whole.sum())
        rows = rows[whole]
        no_time, infinite = ~(rows.us > 0), rows.us == float("inf")
        wrong = ~(no_time | infinite | rows.err.between(0, self.limit)) if self.judged else False
        return rows.assign(no_time=no_time, not_finite=infinite, error_ratio=wrong)


def _reduced(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """One row for each combination of `by`: the fastest one, of equals always the same, with the sums of the counts."""
    groups = rows.groupby(by, sort=False, observed=True, dropna=False)
    of = groups.ngroup().to_numpy()
    least = groups["us"].transform("min")
    candidate = ((rows["us"] == least) | least.isna()).to_numpy()
    sums = {c: np.bincount(of, rows[c])[of[candidate]].astype(int) for c in COUNTED}
    return rows[candidate].assign(**sums).sort_values(["us", "kernel", "err"]).drop_duplicates(by)


def _named(rows: pd.DataFrame, family: Family) -> pd.DataFrame:
    """The same with all columns of device and key, texts cleaned and spelled as the family spells them."""
    for c in family.columns:
        legal = {v.lower(): v for v in c.legal}
        if c.name not in rows:
            rows[c.name] = int(c.default or 0) if c.kind == "int" else c.default or ""
        elif c.kind == "int":
            rows[c.name] = rows[c.name].astype("int64")
        else:
            rows[c.name] = _texts(rows[c.name], legal)
    rows["kernel"] = _texts(rows["kernel"])
    cu_num = rows["cu_num"] if "cu_num" in rows else pd.Series(0, rows.index)
    rows["cu_num"] = cu_num.where(cu_num.between(1, 2**31 - 1), 0).astype("int64")
    of_chip = rows["cu_num"].map(GFX_OF_CU_NUM).fillna("")
    rows["gfx"] = _texts(rows["gfx"]).where(lambda gfx: gfx != "", of_chip) if "gfx" in rows else of_chip
    return rows


def _texts(cells: pd.Series, legal: Mapping[str, str] | None = None) -> pd.Series:
    cells = cells.astype(object).fillna("")
    texts = {cell: str(cell) for cell in cells.unique()}  # pandas makes bools of True and False
    spelled = {cell: (legal or {}).get(text.lower()) or clean(text) for cell, text in texts.items()}
    return cells.map(spelled).astype(object)


def _sound(cells: pd.Series, column: Column) -> pd.Series:
    if column.kind == "text":
        return cells.notna()
    if column.legal:
        return cells.isin([int(v) for v in column.legal])
    return cells.between(1, 2**31 - 1) & (pd.api.types.is_integer_dtype(cells) or cells % 1 == 0)


def _candidates(chunk: pd.DataFrame, family: Family) -> dict[str, Any]:
    """Columns `backend` and `kernel`, made once for each combination of kernel, number and libtype."""
    cells = [c for c in ("kernel", "kernel_id", "libtype") if c in chunk]
    if not cells:
        return {"backend": backend_name(family.name)}
    combination = np.zeros(len(chunk), int)
    for c in cells:
        combination = combination * (len(chunk[c].cat.categories) + 1) + chunk[c].cat.codes.to_numpy()
    which, _ = pd.factorize(combination)
    texts = chunk[cells].iloc[pd.Series(which).drop_duplicates().index].astype(object).fillna("").astype(str)
    found = [dict(zip(cells, row, strict=True)) for row in texts.itertuples(index=False)]
    names = [c.get("kernel") or (f"kernelId {number}" if (number := c.get("kernel_id")) else "") for c in found]
    columns = {"backend": [backend_name(family.name, **c) for c in found], "kernel": names}
    return {name: pd.Series(pd.Categorical(texts).take(which), chunk.index) for name, texts in columns.items()}
