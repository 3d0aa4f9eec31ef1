"""Publish winners: tables and Triton configs as commits on a branch of a checkout, with the text of a pull request.

`publish` works in a worktree of its own (`checkout.py`), in this order: AITER's own checks on the base
(`aiter_checks.py`), the new texts of the files (`publish_rows.py`), one commit for the model's own files and one for
rows that other files own, the check of the tables against this tree (`check.py`), AITER's checks again, `verify` on
nodes if asked, the text (`pull_request.py`), and at last the branch. Nothing is pushed.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import InputError
from orchestrator.files.write import write_atomic, write_csv
from orchestrator.tables.aiter_build import Build
from orchestrator.tables.aiter_checks import CHECKS, COMMANDS, CheckRun, compare_runs, run_check, run_verify
from orchestrator.tables.check import VERDICTS, check_tables, verdict_of
from orchestrator.tables.checkout import Checkout
from orchestrator.tables.provenance import Facts
from orchestrator.tables.publish_rows import Part, make_part
from orchestrator.tables.pull_request import collect_evidence, title_of
from orchestrator.tables.run_folders import has_config_files, table_of
from orchestrator.tables.table_names import family_of
from orchestrator.templating import render
from worker.families import Family

BRANCH_NAME = "this branch"
"""The name of the branch's build in messages."""
MAX_ROWS = 20
"""Most rows that are named if there is nothing to publish."""
MAX_PROBLEMS = 5
"""Most problems of a table that the text names."""


@dataclass(frozen=True, slots=True)
class ConfigPart:
    """A run's winners as config files of a checkout; `orchestrator/configs/merge.py` makes it."""

    texts: Mapping[str, str]
    """The new texts, by path below the checkout."""
    buckets: Mapping[str, int]
    """The number of changed buckets, by path below the checkout."""
    winner_files: Sequence[Any]
    """The winners, each a `configs.winners.WinnerFile`."""
    notes: Sequence[str]


@dataclass(slots=True)
class Published:
    """A branch, filled in while it is made."""

    branch: str
    base: str
    """The commit that it is based on."""
    text: Path
    """The file with the text of the pull request."""
    title: str = ""
    commit: str = ""
    """Its last commit."""
    parts: list[Part] = field(default_factory=list)
    """The rows, by family."""
    winner_files: list[Any] = field(default_factory=list)
    """The winners that are config files."""
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    """The number of rows of each changed file by outcome: `{"aiter/configs/...csv": {"added": 3, "edited": 1}}`."""
    checks: list[tuple[str, str, Sequence[str]]] = field(default_factory=list)
    """(name, result, last lines) of each check."""
    notes: list[str] = field(default_factory=list)
    ok: bool = True
    """No check found a fault that the base has not."""
    missing: list[str] = field(default_factory=list)
    """Names of facts that a review needs and that no record has."""

    def add_check(self, name: str, passed: bool, text: str, tail: Sequence[str] = ()) -> None:
        """Add a check's result, and its last lines."""
        self.checks.append((name, text, tail))
        self.ok = self.ok and passed


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """A request to publish: the options of the command `publish`."""

    sources: Sequence[Path]
    """Run folders and tables."""
    onto: Path
    """The checkout."""
    model: str
    folder: Path
    """The folder for the text and the logs."""
    base: str = "HEAD"
    branch: str = ""
    """Empty for `default_branch`."""
    refresh: bool = False
    family: str | None = None
    title: str = ""
    e2e: str = ""
    """The command of the end-to-end figures, for the text."""
    python: str = ""
    """The Python that runs AITER's checks; empty if they are not run."""
    runs: Path = Path("runs")
    """The folder of the runs that records of tables name."""
    verify: Sequence[str] | None = None
    """The words that name nodes for `verify`; None: it is not run."""
    argv: Sequence[str] = ()
    """The command line, for the text."""

    @property
    def logs(self) -> Path:
        """The folder of the checks' logs."""
        return self.folder / "checks"


def publish(
    request: PublishRequest, run_facts: Callable[[Path], Facts], merge_configs: Callable[[Path, Path], ConfigPart]
) -> Published:
    """Make the branch of a checkout, its checks and its text. Raises InputError; then no branch was made or moved.

    `run_facts`: as of `open_sources`. `merge_configs`: merges the config files of a run into a checkout.
    """
    checkout = Checkout(request.onto)
    base = checkout.commit_of(request.base)
    families, config_runs = _by_family(request.sources, request.family)
    branch = request.branch or default_branch(request.sources, request.model, request.family)
    checkout.refuse(branch, base, refresh=request.refresh)
    request.folder.mkdir(parents=True, exist_ok=True)
    published = Published(branch, base, request.folder / "pull-request.md")
    with checkout.worktree(base) as tree:
        before = _run_checks(request, tree, "base")
        for family, paths in families.items():
            published.parts.append(make_part(tree, BRANCH_NAME, family, paths, request.model, run_facts))
        own_texts, other_texts = _collect_texts(published, [merge_configs(run, tree) for run in config_runs])
        published.title = title_of(request.title, request.model, published.parts, published.winner_files)
        if own_texts:
            published.commit = checkout.commit(tree, own_texts, published.title)
        if other_texts:
            published.commit = checkout.commit(tree, other_texts, f"{published.title}: rows that other files own")
        _check_against_build(published, tree)
        after = _run_checks(request, tree, "branch")
    for name, result in after.items():
        passed, text = compare_runs(before[name], result)
        published.add_check(f"`{name}`", passed, text, () if result.why else result.tail)
    if request.verify is not None:
        for part in published.parts:
            _verify_part(published, part, request, request.verify)
    _write_text(published, request)
    checkout.point(branch, published.commit)
    return published


def default_branch(sources: Sequence[Path], model: str, family: str | None) -> str:
    """`gemmfleet/MODEL-FAMILIES`: the branch of these sources where none is named."""
    families, config_runs = _by_family(sources, family)
    names = [of_family.name for of_family in families]
    if config_runs:
        names.append("triton-configs")
    return f"gemmfleet/{model}-{'-'.join(names)}"


def _by_family(sources: Sequence[Path], wanted: str | None) -> tuple[dict[Family, list[Path]], list[Path]]:
    """(tables and runs by family, runs whose winners are config files)."""
    families: dict[Family, list[Path]] = {}
    config_runs: list[Path] = []
    for path in dict.fromkeys(sources):
        if path.is_dir() and has_config_files(path):
            config_runs.append(path)
        else:
            families.setdefault(family_of(table_of(path), wanted), []).append(path)
    return families, config_runs


def _run_checks(request: PublishRequest, tree: Path, word: str) -> dict[str, CheckRun]:
    """AITER's checks of the tree by name; none without a Python."""
    if not request.python:
        return {}
    jit = request.onto.absolute() / "aiter" / "jit"
    return {name: run_check(tree, name, request.python, jit, request.logs / f"{name}.{word}.log") for name in CHECKS}


def _collect_texts(published: Published, configs: Sequence[ConfigPart]) -> tuple[dict[str, str], dict[str, str]]:
    """The texts of the model's own files and of config files, and those of others with edited rows; noted in
    `published`. Raises InputError if there is none."""
    own: dict[str, str] = {}
    others: dict[str, str] = {}
    for part in published.parts:
        for name, text in part.texts.items():
            texts = own if name in (part.tuned, part.shapes) else others
            texts[name] = text
            published.files[name] = part.count_rows(name) or {"shapes": len(part.rows)}
    for merged in configs:
        published.winner_files += merged.winner_files
        published.notes += merged.notes
        own |= merged.texts
        published.files |= {name: {"buckets": buckets} for name, buckets in merged.buckets.items()}
    if not own and not others:
        rows = [f"{row.new.place}: {row.action}: {row.why}" for part in published.parts for row in part.rows]
        rows += [text for part in published.parts for text in part.rejected] + published.notes
        what = f"nothing to publish onto {published.base[:12]}"
        raise InputError([what, *(f"  {row}" for row in rows[:MAX_ROWS])])
    return own, others


def _check_against_build(published: Published, tree: Path) -> None:
    """Check that a tree which has the tables would serve them safely."""
    for part in published.parts:
        if part.tuned not in part.texts:
            continue
        family = part.family
        build = Build(tree, BRANCH_NAME)
        tables, problems = check_tables([tree / part.tuned], family.name, family.aiter.err_ratio, build)
        errors = [problem for table in tables for problem in table.problems() if problem["level"] == "error"]
        problems = [*(f"{problem['line']}: {problem['text']}" for problem in errors), *problems]
        verdict = f"{VERDICTS[verdict_of(tables)]} {BRANCH_NAME}, over all tables that it merges"
        text = "; ".join([verdict, *problems[:MAX_PROBLEMS]])
        published.add_check(f"`db check --build` of gemmfleet, {family.name}", not problems, text)


def _verify_part(published: Published, part: Part, request: PublishRequest, words: Sequence[str]) -> None:
    """Verify the published rows on nodes."""
    family = part.family
    table = request.folder / family.tuned_csv
    rows = [[row.new.cells.get(name, "") for name in family.tuned_header] for row in part.written]
    write_csv(table, family.aiter_header, rows)
    passed, text = run_verify(words, table, request.logs / f"run_config.{family.name}.log")
    published.add_check(f"`--run_config`, {family.name}", passed, text)


def _write_text(published: Published, request: PublishRequest) -> None:
    """Write the pull request's text."""
    folders = [path for path in request.sources if path.is_dir()]
    evidence = collect_evidence(published.parts, published.winner_files, folders, request.runs)
    published.missing = evidence.missing
    commands = evidence.commands
    if request.argv:
        commands.append(f"gemmfleet {shlex.join(map(str, request.argv))}")
    values = {"out": published, "model": request.model, "e2e": request.e2e, "facts": evidence.facts}
    write_atomic(published.text, render("pull-request.md.j2", {**values, "commands": [*commands, *COMMANDS]}))
