"""Recorded runs with faults: what a run's nodes reported and was decided, and the documents that people saw of it.

A recording holds facts alone: the journal, the rows, and what workers reported beside them. `replayed` makes a run
folder of it, `documents` draws what `status`, `explain`, the CSV files and the page show of that folder. To record
them again: python -m tests.support.recorded [NAME...]
"""

from __future__ import annotations

import csv
import importlib
import json
import lzma
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator import events as ev
from orchestrator.command_hints import program
from orchestrator.controller.runs import RunSnapshot
from orchestrator.families import get_family
from orchestrator.ledger import Ledger, LedgerReader
from orchestrator.ledger.database import COLUMNS
from orchestrator.ledger.writer import row_values
from orchestrator.paths import RunConfig, RunPaths, create_run_folder
from orchestrator.report.collector import Collector
from orchestrator.results.export import Request, export, provenance
from orchestrator.shapes.model import Shape
from orchestrator.view.explain import explain
from tests.fleet.kit import Fleet
from tests.paths import ROOT
from tests.simulator.plan import SimPlan
from tests.simulator.simulator import Simulator
from tests.support import report_kit
from tests.support.drawn_plans import draw_plan, with_candidates, with_leases
from tests.support.report_kit import DEVICE, FAMILY, candidates

FOLDER = ROOT / "tests" / "data" / "recorded"
BEGAN = 1_790_000_000.0
Recording = dict[str, Any]
ROW = (
    "attempt", "shape", "node", "slot", "t", "winner", *(f.column for f in COLUMNS), "gfx", "cu_num", "extra", "note",
)  # fmt: skip
REPORT = ("device", "exit", "spent", "conditions")
LEFT_OUT = (
    "attempt", "shape", "candidate", "node", "slot", "entry", "name", "outcome", "detail", "source", "confirmed",
)  # fmt: skip


def names() -> list[str]:
    """Names of the recordings."""
    return sorted(p.name.removesuffix(".json.xz") for p in FOLDER.glob("*.json.xz"))


def read(name: str) -> Recording:
    """A recording by its name."""
    found: Recording = json.loads(lzma.decompress((FOLDER / f"{name}.json.xz").read_bytes()))
    return found


def write(name: str, recording: Recording) -> None:
    text = json.dumps(recording, separators=(",", ":"))
    (FOLDER / f"{name}.json.xz").write_bytes(lzma.compress(text.encode(), preset=9))


# --- from a ledger and back -------------------------------------------------------------------------------------------


def facts(paths: RunPaths, inventory: str) -> Recording:
    """All that a run's folder holds but what was made of it."""
    with LedgerReader.open_readonly(paths.ledger) as ledger, ledger.snapshot():
        skipped = [[i, why or None, detail, t] for i, (why, detail, t) in ledger.skipped().items()]
        return {
            "config": asdict(RunConfig.read(paths.config)), "inventory": inventory,
            "meta": {k: json.loads(v) for k, v in ledger.query("SELECT key, value FROM meta")},
            "shapes": [[i, list(key)] for i, key in ledger.keys.items()], "skipped": skipped,
            "journal": [[t, kind, json.loads(d)] for t, kind, d in ledger.query(
                "SELECT t, type, data FROM journal ORDER BY id")],
            "columns": ROW,
            "rows": [list(r) for r in ledger.query(f"SELECT {', '.join(ROW)} FROM rows ORDER BY id")],
            "reports": [
                [a, *(x and json.loads(x) if isinstance(x, str) else x for x in values)]
                for a, *values in ledger.query(f"SELECT attempt, {', '.join(REPORT)} FROM reports")
            ],
            "slots": [[s.node, s.slot, s.info, s.device] for s in ledger.slots()],
            "left_out": [list(r) for r in ledger.query(f"SELECT {', '.join(LEFT_OUT)} FROM withheld")],
        }  # fmt: skip


def replayed(recording: Recording, runs: Path) -> RunPaths:
    """A run folder with the recording's facts."""
    config = RunConfig(**recording["config"])
    paths = create_run_folder(runs, config.run)
    config.write(paths.config)
    paths.inventory.write_text(recording["inventory"])
    family = get_family(config.family)
    with Ledger.create(paths.ledger) as ledger, ledger.transaction():
        ledger.add_shapes([Shape(i, tuple(key)) for i, key in recording["shapes"]], family)
        for key, value in recording["meta"].items():
            ledger.set_meta(key, value)
        for i, reason, detail, t in recording["skipped"]:
            ledger.skip_shapes([i], detail, t, reason=reason)
        by_name = (dict(zip(recording["columns"], row, strict=True)) for row in recording["rows"])
        ledger.put_rows([tuple(row.get(name) for name in ROW) for row in by_name])
        for node, slot, info, device in recording["slots"]:
            ledger.slot_info(node, slot, info, device)
        for raw in recording["left_out"]:
            w = dict(zip(LEFT_OUT, raw, strict=True))
            entry = {
                **json.loads(w["entry"]), "candidate": json.loads(w["candidate"]),
                **{k: w[k] for k in ("name", "outcome", "detail", "source", "confirmed")},
            }  # fmt: skip
            ledger.withheld(attempt=w["attempt"], shape=w["shape"], node=w["node"], slot=w["slot"], entries=[entry])
        for t, kind, data in recording["journal"]:
            ledger.journal(ev.from_json(kind, json.dumps(data)), t)
        for attempt, *values in recording["reports"]:
            ledger.attempt_report(attempt, **dict(zip(REPORT, values, strict=True)))
    return paths


# --- what people see --------------------------------------------------------------------------------------------------

NOT_COMPARED = {"made", "program", "name", "files", "controller"}
"""Parts of the documents that name the place, the time or the version of this program."""


def documents(paths: RunPaths, whats: list[str | None]) -> dict[str, Any]:
    """`status`, `explain` of some, the CSV files and the page."""
    with _utc():
        with LedgerReader.open_readonly(paths.ledger) as ledger:
            export(ledger, paths, {})
            proof = provenance(ledger, Request("", 0.0))
        page = Collector(paths).document()
        page["origin"] = [s for s in page["origin"] if s["title"] not in ("Files of the run", "Made with")]
        found = {
            "status": RunSnapshot(paths).status().to_json(),
            "explain": {what or "": explain(paths, what).to_json() for what in whats},
            "csv": {p.name: _cells(p) for p in (paths.tuned, paths.failed, paths.profile)},
            "page": page,
            "provenance": {k: v for k, v in proof.items() if k not in ("written", "code", "controller")},
        }
    for part in ("status", "page"):
        found[part] = {k: v for k, v in found[part].items() if k not in NOT_COMPARED}
    text = json.dumps(found).replace(f"{program()} ", "gemmfleet ")
    out: dict[str, Any] = json.loads(text.replace(str(paths.root.parent), "RUNS"))
    return out


def _cells(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file by column: their order says nothing."""
    with path.open(newline="") as f:
        return list(csv.DictReader(f))


@contextmanager
def _utc() -> Iterator[None]:
    """Times of day are those of Greenwich."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    try:
        yield
    finally:
        os.environ.pop("TZ")
        if before is not None:
            os.environ["TZ"] = before
        time.tzset()


def asked_of(recording: Recording) -> list[str | None]:
    """Things that `explain` is asked about: everything, some shapes of each kind, a group and a node."""
    out: list[str | None] = [None]
    ends: dict[int, str] = {}
    for _, kind, data in recording["journal"]:
        if kind in ("FailShape", "SettleShape", "ShapeRefused"):
            ends.setdefault(data["shape"], kind)
        elif kind == "AttemptEnded" and data["outcome"] != "done" and data.get("in_flight") is not None:
            ends.setdefault(data["in_flight"], "AttemptEnded")
    for kind in ("FailShape", "SettleShape", "ShapeRefused", "AttemptEnded"):
        out += [str(i) for i, k in ends.items() if k == kind][:2]
    first = next((d for _, kind, d in recording["journal"] if kind == "AttemptEnded" and d["outcome"] != "done"), None)
    sent = {d["attempt"]: d for _, kind, d in recording["journal"] if kind == "Send"}
    if first is not None:
        out += [first["attempt"], sent[first["attempt"]]["node"]]
    return out


# --- recording --------------------------------------------------------------------------------------------------------


def _keep(ledger: Ledger, journal: list[tuple[float, ev.Record]], shapes: list[Any], rng: random.Random) -> None:
    """Journal of the simulator, with rows and reports as workers would have sent them."""
    by_id, places = {s.id: s for s in shapes}, dict[str, tuple[str, str]]()
    tuned = 0
    for at, r in journal:
        t = BEGAN + at
        match r:
            case ev.Send(attempt, node, slot):
                places[attempt] = (node, slot)
            case ev.Quarantine():
                r = replace(r, until=r.until + BEGAN)
            case ev.NodeJoined(node, slots):
                for slot in slots:
                    ledger.slot_info(node, slot, info={"code": "c0de", "host": node, "image": "i"}, device=DEVICE)
            case ev.ShapeTuned(attempt, shape) | ev.ShapeRefused(attempt, shape):
                node, slot = places[attempt]
                for name in r.withheld:
                    entry = {
                        "candidate": list(name), "name": f"kernel_{name[0]}", "outcome": "fault", "detail": "signal 6",
                        "source": "blocklist" if name in r.earlier else "attempt", "confirmed": False,
                        "key": [str(k) for k in by_id[shape].key], "slot": f"gpu-{node}-{slot}", "image": "i",
                        "driver": "d", "t": t,
                    }  # fmt: skip
                    ledger.withheld(attempt=attempt, shape=shape, node=node, slot=slot, entries=[entry])
                tuned += 1
                rows = candidates(by_id[shape], rng)[-5 if tuned % 7 else 0 :]
                for row, wins in rows:
                    if wins and isinstance(r, ev.ShapeRefused):
                        continue
                    made = row_values(
                        attempt=attempt, shape=shape, node=node, slot=slot, t=t, row=row, winner=wins, device=DEVICE
                    )
                    ledger.put_rows([made])
            case _:
                pass
        ledger.journal(r, t)
        if isinstance(r, ev.AttemptStarted):
            warm = {"temperature_c": {"edge": 61.0 + rng.randint(0, 3)}}
            ledger.attempt_report(r.attempt, device=DEVICE, conditions={"before": warm})
        if isinstance(r, ev.AttemptEnded):
            hot = {"temperature_c": {"edge": 62.0 if rng.random() < 0.97 else 108.0}}
            spent = {"import": 0.5, "measure": round(max(0.0, r.seconds - 0.5), 2)}
            ledger.attempt_report(r.attempt, exit=0, spent=spent, conditions={"after": hot})


def _simulated(plan: SimPlan, folder: Path, share: float = 1.0) -> tuple[RunPaths, str]:
    """A run by the simulator, up to a share of its time."""
    rng = random.Random(f"rows {plan.seed}")
    simulator = Simulator(plan)
    result = simulator.run()
    journal = [(round(t, 4), r) for t, r in simulator.journal if t <= share * simulator.now]
    n = max(result.shapes)
    shapes = [Shape(s.id, s.key) for s in report_kit.shapes(n + 2)]
    run = f"20260921-140640-{plan.seed:04x}"
    paths = create_run_folder(folder, run)
    RunConfig(
        run=run, created=BEGAN - 4.0, argv=["tune", "llm.csv"], version="0.1.0", family=FAMILY.name, tuner="aiter",
        shapes="llm.csv", shapes_sha256="5a" * 32, inventory="mi355x.yaml",
    ).write(paths.config)  # fmt: skip
    own = [name for name in plan.nodes if name not in plan.leases]
    lines = [
        f"  {name}: {{transport: ssh, host: {name}, gpus: {list(range(plan.nodes[name]))}, gfx: gfx950, cu_num: 256}}\n"
        for name in own
    ]
    inventory = "nodes:\n" + "".join(lines)
    with Ledger.create(paths.ledger) as ledger, ledger.transaction():
        ledger.add_shapes(shapes, FAMILY)
        ledger.skip_shapes([n + 1, n + 2], "the table has it", BEGAN - 1.0)
        for key, value in (("run", run), ("family", FAMILY.name), ("tuner", "aiter"), ("created", BEGAN - 4.0)):
            ledger.set_meta(key, value)
        _keep(ledger, journal, shapes, rng)
        done = share == 1.0 and result.end == "finished"
        ledger.set_meta("state", "finished" if done else "interrupted")
        ledger.set_meta("ended", BEGAN + share * simulator.now)
    return paths, inventory


def _plans() -> dict[str, Callable[[Path], tuple[RunPaths, str]]]:
    """The maker of each recording."""
    out: dict[str, Callable[[Path], tuple[RunPaths, str]]] = {}
    for seed in (1, 2, 4, 5, 7, 9, 11, 13):
        out[f"faults-{seed:02}"] = partial(_simulated, draw_plan(seed))
    for seed in (21, 22, 23, 25):
        out[f"leases-{seed:02}"] = partial(_simulated, with_leases(draw_plan(seed)))
    for seed in (31, 32, 33, 34, 35, 36):
        out[f"candidates-{seed:02}"] = partial(_simulated, with_candidates(draw_plan(seed)))
    for seed, share in ((41, 0.3), (42, 0.5), (43, 0.7), (44, 0.9)):
        out[f"cut-{seed:02}"] = partial(_simulated, draw_plan(seed), share=share)
    for n, share in ((48, 1.0), (72, 0.5)):
        out[f"page-{n:02}"] = partial(_simulated, report_kit.plan(n), share=share)
    for name in FLEET:
        out[f"fleet-{name}"] = partial(_fleet, name)
    return out


POISON = {"N": "32", "M": "2"}
FLEET: dict[str, Any] = {
    "abort": ({"kind": "abort", "match": POISON, "times": 99},),
    "hang": ({"kind": "hang", "match": POISON, "times": 99},),
    "killer": ({"kind": "kill_worker", "match": POISON, "times": 99},),
    "wrong": ({"kind": "wrong", "match": POISON, "times": 99}, {"kind": "oom", "match": {"M": "1", "N": "48"}}),
    "cut": (),
    "resumed": ({"kind": "no_candidate", "match": POISON, "times": 99},),
}


def _fleet(name: str, folder: Path) -> tuple[RunPaths, str]:
    """A run on the in-process fleet: real workers, real records."""
    folder.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "tests.fleet.server", str(folder / "place")]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as p:
        assert p.stdout is not None
        assert p.stdin is not None
        p.stdout.readline()
        fleet = Fleet(folder, folder / "place")
        try:
            fleet.shapes(groups=5, per_group=3)
            if name in ("cut", "resumed"):
                run = fleet.begun(2, *FLEET[name])
                if name == "cut":
                    fleet.link("h1", "down")
                    time.sleep(1.0)
                    fleet.mend("h1")
                else:
                    run.kill()
                    run = fleet.drive()
                fleet.release()
                run.wait()
            else:
                fleet.tune(*FLEET[name], watchdog_s=1.0 if name == "hang" else 60.0)
            return fleet.paths, fleet.paths.inventory.read_text().replace(str(folder), "/work-folder")
        finally:
            fleet.close()
            p.stdin.close()


def main(wanted: list[str]) -> None:
    for name, make in _plans().items():
        if wanted and name not in wanted:
            continue
        with tempfile.TemporaryDirectory() as at:
            paths, inventory = make(Path(at) / "made")
            recording = json.loads(json.dumps(facts(paths, inventory)).replace(at, "/work-folder"))
            recording["asked"] = asked_of(recording)
            again = replayed(recording, Path(at) / "runs")
            recording["documents"] = documents(again, recording["asked"])
            write(name, recording)
            size = (FOLDER / f"{name}.json.xz").stat().st_size
            print(f"{name}: {len(recording['journal'])} records, {len(recording['rows'])} rows, {size:,} bytes")


if __name__ == "__main__":
    importlib.import_module("tests.conftest")  # the tuner with faults
    main(sys.argv[1:])
