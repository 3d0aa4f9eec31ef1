"""`status --folder`: jobs that were started by hand, as they stand on the nodes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.cli.output.live_view import gpu_words, plain
from orchestrator.cli.output.tables import console
from orchestrator.collect.status import FolderStatus, poll
from orchestrator.errors import InputError
from orchestrator.inventory import check_references, limit, load_inventory
from orchestrator.run.snapshot import gpu_now
from orchestrator.status import duration

if TYPE_CHECKING:
    from orchestrator.inventory import Node

AGAIN_S = 3.0


def show_folder(
    inventory: Path | None, folder: str, run: str | None, label: str | None, limit_s: float, *, watch: bool, json_: bool
) -> int:
    """Print it; 1 where a node could not be asked, 3 where none could. Raises InputError."""
    if inventory is None:
        raise InputError("--folder: the nodes to ask are those of an inventory: add -i INV")
    if run is not None:
        raise InputError("--folder is for jobs without a run: leave the run out")
    known = load_inventory(inventory)
    nodes = list((limit(known, label) if label else known).nodes.values())
    check_references(nodes)
    while True:
        began = time.monotonic()
        answers = _answers(nodes, folder, limit_s, json_=json_)
        if not watch or json_:
            failed = sum(bool(a.error) for a in answers)
            return 3 if failed == len(answers) else int(failed > 0)
        time.sleep(max(0.0, AGAIN_S - (time.monotonic() - began)))
        print(time.strftime("--- %H:%M:%S"), flush=True)


def _answers(nodes: Sequence[Node], folder: str, limit_s: float, *, json_: bool) -> list[FolderStatus]:
    answers = []
    for answer in poll(nodes, folder, limit_s):
        answers.append(answer)
        if not json_:
            _show(answer)
    if json_:
        print(json.dumps({"folder": folder, "nodes": [_document(a) for a in answers]}, indent=1))
    return answers


def _show(a: FolderStatus) -> None:
    out = console()
    out.print(plain(a.node), style="bold", highlight=False)
    if a.error:
        print(f"  ! {plain(a.error, 300)}", flush=True)
    if a.facts is not None:
        for c in a.facts.containers:
            print(f"  container {plain(c.name)} ({plain(c.image, 100)}): {plain(c.status)}{' (ours)' if c.run else ''}")
        if not a.facts.containers:
            why = a.facts.values.get("docker.error") or ("no docker" if "docker.lacks" in a.facts.values else "")
            print(f"  no container runs{f' ({plain(why, 200)})' if why else ''}")
        for number, gpu in enumerate(a.facts.gpus):
            print(f"  GPU {number}: {gpu_words(gpu_now(number, gpu))}")
    for f in a.files:
        rows = "" if f.rows is None else f", {f.rows} rows"
        print(f"  {plain(f.name, 120)} ({f.bytes} bytes{rows}, {duration(max(0.0, a.clock - f.written))} ago)")
        for line in f.last:
            print(f"    {plain(line, 200)}")
    if not a.files and not a.error:
        print("  no CSV file and no log in the folder")
    sys.stdout.flush()


def _document(a: FolderStatus) -> dict[str, Any]:
    facts = a.facts
    return {
        "name": a.node, "at": round(a.at, 3), "error": a.error,
        "files": [asdict(f) for f in a.files],
        "containers": [{"name": c.name, "image": c.image, "status": c.status, "run": c.run or None}
                       for c in (facts.containers if facts else ())],
        "gpus": [gpu_now(i, g) for i, g in enumerate(facts.gpus if facts else ())],
        "load": facts.values.get("load", "").split(" ")[:3] if facts else [],
    }  # fmt: skip
