"""The folder that collected results go into: laid out as a run's, never over anything that is there."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.collect.merging import BenchRow, Content, Merged, row_of
from orchestrator.errors import InputError
from orchestrator.paths import RunPaths, new_run_id
from orchestrator.results.export import FORMAT, render, version
from orchestrator.tables.tuned import FAILED_EXTRA, PROFILE_EXTRA
from orchestrator.tables.write import no_formula, utc, write_csv
from orchestrator.userfiles import write_atomic
from worker.families import Family

BENCH = "bench.csv"


def new_folder(runs: Path, out: Path | None) -> RunPaths:
    """A folder that was not there. Raises InputError."""
    root = out or runs / f"collected-{new_run_id(time.time())}"
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        os.mkdir(root, 0o700)
    except FileExistsError:
        raise InputError(f"{root} is there already, and nothing is overwritten; name another folder with -o") from None
    except OSError as e:
        raise InputError(f"cannot make the folder {root}: {e.strerror or e}") from e
    return RunPaths(root)


def keep(paths: RunPaths, contents: Iterable[Content]) -> None:
    """The files as they came, by node."""
    for content in contents:
        folder = paths.node(content.of.node)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / content.of.name).write_bytes(content.of.data)


def write(
    paths: RunPaths,
    family: Family | None,
    merged: Merged,
    bench: Sequence[BenchRow],
    contents: Sequence[Content],
    options: dict[str, Any],
) -> None:
    """tuned.csv, profile.csv, failed.csv, bench.csv and provenance.json."""
    if family is not None:
        _tables(paths, family, merged)
    if bench:
        rows = ([*m.key, m.backend, m.us, "" if m.tflops is None else m.tflops, m.node] for m in bench)
        write_csv(paths.root / BENCH, ("M", "N", "K", "backend", "us", "tflops", "node"), rows)
    document = {
        "format": FORMAT,
        "run": paths.run,
        "state": "collected",
        "written": utc(time.time()),
        "family": family.name if family else "",
        "tuner": "aiter, started by hand: image, version and options are not known",
        "options": options,
        "code": {"gemmfleet": version()},
        "controller": {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"},
        "files": [_described(c) for c in contents],
        "counts": {"tuned": len(merged.winners), "from_profile": merged.rebuilt, "failed": len(merged.failed)},
        "notes": merged.notes,
    }
    write_atomic(paths.provenance, render(document) + "\n")


def _described(content: Content) -> dict[str, Any]:
    return {
        "node": content.of.node,
        "name": content.of.name,
        "kind": content.kind,
        "bytes": len(content.of.data),
        "sha256": hashlib.sha256(content.of.data).hexdigest(),
        "rows": len(content.rows),
        "notes": content.notes,
    }


def _tables(paths: RunPaths, family: Family, merged: Merged) -> None:
    won = merged.winners
    write_csv(paths.tuned, family.aiter_header, (row_of(key, new.cells, family) for key, (new, _) in won.items()))
    at = [
        family.tuned_header.index(n)
        for n in ("us", *(n for n in ("kernelName", "kernelName1") if n in family.tuned_header))
    ]
    winning = {key: [row_of(key, new.cells, family)[i] for i in at] for key, (new, _) in won.items()}

    def candidates() -> Iterable[list[Any]]:
        for key, cells, node, file, status in merged.candidates:
            row = row_of(key, cells, family)
            if status != "ok":
                row[at[0]] = "-1"
            winner = int(status == "ok" and winning.get(key) == [row[i] for i in at])
            extra = {"node": node, "status": status, "winner": winner, "detail": no_formula(file)}
            yield [*row, *(extra.get(n, "") for n in PROFILE_EXTRA)]

    write_csv(paths.profile, (*family.aiter_header, *PROFILE_EXTRA), candidates())
    failed = ([*key[2:], reason.value, no_formula(why), node, 1] for key, reason, why, node in merged.failed)
    write_csv(paths.failed, (*family.key_names, *FAILED_EXTRA), failed)
