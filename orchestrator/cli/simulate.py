"""`gemmfleet simulate`: how a job would go with other nodes, without a node, or on a night with faults."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import DEFAULT_RUNS, FamilyOpt, JsonOpt, RunsOpt

if TYPE_CHECKING:
    from orchestrator.simulation.job import Job, Setting

COMPARED = 5
"""Seeds of a comparison, where their number is not given."""


def simulate(
    what: Annotated[
        str | None, typer.Argument(metavar="[RUN|SHAPES.csv]", help="A run (default: the latest), or a shape list.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=0, metavar="N", help="Nodes; default: those of the run, or 1.")] = 0,
    slots: Annotated[int, typer.Option(min=0, metavar="N", help="Slots of a node; default: as in the run, or 8.")] = 0,
    without: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="Leave a node of the run out, repeatable.")
    ] = None,
    batch: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Shapes a process, as `tune --batch`; default: as in the run."),
    ] = 0,
    faults: Annotated[
        Path | None, typer.Option(metavar="F.yaml", help="Faults beside those of the run (docs: examples/faults.yaml).")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="'NAME=VALUE ...'", help="A second setting beside it, such as 'nodes=8'.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="S", help="Seed of all that is drawn.")] = 1,
    seeds: Annotated[
        int, typer.Option(min=0, metavar="N", help="Seeds from that one on; default: 1, with --compare 5.")
    ] = 0,
    family: FamilyOpt = None,
    tuner: Annotated[str | None, typer.Option(metavar="T", help="Tuner of a shape list; default: torch.")] = None,
    gfx: Annotated[
        str | None, typer.Option(metavar="GFX", help="Chip whose earlier runs give the cost; default: any.")
    ] = None,
    runs: RunsOpt = DEFAULT_RUNS,
    json_: JsonOpt = False,
) -> None:
    """Simulate a job on other nodes, or with faults.

    The scheduler itself on a virtual clock: makespan, its lower bound, idle time, repeated work, time line. Starts and
    writes nothing.
    """
    from orchestrator.cli.output.simulation import show, show_compared
    from orchestrator.simulation.faults_file import read_faults
    from orchestrator.simulation.job import Setting

    job = _job(what, runs, family, tuner, gfx)
    drawn = tuple(read_faults(faults)) if faults else ()
    first = Setting(nodes or int(not job.plan.nodes), slots, tuple(without or ()), batch, drawn)
    settings = [first, *([_second(first, compare)] if compare else [])]
    count = seeds or (COMPARED if compare else 1)
    found = [[_simulated(job, s, seed + i, timeline=not i) for i in range(count)] for s in settings]
    if json_:
        raw = [
            {**asdict(s), "faults": [e.model_dump(mode="json") for e in s.faults], "runs": of}
            for s, of in zip(settings, found, strict=True)
        ]
        print(json.dumps({"of": job.name, "took_s": job.took_s, "settings": raw}, default=str))
    elif compare:
        show_compared(job, settings, found)
    else:
        show(job, found[0])


def _job(what: str | None, runs: Path, family: str | None, tuner: str | None, gfx: str | None) -> Job:
    """Return the job of a run, or of a shape list (a name that ends in .csv). Raises InputError."""
    from orchestrator.errors import InputError
    from orchestrator.run.replay import listed_job, read_job

    if what is not None and what.endswith(".csv"):
        return listed_job(Path(what), runs, family, tuner, gfx)
    if family or tuner or gfx:
        raise InputError("--family, --tuner and --gfx belong to a shape list: a run knows its own")
    from orchestrator.paths import find_run

    return read_job(find_run(runs, what))


def _second(first: Setting, text: str) -> Setting:
    """Return the setting with the changes of `nodes=8 without=n3`. Raises InputError."""
    from orchestrator.errors import InputError
    from orchestrator.simulation.faults_file import read_faults
    from orchestrator.tables.faults import did_you_mean

    legal = ("nodes", "slots", "without", "batch", "faults")
    changes: dict[str, Any] = {}
    for word in text.split():
        name, _, value = word.lstrip("-").partition("=")
        if name not in legal:
            near = did_you_mean(name, legal)
            raise InputError(f"--compare {word}: is no setting{near} (write NAME=VALUE, of {', '.join(legal)})")
        if name == "without":
            changes[name] = (*changes.get(name, first.without), value)
        elif name == "faults":
            changes[name] = tuple(read_faults(Path(value))) if value not in ("", "none") else ()
        elif value.isdigit():
            changes[name] = int(value)
        else:
            raise InputError(f"--compare {word}: {value or 'nothing'} is no number, as in {name}=8")
    return replace(first, **changes)


def _simulated(job: Job, setting: Setting, seed: int, *, timeline: bool) -> dict[str, Any]:
    """Return the summary of one simulation, with the time line of all slots where that is wanted."""
    from orchestrator.analysis.report.timeline import timeline as timeline_of
    from orchestrator.run.view import RunView
    from orchestrator.simulation.job import plan_of
    from orchestrator.simulation.simulator import simulate as run
    from orchestrator.simulation.summary import summarise

    plan = plan_of(job, setting, seed)
    result = run(plan)
    out = asdict(summarise(plan, result))
    out |= {"nodes": len(plan.nodes), "slots": plan.slots}
    if timeline:
        view = RunView()
        for t, record in result.journal:
            view.feed(t, record)
        out["timeline"] = timeline_of(view.places, lambda i: f"shape {i}", 0.0, result.makespan_s)
    return out
