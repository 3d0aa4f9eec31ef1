"""Output of `status`: a run, once or live, and with `--folder` jobs that were started by hand."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from orchestrator.cli.output.live_view import AWAY, doing_words, gpu_words, picture, plain, summary_line
from orchestrator.cli.output.tables import console
from orchestrator.collect.node_folder import FolderStatus, poll
from orchestrator.command_hints import command
from orchestrator.errors import InputError
from orchestrator.inventory import check_references, limit, load_inventory
from orchestrator.run.snapshot import gpu_now
from orchestrator.status import NodeStatus, duration
from worker.text import plural

if TYPE_CHECKING:
    from orchestrator.inventory import Node
    from orchestrator.paths import RunPaths
    from orchestrator.run.snapshot import RunSnapshot

AGAIN_S = 3.0


def show_status(paths: RunPaths, limit_s: float) -> None:
    """Print the status of a run: the ledger's at once, each node as it answers, last log lines, result files."""
    from orchestrator.nodes.poll import poll
    from orchestrator.run.snapshot import RunSnapshot

    snapshot = RunSnapshot(paths)
    status, out = snapshot.status(), console()
    worked = f", worked for {status.worked}" if status.worked else ""
    out.print(
        f"run {status.run}: {status.state}, {status.family} with {status.tuner}{worked}", style="bold", highlight=False
    )
    out.print(summary_line(status), highlight=False)
    if status.controller:
        out.print(f"driven by {status.controller}", highlight=False)
    elif status.state in ("planned", "interrupted") and status.settled < status.total:
        out.print(f"no controller drives it; continue with: {command(f'resume {paths.named}')}", highlight=False)
    width = max([4, *(len(plain(n.name)) for n in status.nodes)])
    form = f"{{:{width}}}  {{:>4}}  {{:15}}  {{:>5}}  {{:>6}}  {{:8}}  {{:30}}  {{}}"
    heads = ("node", "slot", "state", "tuned", "failed", "for", "GPU now", "measuring now")
    out.print(form.format(*heads).rstrip(), style="bold", highlight=False, soft_wrap=True)
    for answer in poll(snapshot.plans, limit_s):
        for row in status_rows(snapshot.add(status, answer)):
            out.print(Text(form.format(*row).rstrip()), soft_wrap=True)
    for node in status.nodes:
        for line in node.log:
            out.print(Text(f"{node.name} {plain(line, 200)}", style="dim"))
    for file in status.files:
        age = duration(time.time() - file["written"])
        out.print(f"{file['path']} ({plural(file['bytes'], 'byte')}, {age} ago)", highlight=False, style="dim")


def status_rows(node: NodeStatus) -> list[tuple[str, ...]]:
    """Return a row per slot; the first one carries what concerns the node."""
    rows: list[tuple[str, ...]] = []
    for i, slot in enumerate(node.slots):
        state = node.state if node.state in (*AWAY, "draining", "preparing") else slot.state
        since = duration(time.time() - slot.since) if slot.attempt and slot.since else ""
        name, tuned, failed = (plain(node.name), str(node.tuned), str(node.failed)) if i == 0 else ("", "", "")
        doing = plain(doing_words(node, i), 160)
        rows.append((name, slot.slot, plain(state, 40), tuned, failed, since, gpu_words(slot.gpu), doing))
    return rows or [(plain(node.name), "", node.state, str(node.tuned), str(node.failed), "", "", plain(node.detail))]


def watch_status(paths: RunPaths, limit_s: float) -> None:
    """Redraw the status twice a second until the run ends or Ctrl-C, polling the nodes all the while."""
    from rich.live import Live

    from orchestrator.dispatch.control import holder
    from orchestrator.nodes.poll import Watch
    from orchestrator.run.snapshot import RunSnapshot

    snapshot = RunSnapshot(paths)
    if not sys.stdout.isatty():
        _watch_lines(paths, snapshot, limit_s)
        return
    with (
        closing(Watch(snapshot.plans, limit_s)) as watch,
        Live(console=console(), refresh_per_second=4, transient=True) as live,
    ):
        while True:
            alive = bool(holder(paths.lock))
            status = snapshot.status()
            for answer in watch.answers():
                snapshot.add(status, answer)
            live.update(picture(status), refresh=True)
            if not alive:
                break
            time.sleep(0.5)
    show_status(paths, limit_s)


def _watch_lines(paths: RunPaths, snapshot: RunSnapshot, limit_s: float) -> None:
    """Print a line per change of progress, of a node's reachability, or of a GPU's health."""
    from orchestrator.dispatch.control import holder
    from orchestrator.nodes.poll import Watch

    last, printed = "", dict[str, str]()
    with closing(Watch(snapshot.plans, limit_s)) as watch:
        while True:
            alive = bool(holder(paths.lock))
            status = snapshot.status()
            line = summary_line(status)
            if line != last:
                print(line, flush=True)
            last = line
            for answer in watch.answers():
                node = snapshot.add(status, answer)
                words = answer.error or _health(node)
                if words != printed.get(node.name, "answers"):
                    print(f"{plain(node.name)}: {plain(words)}", flush=True)
                printed[node.name] = words
            if not alive:
                return
            time.sleep(1.0)


def _health(node: NodeStatus) -> str:
    bad = [f"GPU {g['number']}: {g['health']}" for g in (node.live or {}).get("gpus", []) if g["health"] != "ok"]
    return "; ".join(["answers", *bad])


def show_folder(
    inventory: Path | None, folder: str, run: str | None, label: str | None, limit_s: float, *, watch: bool, json_: bool
) -> int:
    """Print the jobs of a folder on the nodes; return 1 where a node did not answer, 3 where none did.

    Raises InputError.
    """
    if inventory is None:
        raise InputError("--folder: name the nodes with -i INV")
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
            _print_node(answer)
    if json_:
        print(json.dumps({"folder": folder, "nodes": [_document(a) for a in answers]}, indent=1))
    return answers


def _print_node(a: FolderStatus) -> None:
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
        rows = "" if f.rows is None else f", {plural(f.rows, 'row')}"
        age = duration(max(0.0, a.clock - f.written))
        print(f"  {plain(f.name, 120)} ({plural(f.bytes, 'byte')}{rows}, {age} ago)")
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
