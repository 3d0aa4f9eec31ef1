"""Makes the document of `analyze`: the fastest row of each backend on each shape, speed-ups, shares of the roofline.

The command calls `measurements.py`, which finds the files, then `analyze` here, then `output.py`, which shows the
document. `fastest_rows.py` reads the files for `analyze`, and leaves out the rows that do not count. The published
figures of --reference are `data/reference_fp4.csv`, with their source in its first lines.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pandas as pd

from orchestrator.backend_names import backend_order
from orchestrator.errors import InputError
from orchestrator.families import GUIDE_FAMILY
from orchestrator.files.cells import no_formula
from orchestrator.pages import Document
from orchestrator.planning.roofline import CHIPS, Chip, chip_of, roofline
from orchestrator.results.fastest_rows import COUNTED, DEVICE, ReducedFile, join_files, reduce_files
from orchestrator.results.measurements import InputTables
from orchestrator.shapes.model import Key, element_type
from worker import without_gc
from worker.families import Family
from worker.text import did_you_mean, plural

LEAD = "asm"
"""The backend whose losses are listed: the one that AITER's dispatch prefers."""
REFERENCE_FILE = Path(__file__).parent / "data" / "reference_fp4.csv"
MOST_DEVIATION = 0.05
"""A published figure is marked if the one measured here deviates by a larger share."""
Row = Document
"""A shape of the document. `_new_row` makes it, with:

- `shape`: its name, `16x1280x8192`; `key`: `{"M": 16, ...}`; `gfx`, `cu_num` (None if unknown): the device;
- `backends`: the fastest valid row of each, as `{"ck": {"tflops": 812.5, "us": 9.9, "kernel": "a4w4_...", "err_ratio":
  0.0}}`; `best`: the name of the fastest, None if no row is valid;
- `asm_over_best_other`: TFLOPS of ASM over those of the best other backend, None if one of them is not there;
- `roofline`: `{"tflops": 5000.0, "bound": "compute", "intensity": 890.1, "share": 0.62}`, None if it is not known;
- `left_out`: the number of rows left out, by reason; `beyond_err_ratio`: those that were wrong, each as `backends` has
  them, with the name in `backend`; `wrong_was_faster`: one of them was faster than every valid row.
"""


def analyze(
    sources: InputTables, err_ratio: float | None = None, *, chip: str | None = None, reference: str | None = None
) -> Document:
    """Reads all sources and returns what is known of them as a JSON document (docs/reference/files.md).

    `rows` has a `Row` for each shape. Numbers are not rounded, and None if they are not known. `err_ratio`: the largest
    share of wrong elements that counts (default: the family's in AITER). fmoe is not judged: its columns hold text in
    percent, of measures that changed. `chip` names the roofline, `reference` the published figures to compare with.
    Raises InputError.
    """
    family = sources.family
    limit = family.aiter.err_ratio if err_ratio is None else err_ratio
    notes = list(sources.notes)
    if chip is None and reference and reference.lower() in CHIPS:
        chip = reference
    with without_gc():
        files = reduce_files(sources.files, family, limit)
        for file in files:
            notes += file.lines.notes()
        best, wrong = join_files(files, family, notes)
        rows, times = _shape_rows(best, wrong, sources)
        left_out = _left_out(best, files)
        if not rows and not any(left_out.values()):
            names = ", ".join(table.name for table in sources.files[:5])
            raise InputError([f"there are no rows in {names}", *notes])
        for row in rows:
            _rank_backends(row)
        chips = _add_rooflines(rows, sources, chip, notes)
    backends = sorted(best[best.us.notna()].backend.unique(), key=backend_order)
    results: Document = {
        "title": sources.title,
        "family": family.name,
        "err_ratio": limit,
        "backends": backends,
        "rows": rows,
        "summary": _summary(rows, backends, times, chips),
        "left_out": left_out | {"by_backend": _left_out_by_backend(best)},
        "inputs": [
            {
                "name": file.table.name,
                "bytes": file.table.path.stat().st_size,
                "rows": file.rows,
                "malformed": file.lines.malformed,
            }
            for file in files
        ],
        "notes": list(dict.fromkeys(notes)),
    }
    if reference:
        results["reference"] = against_reference(results, reference)
    return results


def _summary(rows: Sequence[Row], backends: Sequence[str], times: pd.DataFrame, chips: list[Document]) -> Document:
    """The part of the document on all shapes together. `times`: microseconds, a row a shape and a column a backend."""
    wins = dict.fromkeys(backends, 0)
    asm_loses = []
    beyond_err_ratio = []
    no_backend = []
    shares = []
    for row in rows:
        name = row["shape"]
        best = row["best"]
        ratio = row["asm_over_best_other"]
        if ratio and ratio < 1:
            asm_loses.append(name)
        if row["beyond_err_ratio"]:
            beyond_err_ratio.append(name)
        if not best:
            no_backend.append(name)
            continue
        wins[best] += 1
        if row["roofline"]:
            shares.append(row["roofline"]["share"])
    return {
        "shapes": len(rows),
        "wins": wins,
        "pairs": list(_pairs(times, backends)),
        "asm_loses": asm_loses,
        "beyond_err_ratio": beyond_err_ratio,
        "no_backend": no_backend,
        "roofline": {"chips": chips, "share": spread_of(shares)},
    }


def _left_out(best: pd.DataFrame, files: Sequence[ReducedFile]) -> dict[str, int]:
    """The number of rows that were left out, by reason. `best` counts those that have a shape."""
    counts = {reason: int(best[reason].sum()) for reason in COUNTED}
    counts["no_shape"] = sum(file.no_shape for file in files)
    counts["malformed"] = sum(file.lines.malformed for file in files)
    return counts


def _left_out_by_backend(best: pd.DataFrame) -> dict[str, dict[str, int]]:
    sums = best.groupby("backend")[list(COUNTED)].sum()
    counts = {backend: _nonzero(numbers) for backend, *numbers in sums.itertuples()}
    return {backend: counts[backend] for backend in sorted(counts, key=backend_order) if counts[backend]}


def _nonzero(counts: Sequence[int]) -> dict[str, int]:
    """The counts that are not 0 by their reason."""
    return {reason: int(count) for reason, count in zip(COUNTED, counts, strict=True) if count}


def spread_of(shares: Sequence[float]) -> dict[str, float] | None:
    """Least, most and mean of some shares; None without any."""
    if not shares:
        return None
    return {"min": min(shares), "max": max(shares), "mean": sum(shares) / len(shares)}


def _shape_rows(best: pd.DataFrame, wrong: pd.DataFrame, sources: InputTables) -> tuple[list[Row], pd.DataFrame]:
    """The shapes by device and key, not yet judged; and their times as a column a backend."""
    family = sources.family
    names = [*DEVICE, *family.key_names]
    keys = pd.concat([best[names], wrong[names]])
    # number the shapes from 0, in the order of devices and keys
    number = keys.groupby(names).ngroup().to_numpy()
    best_number = number[: len(best)]
    wrong_number = number[len(best) :]
    _, firsts = np.unique(number, return_index=True)

    # an empty row for each shape; a shape whose rows are all beyond the error ratio is among them
    counts = best[list(COUNTED)].groupby(best_number).sum().to_numpy().tolist()
    rows = []
    for (gfx, cu_num, *key), row_counts in zip(_tuples(keys.iloc[firsts], *names), counts, strict=True):
        rows.append(_new_row(family, gfx, cu_num or None, key, row_counts))

    _fill_backends(rows, best, best_number, family)
    _fill_wrong_rows(rows, wrong, wrong_number)
    times = best.set_index([best_number, "backend"])["us"].unstack()
    rows += _missing_rows(rows, sources)
    rows.sort(key=lambda row: (row["gfx"], row["cu_num"] or 0, tuple(row["key"].values())))
    _name_shapes(rows, family)
    return rows, times


def _new_row(family: Family, gfx: str, cu_num: int | None, key: Sequence[int | str], counts: Sequence[int]) -> Row:
    return {
        "shape": "",
        "key": family.named_key(key),
        "gfx": gfx,
        "cu_num": cu_num,
        "backends": {},
        "best": None,
        "asm_over_best_other": None,
        "roofline": None,
        "left_out": _nonzero(counts),
        "beyond_err_ratio": [],
        "wrong_was_faster": False,
    }


def _fill_backends(rows: Sequence[Row], best: pd.DataFrame, numbers: Iterable[int], family: Family) -> None:
    """Fill in the fastest valid row of each backend. `numbers`: the index in `rows` of each row of `best`."""
    flops = [family.flops(row["key"]) for row in rows]
    measured = _tuples(best, "backend", "us", "kernel", "err")
    for i, (backend, us, kernel, err) in zip(numbers, measured, strict=True):
        if us is not None:
            figures = {"tflops": flops[i] / us / 1e6, "us": us, "kernel": kernel, "err_ratio": err}
            rows[i]["backends"][backend] = figures


def _fill_wrong_rows(rows: Sequence[Row], wrong: pd.DataFrame, numbers: Iterable[int]) -> None:
    """Fill in the rows beyond the error ratio. `numbers`: the index in `rows` of each row of `wrong`."""
    beyond = _tuples(wrong, "backend", "kernel", "err", "us")
    for i, (backend, kernel, err, us) in zip(numbers, beyond, strict=True):
        rows[i]["beyond_err_ratio"].append({"backend": backend, "kernel": kernel, "err_ratio": err, "us": us})


def _missing_rows(rows: Sequence[Row], sources: InputTables) -> list[Row]:
    """The requested shapes that no file has; their device is that of all others, if those have one alone."""
    measured = {tuple(row["key"].values()) for row in rows}
    devices = {(row["gfx"], row["cu_num"]) for row in rows}
    gfx, cu_num = devices.pop() if len(devices) == 1 else ("", None)
    missing = dict.fromkeys(key for key in sources.requested if key not in measured)
    return [_new_row(sources.family, gfx, cu_num, key, (0, 0, 0)) for key in missing]


def _name_shapes(rows: Sequence[Row], family: Family) -> None:
    """Name each shape: `16x1280x8192`, batch first, followed by `column=value` of the other columns that vary."""
    sizes = [column.name for column in family.columns if column.kind == "int" and not column.legal]
    others = [name for name in family.key_names if name not in sizes]
    varying = [name for name in others if len({row["key"][name] for row in rows}) > 1]
    for row in rows:
        key = row["key"]
        words = ["x".join(str(key[name]) for name in sizes)]
        words += [f"{name}={str(key[name]).removeprefix('torch.')}" for name in varying]
        row["shape"] = " ".join(words)


def _rank_backends(row: Row) -> None:
    """Fill in the winner of a shape, and its lead's standing against the others."""
    backends = row["backends"]
    ranked = sorted((figures["us"], backend) for backend, figures in backends.items())
    if ranked:
        row["best"] = ranked[0][1]
    others = [us for us, backend in ranked if backend != LEAD]
    if others and LEAD in backends:
        row["asm_over_best_other"] = others[0] / backends[LEAD]["us"]
    wrong = [figures["us"] for figures in row["beyond_err_ratio"]]
    if wrong:
        row["wrong_was_faster"] = not ranked or min(wrong) < ranked[0][0]


def _add_rooflines(rows: Sequence[Row], sources: InputTables, chip: str | None, notes: list[str]) -> list[Document]:
    """Fill in the share of the roofline that each winner reaches; return the chips. Raises InputError for an unknown
    `chip`."""
    chips = []
    chip_notes = []
    above: dict[str, list[tuple[float, str]]] = {"compute": [], "memory": []}
    for (gfx, cu_num), device_rows in groupby(rows, key=itemgetter("gfx", "cu_num")):
        data_sheet, note = chip_of((gfx, cu_num), sources.device_names, chip)
        facts: Document = {"name": None}
        types: set[str] = set()
        if data_sheet:
            facts = asdict(data_sheet)
            types = _add_roofline(device_rows, sources.family, data_sheet, above)
        if note:
            chip_notes.append(note)
        chips.append({"gfx": gfx, "cu_num": cu_num, **facts, "types": sorted(types)})
    if any(facts["name"] for facts in chips) and not any(row["roofline"] for row in rows):
        notes.append(f"no roofline: the data sheets say nothing that fits {sources.family.name}")
    else:
        notes += chip_notes
    notes += _notes_above(above)
    return chips


def _add_roofline(
    rows: Iterable[Row], family: Family, chip: Chip, above: Mapping[str, list[tuple[float, str]]]
) -> set[str]:
    """Fill in the roofline of each shape of a device; return the element types that its peaks were looked up for.

    `above` gets the winners that are faster than their roofline, which cannot be, by its bound.
    """
    limit_of = roofline(family, chip)
    element_type_of = element_type(family)
    types = set()
    for row in rows:
        key = tuple(row["key"].values())
        roof = limit_of(key)
        if not roof:
            continue
        element = element_type_of(key)
        if element:
            types.add(element[0])
        share = None
        if row["best"]:
            share = row["backends"][row["best"]]["tflops"] / roof.tflops
            if share > 1:
                above[roof.bound].append((share, row["shape"]))
        row["roofline"] = {"tflops": roof.tflops, "bound": roof.bound, "intensity": roof.intensity, "share": share}
    return types


def _notes_above(above: Mapping[str, list[tuple[float, str]]]) -> Iterator[str]:
    """Notes on winners that are faster than their roofline, the most striking one by name."""
    causes = {
        "compute": "the chip is another one (--chip), or the times are wrong",
        "memory": "the operands were in a cache, the chip is another one (--chip), or the times are wrong",
    }
    for bound, winners in above.items():
        if winners:
            share, shape = max(winners, key=itemgetter(0))
            many = plural(len(winners), "shape is", "shapes are")
            yield f"{many} above the {bound} roofline (most: {shape} at {share:.0%}): {causes[bound]}"


def _pairs(us: pd.DataFrame, backends: Sequence[str]) -> Iterator[Document]:
    """TFLOPS of one backend over those of another on the shapes that both have; the geometric mean does not depend on
    which of the two is divided by."""
    for first, second in combinations(backends, 2):
        ratios = (us[second] / us[first]).dropna()
        if ratios.empty:
            continue
        yield {
            "first": first,
            "second": second,
            "shapes": len(ratios),
            "wins": int((ratios > 1).sum()),
            "least": float(ratios.min()),
            "most": float(ratios.max()),
            "mean": float(ratios.mean()),
            "geomean": float(np.exp(np.log(ratios).mean())),
        }


def _tuples(frame: pd.DataFrame, *names: str) -> Iterable[tuple[Any, ...]]:
    """The rows of these columns as tuples, None for NaN."""
    columns = [frame[name].astype(object).where(frame[name].notna(), None).tolist() for name in names]
    return zip(*columns, strict=True)


def against_reference(results: Document, chip: str) -> Document:
    """Every published figure of the chip beside the winner here; `deviation` is measured / published - 1. Raises
    InputError."""
    figures = pd.read_csv(REFERENCE_FILE, comment="#")
    comments = [line.lstrip("# ") for line in REFERENCE_FILE.read_text().splitlines() if line.startswith("#")]
    chips = list(figures.chip.unique())
    if chip.lower() not in chips:
        near = did_you_mean(chip, chips)
        raise InputError(f"--reference {chip[:40]!r}{near}: there are figures of {', '.join(chips)}")
    if results["family"] != GUIDE_FAMILY:
        raise InputError(f"--reference holds figures of {GUIDE_FAMILY}; these are results of {results['family']}")
    fastest = _fastest_by_key(results["rows"])
    rows = figures[figures.chip == chip.lower()].drop(columns="chip").to_dict("records")
    for row in rows:
        measured = fastest.get((row["M"], row["N"], row["K"]))
        deviation = None
        if measured:
            deviation = measured["tflops"] / row["tflops"] - 1
        row |= {"measured": measured, "deviation": deviation, "off": abs(deviation or 0.0) > MOST_DEVIATION}
    return {"source": " ".join(comments), "rows": rows}


def _fastest_by_key(rows: Iterable[Row]) -> dict[Key, Document]:
    """The fastest backend of each key on all devices, as `{"tflops": 812.5, "us": 9.9, "backend": "ck"}`."""
    fastest: dict[Key, Document] = {}
    for row in rows:
        if not row["best"]:
            continue
        key = tuple(row["key"].values())
        best = row["backends"][row["best"]]
        if key not in fastest or best["us"] < fastest[key]["us"]:
            fastest[key] = {"tflops": best["tflops"], "us": best["us"], "backend": row["best"]}
    return fastest


def write_csv(results: Document, out: TextIO) -> None:
    """A line a shape: key columns, `<backend>_tflops,<backend>_us` each, best, kernel, asm_over_best_other, roofline.

    The file can be read by `analyze` again, as a benchmark.
    """
    lines = []
    for row in results["rows"]:
        line: dict[str, object] = {"gfx": no_formula(row["gfx"]), "cu_num": row["cu_num"], **row["key"]}
        for backend, figures in row["backends"].items():
            line[f"{backend}_tflops"] = f"{figures['tflops']:.6g}"
            line[f"{backend}_us"] = f"{figures['us']:.6g}"
        if row["best"]:
            line["best"] = row["best"]
            line["kernelName"] = no_formula(row["backends"][row["best"]]["kernel"])
        if row["asm_over_best_other"] is not None:
            line["asm_over_best_other"] = f"{row['asm_over_best_other']:.4f}"
        if row["roofline"] and row["roofline"]["share"] is not None:
            line["roofline_share"] = f"{row['roofline']['share']:.4f}"
        line["rows_left_out"] = sum(row["left_out"].values())
        lines.append(line)
    keys = list(results["rows"][0]["key"]) if lines else []
    measured = [f"{backend}_{unit}" for backend in results["backends"] for unit in ("tflops", "us")]
    ranking = ["best", "kernelName", "asm_over_best_other", "roofline_share", "rows_left_out"]
    writer = csv.DictWriter(out, [*DEVICE, *keys, *measured, *ranking], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
