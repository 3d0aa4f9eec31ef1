"""Commands on results: `gemmfleet analyze`, `compare`, `gain`, `verify` and `publish`."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import (
    AcceptNewHostKeysOpt,
    JsonOpt,
    LimitOpt,
    RunArg,
    RunsOpt,
    TableFamilyOpt,
)
from orchestrator.cli.printer import Page, plain
from orchestrator.command_hints import command
from orchestrator.errors import InputError, NoUsableNodeError
from orchestrator.paths import DEFAULT_RUNS, RunConfig, find_run
from worker.text import and_more, plural

if TYPE_CHECKING:
    from orchestrator.inventory.model import Node
    from orchestrator.results.verify import Verified

MOST_LISTED = 100
MOST_UNPROVEN = 10


class Format(StrEnum):
    """Values of --format."""

    TERMINAL = "terminal"
    MARKDOWN = "markdown"
    CSV = "csv"
    JSON = "json"


class Sort(StrEnum):
    """Values of --sort."""

    SHAPE = "shape"
    TFLOPS = "tflops"
    RATIO = "ratio"


_BY_SUFFIX = {".md": Format.MARKDOWN, ".csv": Format.CSV, ".json": Format.JSON}


def analyze(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN, DIR or FILE]...", help="A run, folders or CSV files; default: the latest run."),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option("--family", metavar="F", help="Read only this family; default where a file names none."),
    ] = None,
    err_ratio: Annotated[
        float | None,
        typer.Option("--err-ratio", metavar="X", min=0, help="Largest share of wrong elements (default: AITER's)."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option("--reference", metavar="CHIP", help="Compare with published FP4 figures: mi355x, mi350x."),
    ] = None,
    chip: Annotated[
        str | None, typer.Option("--chip", metavar="CHIP", help="Chip whose data sheet gives the roofline.")
    ] = None,
    sort: Annotated[Sort, typer.Option("--sort", help="Order of the shapes; tflops and ratio: largest first.")] = (
        Sort.SHAPE
    ),
    rows: Annotated[
        int, typer.Option("--rows", min=0, metavar="N", help="Shapes listed on a terminal (0: all).")
    ] = MOST_LISTED,
    format_: Annotated[
        Format | None, typer.Option("--format", help="Default: terminal, or by the suffix of OUT.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="OUT", help="Write to this file.")] = None,
    runs: RunsOpt = DEFAULT_RUNS,
    json_: JsonOpt = False,
) -> None:
    """Find the fastest backend of each shape, and by how much.

    Prints the best TFLOPS of each backend, the speed-ups between backends, and the share of the roofline.
    """
    from orchestrator.families import get_family
    from orchestrator.files.write import refuse_overwriting, write_output
    from orchestrator.results import output
    from orchestrator.results.analyze import analyze as document_of
    from orchestrator.results.analyze import write_csv
    from orchestrator.results.measurements import find_sources

    if json_ and format_ not in (None, Format.JSON):
        raise InputError(f"--json and --format {format_} contradict each other")
    form = Format.JSON if json_ else format_ or (_BY_SUFFIX.get(out.suffix.lower()) if out else None) or Format.TERMINAL
    with find_sources(inputs or [], runs=runs, family=get_family(family) if family else None) as sources:
        refuse_overwriting([*map(Path, inputs or []), *(s.path for s in sources.files)], [out] if out else [])
        found = document_of(sources, err_ratio, chip=chip, reference=reference)
    if sort is not Sort.SHAPE:
        found["rows"].sort(key=lambda r: _size(r, sort), reverse=True)
    page, text = Page(found), StringIO()
    output.add_analysis(page, found, rows if out is None and form is Format.TERMINAL else 0)
    if form is Format.CSV:
        write_csv(found, text)
        print("".join(f"note: {plain(note)}\n" for note in found["notes"]), end="", file=sys.stderr)
    elif form is Format.MARKDOWN:
        text.write(page.markdown())
    else:
        page.print(as_json=form is Format.JSON, to=text if out else sys.stdout)
    if out is None:
        print(end=text.getvalue())
        return
    write_output(out, text.getvalue())
    print(f"written: {plain(str(out))}", file=sys.stderr)


def _size(row: dict[str, Any], sort: Sort) -> float:
    """Return the figure that shapes are sorted by."""
    if sort is Sort.RATIO:
        return row["asm_over_best_other"] or 0.0
    return row["backends"][row["best"]]["tflops"] if row["best"] else 0.0


def compare(
    sides: Annotated[
        list[str] | None, typer.Argument(metavar="[GOLDEN TOT]", help="A CSV, a folder of them, or a run, each.")
    ] = None,
    golden: Annotated[
        list[str] | None, typer.Option("--golden", metavar="F", help="The golden side; several are its repeats.")
    ] = None,
    tot: Annotated[
        list[str] | None, typer.Option("--tot", metavar="F", help="The side under test; several are its repeats.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="CSV", help="Write the joined table.")] = None,
    markdown: Annotated[
        str | None, typer.Option("--markdown", metavar="FILE", help="Write Markdown for a pull request; - for stdout.")
    ] = None,
    again: Annotated[
        Path | None, typer.Option("--again", metavar="CSV", help="Write the rows to measure again.")
    ] = None,
    rule: Annotated[
        str, typer.Option("--rule", metavar="REL,ABS", help="Suspect where tot > REL * golden + ABS us.")
    ] = "1.005,0.5",
    rule_only: Annotated[
        bool, typer.Option("--rule-only", help="Judge by the rule alone, which knows no noise.")
    ] = False,
    ignore_below: Annotated[
        float, typer.Option("--ignore-below", metavar="US", min=0.0, help="Ignore rows whose golden time is shorter.")
    ] = 4.0,
    bound: Annotated[
        float, typer.Option("--bound", metavar="X", help="Expected false regressions in an unchanged table.")
    ] = 0.008,
    under_test: Annotated[
        list[str] | None,
        typer.Option("--under-test", metavar="FIELD", help="Environment field that is meant to differ; repeatable."),
    ] = None,
    ignore_column: Annotated[
        list[str] | None,
        typer.Option("--ignore-column", metavar="NAME", help="Column that is not part of a shape; repeatable."),
    ] = None,
    other_gpu: Annotated[bool, typer.Option("--other-gpu", help="Compare although the GPUs differ.")] = False,
    runs: RunsOpt = DEFAULT_RUNS,
    json_: JsonOpt = False,
) -> Page:
    """Judge a new stack against a golden one, row by row.

    Exit code 1 on a regression, 4 where rows could not be judged.
    """
    from orchestrator.files.write import refuse_overwriting, write_output
    from orchestrator.results import comparison, output
    from orchestrator.results.compare import Rule

    if sides and (golden or tot):
        raise InputError("give the sides either as GOLDEN TOT or with --golden and --tot")
    if sides:
        if len(sides) != 2:
            raise InputError("give two sides, GOLDEN TOT; several files a side with --golden F --golden F --tot F")
        golden, tot = sides[:1], sides[1:]
    if not golden or not tot:
        raise InputError(f"give two sides: {command('compare GOLDEN TOT')}")
    if not 0 < bound <= 1:
        raise InputError(f"--bound {bound:g}: is not above 0 and at most 1")
    if json_ and markdown == "-":
        raise InputError("--json and --markdown - both want standard output: give --markdown a file")
    thresholds = Rule.parse(rule, ignore_below)
    a, b = comparison.read_sides({"golden": golden, "tot": tot}, runs, ignore_column or [])
    page = Path(markdown) if markdown not in (None, "-") else None
    written = [p for p in (out, again, page) if p]
    refuse_overwriting([*a.files, *b.files], written)
    found = comparison.compare(
        a, b, rule=thresholds, bound=bound, under_test=under_test or [], other_gpu=other_gpu, rule_only=rule_only,
        again=str(again or ""),
    )  # fmt: skip
    report = Page(found, found["exit_code"])
    output.add_comparison(report, found)
    text = report.markdown()
    comparison.write(found, out, again)
    if page:
        write_output(page, text)
    if markdown == "-":
        report = Page(found, found["exit_code"])
        report.line(*text.splitlines())
    report.aside(*(f"warning: {text}" for text in found["warnings"]), *(f"written: {text}" for text in written))
    return report


def gain(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run id or a prefix of it, or its folder.")],
    workload: Annotated[
        Path, typer.Option(metavar="LOG", help="AITER's log of the workload, or a shape list with a column count.")
    ],
    before: Annotated[
        Path | None, typer.Option(metavar="TABLE", help="Tuned table before; default: what the run's merge met.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds that the workload took in all.", metavar="S")
    ] = None,
    runs: RunsOpt = DEFAULT_RUNS,
) -> Page:
    """Sum what a run won over the calls of a workload.

    GEMM time before and after, with its spread: the bound of what can be won end to end.
    """
    from orchestrator.ledger.reader import LedgerReader
    from orchestrator.results import recheck
    from orchestrator.shapes.aiter_log import read_calls
    from orchestrator.shapes.model import describe

    paths = find_run(runs, run)
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        family = ledger.family
        calls = read_calls(workload, family)
        found = recheck.gain(ledger, calls, recheck.times_before(paths, ledger, before, family), family)
    if not found.rows:
        raise InputError(
            f"{paths.run}: none of {plural(len(calls), 'shape')} of {workload} has a time before the run; name the"
            " table of then with --before"
        )
    share, sigma = found.won_us / found.before_us, found.sigma_us / found.before_us
    bound = found.won_us / seconds / 1e6 if seconds else None
    left = [describe(k) for k in found.left_out]
    page = Page({
        "run": paths.run, "before_us": found.before_us, "won_us": found.won_us, "sigma_us": found.sigma_us,
        "share": share, "end_to_end": bound, "left_out": left,
        "rows": [{"shape": describe(r.key), **asdict(r), "won_us": r.won_us} for r in found.rows],
    })  # fmt: skip
    heads = ("shape", "calls", "us before", "us after", "won, ms")
    page.table(heads, (
        (describe(r.key), f"{r.calls:g}", f"{r.before_us:.2f}", f"{r.after_us:.2f}", f"{r.won_us / 1e3:.3f}")
        for r in found.rows
    ), "shape", right=heads[1:])  # fmt: skip
    if left:
        page.line(f"left out, without a time before: {plural(len(left), 'shape')}: {and_more(left, 4)}")
    ms, of = found.won_us / 1e3, found.before_us / 1e3
    won = f"{ms:.3f} ms +- {found.sigma_us / 1e3:.3f} ms of it won ({share:.1%} +- {sigma:.1%})"
    page.line(f"GEMM time of {plural(len(found.rows), 'shape')}: {of:.3f} ms before, {won}")
    page.line(f"end to end at most that{f': {bound:.2%} of {seconds:g} s' if bound is not None else ''}")
    return page


def verify(
    run: RunArg = None,
    inventory: Annotated[
        Path | None, typer.Option("-i", "--inventory", metavar="INV", help="Nodes to verify on; default: the run's.")
    ] = None,
    table: Annotated[
        Path | None, typer.Option("--table", metavar="CSV", help="This tuned table instead of a run's tuned.csv.")
    ] = None,
    family: Annotated[
        str | None, typer.Option("--family", metavar="F", help="Family of the table, where it is ambiguous.")
    ] = None,
    limit: LimitOpt = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what AITER prints.")] = False,
    accept_new_host_keys: AcceptNewHostKeysOpt = False,
    runs: RunsOpt = DEFAULT_RUNS,
) -> Page:
    """Check on nodes that AITER uses the tuned rows correctly.

    Runs AITER's operators with the tuned rows; exit code 1 where a row is not used, or its result is wrong.
    """
    from orchestrator.controller.node_command import deployed_on
    from orchestrator.inventory import load as inventories
    from orchestrator.results.verify import verify_on
    from orchestrator.tables import export

    if table is not None and inventory is None and run is None:
        raise InputError(f"--table {table}: name the nodes with -i INV, or a run that has them")
    paths = find_run(runs, run, tuned=table is None) if table is None or inventory is None else None
    path = table or (paths.tuned if paths else Path())
    [(of, [source])] = export.read([path], family).items()
    rows = [source.cells(r) for r in source.rows]
    if not rows:
        raise InputError(f"{path}: has no row to verify")
    if inventory is None and paths is not None:
        if not paths.inventory.is_file():
            raise InputError(f"{paths.root}: has no inventory (collected from elsewhere?); name nodes with -i INV")
        inventory, limit = paths.inventory, limit or RunConfig.read(paths.config).limit
    known = inventories.load_inventory(inventory or Path())
    known = inventories.limit(known, limit) if limit else known
    nodes = list(known.nodes.values())
    inventories.check_references(nodes)

    def one(node: Node) -> Verified:
        def log(line: str) -> None:
            if verbose:
                print(f"[{node.name}] {line}", file=sys.stderr, flush=True)

        deployed = partial(deployed_on, known, node, "verify", accept_new_host_keys=accept_new_host_keys)
        return verify_on(lambda files: deployed(files=files), node.name, of, rows, log)

    with ThreadPoolExecutor(max_workers=max(1, min(16, len(nodes)))) as pool:
        answers = list(pool.map(one, nodes))
    good = [a for a in answers if not a.why]
    wrong = any(r.verdict in ("mismatch", "error") for a in good for r in a.rows)
    unproven = any(not any(a.rows[i].proven for a in good) for i in range(len(rows)))
    document = {"family": of.name, "nodes": [a.to_json() for a in answers]}
    page = Page(document, wrong or unproven or len(good) < len(answers))
    for answer in answers:
        _add_node(page, answer)
    if not good:
        page.error = NoUsableNodeError("no node could verify: " + "; ".join(f"{a.node}: {a.why}" for a in answers))
    return page


def _add_node(page: Page, a: Verified) -> None:
    from orchestrator.shapes.model import describe

    if a.why:
        page.line(f"{a.node}: not verified: {a.why}")
        return
    proven, build = sum(r.proven for r in a.rows), a.aiter
    version = build.get("version") or str(build.get("commit", ""))[:10] or "of unknown version"
    what = f"AITER {version} in {build.get('root')}"
    rows, chip = plural(len(a.rows), "row"), f"{build.get('gfx')} with {build.get('cu_num')}"
    how = f"; ran {build['how']}" if build.get("how") else ""
    page.line(f"{a.node}: {proven} of {rows} proven ({what}, {chip}{how})")
    bad = []
    for r in a.rows:
        key, used = describe(int(v) for v in r.key.values() if v.isdigit()), "" if r.selected else "not "
        why = f" ({r.why})" if r.why else ""
        bad += [] if r.proven else [f"  {key}: {used}used by the lookup, {r.verdict}{why}"]
    page.lines(bad, most=MOST_UNPROVEN)
    if not proven or a.code:
        page.line(*(f"  | {line}" for line in a.last[-5:]))


def publish(
    sources: Annotated[
        list[str], typer.Argument(metavar="RUN|TABLE...", help="Runs (id or folder) and tuned tables of one model.")
    ],
    onto: Annotated[
        Path, typer.Option("--onto", metavar="CHECKOUT", help="Local checkout of AITER; nothing is pushed.")
    ],
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="The model's name in the names of its files.")],
    base: Annotated[str, typer.Option("--base", metavar="REF", help="Commit or branch to start from.")] = "HEAD",
    branch: Annotated[
        str, typer.Option("--branch", metavar="B", help="Default: gemmfleet/<model>-<families>.", show_default=False)
    ] = "",
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Make the branch again on a newer base, with all checks.")
    ] = False,
    title: Annotated[
        str, typer.Option("--title", metavar="T", help="Title; its data types must be the rows'.", show_default=False)
    ] = "",
    e2e: Annotated[
        str, typer.Option("--e2e", metavar="CMD", help="Exact command of the end-to-end figures.", show_default=False)
    ] = "",
    verify: Annotated[bool, typer.Option("--verify", help="Run AITER's --run_config on the run's nodes.")] = False,
    inventory: Annotated[
        Path | None, typer.Option("-i", "--inventory", metavar="INV", help="Run AITER's --run_config on these nodes.")
    ] = None,
    python: Annotated[
        str,
        typer.Option(
            "--python",
            metavar="PYTHON",
            help="Interpreter of AITER's own checks; default: this one.",
            show_default=False,
        ),
    ] = "",
    checks: Annotated[
        bool, typer.Option("--checks/--no-checks", help="Run AITER's own checks before and after.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="Text and logs; default: beside the first source."),
    ] = None,
    family: TableFamilyOpt = None,
    runs: RunsOpt = DEFAULT_RUNS,
) -> Page:
    """Commit winners to a branch of a local checkout of AITER.

    Writes the text of a pull request; exit code 1 where a check finds what the base has not.
    """
    from orchestrator.configs.merge import merge_to_publish
    from orchestrator.results.export import RunFacts
    from orchestrator.tables.publish import default_branch
    from orchestrator.tables.publish import publish as make

    paths = [Path(s) if Path(s).exists() else find_run(runs, s).root for s in sources]
    first = paths[0]
    nodes = ["-i", str(inventory.absolute())] if inventory else [first.name, "--runs", str(first.absolute().parent)]
    if verify and not inventory and not first.is_dir():
        raise InputError(f"--verify: {first} is not a run; name the nodes with -i INV")
    branch = branch or default_branch(paths, model, family)
    if out is None:  # each branch has a pull request, and so a text, of its own
        above = first / "publish" if first.is_dir() else first.with_suffix(".publish")
        out = above / branch.removeprefix("gemmfleet/").replace("/", "-")
    runner = str(Path(python).absolute()) if "/" in python else python or sys.executable
    words = nodes if verify or inventory else None
    found = make(
        paths, onto, model, out, RunFacts, merge_to_publish, base=base, branch=branch, refresh=refresh, family=family,
        title=title, e2e=e2e, python=runner if checks else "", runs=runs, verify=words, argv=sys.argv[1:],
    )  # fmt: skip
    rows = [
        {"family": p.family.name, "key": dict(zip(("gfx", "cu_num", *p.family.key_names), r.new.key, strict=True)),
         "outcome": r.action, "why": r.why, "before_us": r.before.us if r.before else None, "after_us": r.after.us,
         "paired": r.rival is not None, "rebuild": r.rebuild}
        for p in found.parts for r in p.rows
    ]  # fmt: skip
    names = ("branch", "base", "commit", "title", "files", "notes", "missing", "ok")
    document = {n: getattr(found, n) for n in names} | {"text": str(found.text), "rows": rows}
    page = Page({**document, "checks": {name: result for name, result, _ in found.checks}}, not found.ok)
    page.line(f"{found.branch}: {found.commit[:12]} on {found.base[:12]}: {found.title}")
    page.line(*(f"  {n}: {', '.join(f'{c} {what}' for what, c in some.items())}" for n, some in found.files.items()))
    for outcome in ("kept", "refused"):
        some = [r for r in rows if r["outcome"] == outcome]
        page.line(f"  {outcome}: {len(some)}" + (f", such as: {some[0]['why']}" if some else ""))
    page.line(*(f"  {name.replace('`', '')}: {result}" for name, result, _ in found.checks))
    page.line(f"text of the pull request: {found.text}")
    page.aside(*(f"note: a reviewer will ask for this, and it was not recorded: {name}" for name in found.missing))
    return page
