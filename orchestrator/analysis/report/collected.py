"""The page of a folder of collected results: its tables as a ledger beside it, for the time of the writing."""

from __future__ import annotations

import calendar
import csv
import io
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from orchestrator import __version__
from orchestrator import events as ev
from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.ledger import Ledger
from orchestrator.paths import RunConfig, RunPaths
from orchestrator.reasons import Reason
from orchestrator.shapes import Shape
from orchestrator.tables.open import MAX_BYTES, read_text
from orchestrator.tables.tuned import Key, KeyFault, key_of, number_of
from worker.families import Family

SLOT = "0"


@contextmanager
def as_run(folder: Path) -> Iterator[RunPaths]:
    """A run of the same name whose ledger has the folder's rows. Raises InputError for a folder that is none."""
    try:
        origin = json.loads((folder / "provenance.json").read_text())
        family = get_family(str(origin["family"])) if origin["family"] else None
        written = float(calendar.timegm(time.strptime(origin["written"], "%Y-%m-%dT%H:%M:%SZ")))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InputError(f"{folder}: is no folder of collected results: provenance.json cannot be used ({e})") from e
    if family is None:
        raise InputError(f"{folder}: holds no tuned table and no profile, of which a page could be made")
    with TemporaryDirectory(prefix="gemmfleet-page-") as scratch:
        paths = RunPaths(Path(scratch) / folder.absolute().name)
        paths.root.mkdir()
        config = RunConfig(
            run=paths.run, created=written, argv=[], version=__version__, family=family.name, tuner="aiter",
            shapes="", shapes_sha256="", inventory="",
        )  # fmt: skip
        config.write(paths.config)
        with Ledger.create(paths.ledger) as ledger, ledger.transaction():
            for name, value in {"run": paths.run, "tuner": "aiter", "created": written, "ended": written}.items():
                ledger.set_meta(name, value)
            _fill(ledger, family, folder, written)
            ledger.set_meta("state", "finished")
        yield paths


def _fill(ledger: Ledger, family: Family, folder: Path, t: float) -> None:
    """Fill the ledger: every node is one group and one attempt, since the order of attempts is not known."""
    candidates, winners = list(_rows(folder / "profile.csv", family)), list(_rows(folder / "tuned.csv", family))
    failed = list(_rows(folder / "failed.csv", family))
    keys: dict[tuple[int | str, ...], int] = {}
    last: dict[int, str] = {}
    for row in (*winners, *candidates, *failed):
        key = _key(row, family)
        if key is not None:
            shape = keys.setdefault(key[2:], len(keys) + 1)
            last[shape] = row.get("node") or last.get(shape, "collected")
    ledger.add_shapes([Shape(n, key) for key, n in keys.items()], family)
    nodes = sorted(set(last.values()))
    for i, node in enumerate(nodes, 1):
        group = f"g{i:04d}"
        ledger.journal(ev.GroupAdded(group, tuple(s for s, n in last.items() if n == node), 0.0), t)
        ledger.journal(ev.Send(f"{group}-1", group, node, SLOT, i), t)
        ledger.journal(ev.AttemptStarted(f"{group}-1", node, SLOT), t)
    attempt = {node: f"g{i:04d}-1" for i, node in enumerate(nodes, 1)}

    def put(row: Mapping[str, str], winner: bool) -> None:
        key = _key(row, family)
        if key is None:
            return
        shape = keys[key[2:]]
        device = {"gfx": str(key[0]), "cu_num": int(key[1])}
        ledger.row(
            attempt=attempt[last[shape]], shape=shape, node=row.get("node") or last[shape], slot=SLOT, t=t,
            row=_measured(row, family), winner=winner, device=device,
        )  # fmt: skip
        if winner:
            ledger.journal(ev.ShapeTuned(attempt[last[shape]], shape), t)

    for row in candidates:
        put(row, winner=False)
    for row in winners:
        put(row, winner=True)
    for row in failed:
        key = _key(row, family)
        if key is not None:
            shape = keys[key[2:]]
            reason = next((r for r in Reason if r.value == row.get("reason")), Reason.NO_CANDIDATE)
            ledger.journal(ev.FailShape(shape, reason, row.get("detail", ""), attempt[last[shape]], False), t)
    for name in attempt.values():
        ledger.journal(ev.AttemptEnded(name, Reason.DONE, None, "", 0.0), t)


def _measured(row: Mapping[str, str], family: Family) -> dict[str, object]:
    """A row of a table by the worker's names."""
    ours = {theirs: name for name, theirs in family.renames}
    out: dict[str, object] = {}
    for name in (*family.result_columns, "status"):
        text = row.get(name, "")
        number = number_of(text)
        if text:
            out[ours.get(name, name)] = text if number is None or name in ("kernelName", "libtype") else number
    for name in ("kernelId", "splitK"):
        out[name] = int(float(str(out.get(name) or 0)))
    return {"status": "ok", **out}


def _key(row: Mapping[str, str], family: Family) -> Key | None:
    try:
        return key_of({"cu_num": "0", **row}, family)
    except KeyFault:
        return None


def _rows(path: Path, family: Family) -> Iterator[dict[str, str]]:
    if path.is_file():
        for row in csv.DictReader(io.StringIO(read_text(path, MAX_BYTES, InputError, errors="replace"), newline="")):
            there = [(k, v) for k, v in row.items() if k is not None and isinstance(v, str)]
            yield dict(zip(family.from_aiter(k for k, _ in there), (v for _, v in there), strict=True))
