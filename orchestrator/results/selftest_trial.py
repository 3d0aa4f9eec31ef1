"""The node under test of `gemmfleet selftest`: runs ordinary commands there, and gives what they left to the checks.

`selftest.py` has the checks. Each command is a process of its own, so that one that hangs can be ended when the time is
over. A command runs when the first check asks for it; a later check gets the same `Step`.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from orchestrator.inventory.load import check_references, limit, load_inventory
from orchestrator.inventory.model import Node
from orchestrator.ledger.reader import LedgerReader
from orchestrator.pages import Document
from worker.families import FAMILIES, TINY_SIZES, Family

A4W4 = FAMILIES["a4w4_blockscale"]
OTHERS = [family for family in FAMILIES.values() if family.aiter.scripts and family is not A4W4]
SCRIPT = ("--tuner", "aiter", "-O", "batch=1")
"""Options for a family's own script, one shape a batch."""
ODD_K = 384
"""A K that is not a multiple of 256."""
ENDING_S = 45
"""Seconds that a command may take to end."""


class NotTriedError(Exception):
    """A statement could not be tried. The text says why."""


def require(requirement: object, why: str) -> None:
    """Raise NotTriedError if something that a check needs is false or empty."""
    if not requirement:
        raise NotTriedError(why)


class Step(NamedTuple):
    """A command that ended."""

    document: Document
    """The output with --json, {} for none."""
    why: str
    """Its failure in words."""
    cut: str
    """The reason why it was ended early, "" if it ended by itself."""
    run: Path
    """The folder of its run; one that does not exist if it made none."""

    def rows(self, name: str = "profile.csv") -> list[dict[str, str]]:
        """Rows of a result file of its run. Raises NotTriedError without any."""
        path = self.run / name
        rows = []
        if path.is_file():
            rows = list(csv.DictReader(path.read_text().splitlines()))
        require(rows, self.why)
        return rows

    def slots(self, *, gpus: bool = False) -> list[Document]:
        """Reports of its slots that were ready. `gpus`: their workers must see a GPU. Raises NotTriedError."""
        path = self.run / "provenance.json"
        reports = []
        if path.is_file():
            reports = [report for report in json.loads(path.read_text())["devices"] if report["device"]]
        require(reports, f"no slot was ready: {self.why}")
        if gpus:
            require(all(report["worker"].get("gpus") for report in reports), "the workers see no GPU")
        return reports

    def query(self, sql: str) -> list[list[Any]]:
        """Rows of a query of its ledger, whose cells are JSON."""
        with LedgerReader.open_readonly(self.run / "ledger.db") as ledger:
            return [[json.loads(cell or "{}") for cell in row] for row in ledger.query(sql)]

    def log(self) -> str:
        """The text that its workers printed."""
        return "".join(path.read_text(errors="replace") for path in self.run.glob("logs/*.log"))


def find_node(inventory: Path, name: str | None) -> Node:
    """The node of this name, or the first. Raises InventoryError, also for a variable that is not set."""
    node = next(iter(limit(load_inventory(inventory), name).nodes.values()))
    check_references([node])
    return node


class NodeTrial:
    """The node under test. It runs commands there, each once, and several at a time only on different GPUs.

    `all_gpus`, `first_gpu`: inventories of the node with all its GPUs, and with the first. `family_runs`: the runs of
    the families beside a4w4, which go on in the background, by family.
    """

    def __init__(self, folder: Path, inventory: Path, node: str | None, seconds: float) -> None:
        self.folder = folder
        self.inventory = inventory
        self.node = find_node(inventory, node)
        self.steps: dict[str, Step] = {}
        self.family_runs: dict[str, Future[Step]] = {}
        self.interrupted = False
        self.cut = "the time was over"
        self._ends = time.monotonic() + seconds
        self.all_gpus = self.first_gpu = self._write_inventory("node")

    def _write_inventory(self, name: str, **changed: Any) -> Path:
        """An inventory of this node alone, with some of its options changed."""
        document = yaml.safe_load(self.inventory.read_bytes())
        options = document["nodes"][self.node.name] or {}
        document["nodes"] = {self.node.name: options | changed}
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document, sort_keys=False))
        return path

    def gpus(self) -> dict[int, Document]:
        """The facts of each GPU that the inventory lets us use. Raises NotTriedError if the node cannot be used."""
        step = self.step("nodes", "nodes check", "-i", self.all_gpus)
        nodes: list[Any] = step.document.get("nodes") or []
        require(nodes, f"the node cannot be used: {step.why}")
        [node] = nodes
        faults = "; ".join(finding["what"] for finding in node["findings"] if finding["level"] == "unusable")
        require(node["state"] != "unusable", f"the node cannot be used: {faults or step.why}")
        facts = node["gpus"]
        allowed = self.node.gpus
        numbers: Sequence[int] = range(len(facts))
        if isinstance(allowed, int):
            numbers = range(allowed)
        elif isinstance(allowed, tuple):
            numbers = allowed
        return {number: facts[number] for number in numbers if number < len(facts)}

    def run_a4w4(self) -> Step:
        """The run of a4w4's script on all slots, two shapes a slot. The other families begin after it, in the
        background, on the GPUs beside the first if there are some."""
        gpus = self.gpus()
        step = self.run("tune", A4W4.name, A4W4, self.all_gpus, *SCRIPT, count=2 * max(1, len(gpus)))
        if not self.family_runs:
            lanes = [self._write_inventory(f"gpu-{number}", gpus=[number]) for number in gpus] or [self.all_gpus]
            self.first_gpu = lanes[0]
            beside = lanes[1:] or lanes
            pool = ThreadPoolExecutor(len(beside))
            for i, family in enumerate(OTHERS):
                lane = beside[i % len(beside)]
                self.family_runs[family.name] = pool.submit(self.run, "tune", family.name, family, lane, *SCRIPT)
        return step

    def winners_table(self) -> Path:
        """The winners of a4w4. Raises NotTriedError without any."""
        step = self.run_a4w4()
        step.rows("tuned.csv")
        return step.run / "tuned.csv"

    def run(self, verb: str, name: str, family: Family, inventory: Path, *words: object, count: int = 2) -> Step:
        """A run on tiny shapes of a family that differ in M alone; for a4w4 also on a shape with an odd K."""
        sizes = [TINY_SIZES | {family.m_column: TINY_SIZES[family.m_column] * i} for i in range(1, count + 1)]
        if name == A4W4.name:
            sizes.append(TINY_SIZES | {"K": ODD_K})
        names = [column.name for column in family.columns if column.required]
        lines = [",".join(names)]
        for shape in sizes:
            lines.append(",".join(str(shape[column]) for column in names))
        shapes = self.folder / f"{name}.csv"
        shapes.write_text("\n".join((*lines, "")))
        return self.step(
            name, verb, shapes, "-i", inventory, "--family", family.name, "--runs", self.folder, "--grace", 5, *words
        )

    def logs(self) -> str:
        """The texts that the workers of all families' runs printed, once these ended."""
        return self.run_a4w4().log() + "".join(future.result().log() for future in self.family_runs.values())

    def interrupt(self, *_: object) -> None:
        """Start nothing more. A terminal's Ctrl-C goes to the commands that run, too, and they end by themselves."""
        self.interrupted = True
        self.cut = "it was interrupted"
        self._ends = 0.0

    def step(self, name: str, verb: str, *words: object) -> Step:
        """The command of this name; it runs now if it did not run before."""
        if name not in self.steps:
            self.steps[name] = self._run_command(name, verb, words)
        return self.steps[name]

    def _run_command(self, name: str, verb: str, words: tuple[object, ...]) -> Step:
        """Run a command of gemmfleet until it ends or the time is over. Its standard error goes to NAME.log."""
        left = self._ends - time.monotonic()
        if left <= 0:
            return Step({}, self.cut, self.cut, self.folder / "none")
        argv = [
            "timeout",
            "--foreground",
            "--signal=INT",
            f"--kill-after={ENDING_S}",
            f"{left + 1:.0f}",
            sys.executable,
            "-m",
            "orchestrator",
            *verb.split(),
            *map(str, words),
            "--json",
        ]
        log = self.folder / f"{name}.log"
        with log.open("wb") as stderr:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, check=False)
        document = json.loads(done.stdout or "{}")
        last_line = " ".join(log.read_text(errors="replace").splitlines()[-1:])
        failed = "; ".join(f"{f['reason']}: {f['detail'][:200]}" for f in document.get("failed", ())[:3])
        cut = self.cut if done.returncode in (124, 130, 137) else ""
        why = cut or failed or f"exit code {done.returncode}: {last_line[:300]}"
        return Step(document, why, cut, self.folder / str(document.get("run") or "none"))
