"""Pages about a run that is planned: `--plan`, `--render`, and the notes and the headline above a run that starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from orchestrator.cli.printer import plain
from orchestrator.controller.deployment import node_files_of, write_files
from orchestrator.controller.prepared_run import PreparedRun
from orchestrator.errors import InputError, NoUsableNodeError
from orchestrator.machines.node_files import node_folders
from orchestrator.machines.node_plan import NodePlan
from orchestrator.pages import Page
from orchestrator.paths import RunConfig, RunPaths
from orchestrator.planning.plan import Plan, seconds_of
from orchestrator.shapes.model import describe
from orchestrator.view.formatting import describe_time_left, describe_uncounted_wait
from worker.text import and_more, plural

MOST_NAMES = 20
"""Most shapes of a plan that are named; the rest are counted."""


def show_notes(prepared: PreparedRun, *, quiet: bool) -> None:
    """Print the notes on the input and the defaults, and what will run. `quiet`: on standard error."""
    lines = [f"note: {note}" for note in prepared.plan.notes]
    _print_lines([*lines, headline(prepared.plan)], quiet=quiet)


def create_run(prepared: PreparedRun, *, quiet: bool) -> RunPaths:
    """Print the notes, create the run, and only then announce it: a run that is named can be resumed."""
    show_notes(prepared, quiet=quiet)
    paths = prepared.create()
    announce_run(paths.run, quiet=quiet)
    return paths


def announce_run(run: str, *, quiet: bool) -> None:
    """Print the id of a run or of a bench of images. `quiet`: on standard error."""
    _print_lines([f"run {run}"], quiet=quiet)


def _print_lines(lines: Sequence[str], *, quiet: bool) -> None:
    print(*map(plain, lines), sep="\n", file=sys.stderr if quiet else sys.stdout, flush=True)


def plan_page(prepared: PreparedRun) -> Page:
    """Return a plan, for `--plan`: the work by shared key with its cost, and the slots of each node. Its error says
    that no node can be used."""
    plan = prepared.plan
    document = plan.to_json()
    names_by_state: dict[str, list[str]] = {}
    if prepared.request.db is not None:
        names_by_state = _names_by_state(prepared)
    for state, names in names_by_state.items():
        document[f"{state}_shapes"] = {"count": len(names), "names": names[:MOST_NAMES]}
    aiters = _aiter_of_nodes(prepared) if prepared.config.tuner == "aiter" else {}
    document["aiter"] = aiters

    page = Page(document)
    page.line(*(f"note: {note}" for note in plan.notes))
    page.line(*(f"{state}: {and_more(names, MOST_NAMES)}" for state, names in names_by_state.items() if names))
    _add_work(page, prepared)
    page.table(("node", "slots"), ((node, str(n)) for node, n in plan.nodes.items()), "node", right=("slots",))
    page.line(*(f"{node}: {words}" for node, words in aiters.items()))
    probed = "no node was probed"
    if prepared.reports:
        probed = plural(len(prepared.reports), "node was probed", "nodes were probed")
    page.line(f"cost: {plan.cost_source}", headline(plan), f"{probed}; nothing was started or written (--plan)")
    if not plan.nodes:
        page.error = NoUsableNodeError("no node can be used: see the notes of the plan")
    return page


def _add_work(page: Page, prepared: PreparedRun) -> None:
    """Add a row for each piece of work: its shapes, the range of their M, and the key columns that they share. Texts
    that all shapes share stand below the table."""
    family = prepared.family
    keys = {shape.id: shape.key_dict(family) for shape in prepared.listed.shapes}
    keys_of_work = [[keys[shape] for unit in work.units for shape in unit] for work in prepared.plan.work]
    everywhere = _texts_of_all([work_keys[0] for work_keys in keys_of_work])
    rows = []
    for work, work_keys in zip(prepared.plan.work, keys_of_work, strict=True):
        sizes = [int(key[family.m_column]) for key in work_keys]
        rows.append(
            (
                str(len(sizes)),
                str(sizes[0]) if len(sizes) == 1 else f"{min(sizes)}..{max(sizes)}",
                _key_text(work_keys[0], (family.m_column, *everywhere)),
                f"{seconds_of(work):.1f} s" if prepared.plan.known else "not known",
                "each alone" if work.alone else "",
            )
        )
    page.table(("shapes", family.m_column, "shared key", "cost", ""), rows, right=("shapes", "cost"))
    if everywhere:
        texts = [f"{name}={value}" for name, value in everywhere.items()]
        page.line(f"everywhere: {' '.join(texts)}")


def _texts_of_all(keys: Sequence[dict[str, int | str]]) -> dict[str, str]:
    """Return the texts that are the same in all keys, by column: `{"dtype": "torch.bfloat16"}`; {} without a key."""
    texts: dict[str, str] = {}
    for name, value in keys[0].items() if keys else ():
        if isinstance(value, str) and all(key[name] == value for key in keys):
            texts[name] = value
    return texts


def _key_text(key: dict[str, int | str], hidden: Sequence[str]) -> str:
    return " ".join(f"{name}={value}" for name, value in key.items() if name not in hidden)


def _aiter_of_nodes(prepared: PreparedRun) -> dict[str, str]:
    """Return a sentence on the AITER of each node of a plan, and the fixes that its files need."""
    from orchestrator.image.fixes import UNKNOWN, aiter_lines  # imports docker

    facts = {report.node: report.facts for report in prepared.reports if report.node in prepared.plan.nodes}
    machines = [plan.source for plan in prepared.nodes if plan.source is not None]
    leased = dict.fromkeys(prepared.plan.leases, f"AITER: {UNKNOWN}")
    return {**aiter_lines(machines, facts), **leased}


def _names_by_state(prepared: PreparedRun) -> dict[str, list[str]]:
    """Return the shapes that are skipped, because the table has them, and those that are new to it."""
    skipped = set(prepared.plan.skipped)
    names: dict[str, list[str]] = {"skipped": [], "new": []}
    for shape in prepared.listed.shapes:
        names["skipped" if shape.id in skipped else "new"].append(describe(shape.key))
    return names


class _RenderedNode(NamedTuple):
    """A node whose folder is written. `folder`: below the folder of --render, such as `n1` or `a8w8/n1`."""

    folder: str
    plan: NodePlan
    config: RunConfig


def render_page(prepared: Sequence[PreparedRun], folder: Path) -> Page:
    """Write the node folders of runs, for `--render`, and return where they are; exit code 3 if a node was left out.
    Raises InputError."""
    nodes = []
    for run in prepared:
        parent = f"{run.family.name}/" if len(prepared) > 1 else ""
        nodes += [_RenderedNode(parent + plan.node, plan, run.config) for plan in run.nodes]
    try:
        scripts = {node.folder: _write_node(folder / node.folder, node) for node in nodes}
    except OSError as e:
        raise InputError(f"{e.filename}: cannot be written: {e.strerror}; name another folder with --render") from e
    notes = list(dict.fromkeys(note for run in prepared for note in run.plan.notes))
    unusable = sorted({report.node for run in prepared for report in run.reports if not report.usable})
    page = Page({"folder": str(folder), "nodes": scripts, "notes": notes}, 3 if unusable else 0)
    page.line(*(f"note: {note}" for note in notes))
    page.line(*(f"written: {folder / node}: {', '.join(names)}, code/" for node, names in scripts.items()))
    if unusable:
        page.line(f"! left out: {', '.join(unusable)} (see the notes)")
    page.line("nothing was started, no node was asked: a run adds the cores near each GPU, and a lease its own GPUs")
    return page


def _write_node(folder: Path, node: _RenderedNode) -> list[str]:
    """Write a node's folder, with those of its slots so that it can be run by hand; return the names of its scripts."""
    files = node_files_of(node.plan, node.config)
    write_files(folder, files)
    for below in node_folders(node.plan.slots):
        (folder / below).mkdir(mode=0o700, parents=True, exist_ok=True)
    return sorted(name for name in files if "/" not in name)


def headline(plan: Plan) -> str:
    """Return `28 shapes, 1 slot on 1 node, about 20 s to 3 min 00 s; a first guess`."""
    work = f"bench of {plan.family}" if plan.tuner == "bench" else f"{plan.family} with tuner {plan.tuner}"
    chip = f"{plan.gfx or 'unknown'} (cu_num {plan.cu_num or 'unknown'})"
    shapes = plural(plan.todo, "shape")
    if plan.skipped:
        shapes += f", {len(plan.skipped)} skipped"
    return f"{work} on {chip}: {shapes}, {_where(plan)}"


def _where(plan: Plan) -> str:
    """Return the slots of a plan, and when its end is expected."""
    if not plan.nodes:
        return "no slot"
    machines = len(plan.nodes) - len(plan.leases)
    leases = sum(plan.leases.values())
    places = []
    if machines:
        places.append(plural(machines, "node"))
    if leases:
        places.append(plural(leases, "lease"))
    slots = plural(sum(plan.nodes.values()), "slot")
    return f"{'up to ' if leases else ''}{slots} on {' and '.join(places)}, {_how_long(plan)}"


def _how_long(plan: Plan) -> str:
    """Return the expected duration of a plan in words, and what the run waits for before it can start."""
    waits_for = describe_uncounted_wait(plan.waits_for)
    if not plan.known:
        return f"how long it takes is not known{waits_for}"
    left = describe_time_left(plan.range_s[0], plan.end_s, plan.range_s[1])
    if not left.startswith("about"):
        left = f"about {left}"
    return f"{left}{waits_for}{'; a first guess' if plan.first_guess else ''}"
