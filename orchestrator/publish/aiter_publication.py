"""The publication for AITER (`publication.py` is the flow): tables by family, and the Triton configs of AITER.

`make_commits` runs AITER's own checks on the base (`aiter_checks.py`), and makes the new texts of the files
(`aiter_rows.py`, `configs/merge.py`): one commit for the model's own files and one for rows that other files own.
`check_branch` checks the tables against this tree (`tables/check.py`), runs AITER's checks again, and `verify` on nodes
if asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.configs.merge import merge_run, path_below
from orchestrator.configs.winners import WinnerFile
from orchestrator.errors import InputError
from orchestrator.families import ELEMENT_TYPES, family_type
from orchestrator.files.write import write_csv
from orchestrator.publish.aiter_checks import CHECKS, COMMANDS, CheckRun, compare_runs, run_check, run_verify
from orchestrator.publish.aiter_rows import FamilyPart, make_family_part
from orchestrator.publish.evidence import Evidence, FactNames, collect_evidence
from orchestrator.publish.publication import PlannedCommit, Published, PublishRequest, nothing_to_publish
from orchestrator.tables.aiter_build import Build
from orchestrator.tables.check import VERDICTS, check_tables, verdict_of
from orchestrator.tables.newcomers import Judged
from orchestrator.tables.run_folders import has_config_files, table_of
from orchestrator.tables.table_names import family_of
from worker.families import Family

BRANCH_NAME = "this branch"
"""The name of the branch's build in messages."""
MAX_PROBLEMS = 5
"""Most problems of a table that the text names."""
FACTS = FactNames(
    {
        "device": "GPU",
        "rocm": "ROCm",
        "aiter_commit": "AITER commit when measured",
        "image": "image digest",
        "tuner": "tuner",
        "node": "node",
        "run": "run",
    },
    needed=("device", "rocm", "aiter_commit", "run"),
)
TYPE_COLUMNS = ("q_dtype_a", "q_dtype_w", "dtype")
"""Columns with a data type; the first two of them that a family has are those of its operands."""
_TYPE_WORD = re.compile(r"(?<![a-z0-9])(?:mx)?(?:fp|bf|int)\d+(?![0-9])", re.I)
"""A data type in a title: `MXFP4`, `bf16`."""


@dataclass(slots=True)
class AiterPublication:
    """The winners of runs and tables for a checkout of AITER. `open_aiter_publication` makes it."""

    families: Mapping[Family, Sequence[Path]]
    """Tables and runs by family."""
    config_runs: Sequence[Path]
    """Runs whose winners are config files."""
    template: str = "pull-request.md.j2"
    parts: list[FamilyPart] = field(default_factory=list)
    """The rows, by family."""
    winner_files: list[WinnerFile] = field(default_factory=list)
    """The winners that are config files."""
    checks_before: Mapping[str, CheckRun] = field(default_factory=dict)
    """AITER's checks of the base, by name."""

    @property
    def branch_words(self) -> list[str]:
        """The families, for the name of the branch."""
        names = [family.name for family in self.families]
        if self.config_runs:
            names.append("triton-configs")
        return names

    def make_commits(self, request: PublishRequest, tree: Path, published: Published) -> list[PlannedCommit]:
        """See `Publication`."""
        if not (tree / "aiter").is_dir():
            way_out = "the winners are for AITER: give a checkout of it"
            raise InputError(f"{request.onto}: is not a checkout of AITER; {way_out}")
        self.checks_before = _run_checks(request, tree, "base")
        for family, paths in self.families.items():
            self.parts.append(make_family_part(tree, BRANCH_NAME, family, paths, request.model))
        own_texts, other_texts = self._collect_texts(published, tree)
        published.title = title_of(request.title, request.model, self.parts, self.winner_files)
        published.rows = [row for part in self.parts for row in _rows_of(part)]
        commits = []
        if own_texts:
            commits.append(PlannedCommit(published.title, own_texts))
        if other_texts:
            commits.append(PlannedCommit(f"{published.title}: rows that other files own", other_texts))
        return commits

    def _collect_texts(self, published: Published, tree: Path) -> tuple[dict[str, str], dict[str, str]]:
        """The texts of the model's own files and of config files, and those of others with edited rows; noted in
        `published`. Raises InputError if there is none."""
        own: dict[str, str] = {}
        others: dict[str, str] = {}
        for part in self.parts:
            for name, text in part.texts.items():
                texts = own if name in (part.tuned, part.shapes) else others
                texts[name] = text
                published.files[name] = part.count_rows(name) or {"shapes": len(part.rows)}
        for run in self.config_runs:
            report = merge_run(run, tree)
            for change in report.changes:
                name = path_below(change.path, tree)
                own[name] = change.after
                published.files[name] = {"buckets": len(change.winner_file.winners)}
                self.winner_files.append(change.winner_file)
            published.notes += report.notes
            if report.proof:
                published.notes.append(f"config files: proven by {report.proof}")
        if not own and not others:
            reasons = [f"{row.new.place}: {row.action}: {row.why}" for part in self.parts for row in part.rows]
            reasons += [text for part in self.parts for text in part.rejected] + published.notes
            raise nothing_to_publish(published, reasons)
        return own, others

    def check_branch(self, request: PublishRequest, tree: Path, published: Published) -> None:
        """See `Publication`."""
        for part in self.parts:
            if part.tuned in part.texts:
                _check_against_build(published, part, tree)
        for name, result in _run_checks(request, tree, "branch").items():
            passed, text = compare_runs(self.checks_before[name], result)
            published.add_check(f"`{name}`", passed, text, () if result.why else result.tail)
        if request.verify is not None:
            for part in self.parts:
                _verify_part(published, part, request, request.verify)

    def evidence(self, request: PublishRequest) -> Evidence:
        """See `Publication`."""
        folders = [path for path in request.sources if path.is_dir()]
        row_facts = [facts for part in self.parts for facts in part.facts]
        return collect_evidence(row_facts, folders, request.runs, FACTS, has_config_files=bool(self.winner_files))

    def text_values(self, request: PublishRequest, published: Published) -> dict[str, Any]:
        """See `Publication`."""
        return {"parts": self.parts, "winner_files": self.winner_files, "check_commands": COMMANDS}


def open_aiter_publication(sources: Sequence[Path], wanted_family: str | None) -> AiterPublication:
    """The publication of runs and tables. Raises InputError for a table whose family is not known."""
    families: dict[Family, list[Path]] = {}
    config_runs: list[Path] = []
    for path in dict.fromkeys(sources):
        if path.is_dir() and has_config_files(path):
            config_runs.append(path)
        else:
            families.setdefault(family_of(table_of(path), wanted_family), []).append(path)
    return AiterPublication(families, config_runs)


def title_of(wanted: str, model: str, parts: Sequence[FamilyPart], winner_files: Sequence[WinnerFile]) -> str:
    """`[Config] Tune llama a8w8 (fp8) GEMMs for gfx950`, or the user's title. Raises InputError if that names data
    types that no row has."""
    written = {part.family: part.written for part in parts}
    types = {name for family, rows in written.items() for name in types_of(family, rows)}
    named = {word.lower().removeprefix("mx") for word in _TYPE_WORD.findall(wanted)}
    wrong = named - types
    if wrong and not winner_files:
        raise InputError(f"--title names {', '.join(sorted(wrong))}, and the rows are of {', '.join(sorted(types))}")
    if wanted:
        return wanted
    chips = {file.place.device.name for file in winner_files}
    subjects: list[str] = []
    for family, rows in written.items():
        chips |= {str(row.new.key[0]) for row in rows}
        if rows:
            subjects.append(f"{family.name} ({', '.join(sorted(types_of(family, rows)))})")
    subjects += sorted({f"Triton {file.place.kind.config}" for file in winner_files})
    tags = "[Triton/Gluon] [Config]" if winner_files else "[Config]"
    return f"{tags} Tune {model} {' and '.join(subjects)} GEMMs for {', '.join(sorted(chips))}"


def types_of(family: Family, rows: Iterable[Judged]) -> set[str]:
    """The data types of rows as people call them, by their own columns, else by the family."""
    columns = [column for column in TYPE_COLUMNS if column in family.key_names][:2]
    if not columns:
        type_of_all, _ = family_type(family) or ("fp8", 1)
        return {type_of_all}
    names = {row.new.cells.get(column, "") for row in rows for column in columns}
    return {ELEMENT_TYPES[name][0] if name in ELEMENT_TYPES else name.removeprefix("torch.") for name in names}


def _rows_of(part: FamilyPart) -> list[dict[str, Any]]:
    """The rows of the command's document. `paired`: measured beside the kernel that it replaced."""
    names = ("gfx", "cu_num", *part.family.key_names)
    rows = []
    for row in part.rows:
        rows.append(
            {
                "family": part.family.name,
                "key": dict(zip(names, row.new.key, strict=True)),
                "outcome": row.action,
                "why": row.why,
                "before_us": row.before.us if row.before else None,
                "after_us": row.after.us,
                "paired": row.rival is not None,
                "rebuild": row.rebuild,
            }
        )
    return rows


def _run_checks(request: PublishRequest, tree: Path, word: str) -> dict[str, CheckRun]:
    """AITER's checks of the tree by name; none without a Python."""
    if not request.python:
        return {}
    jit = request.onto.absolute() / "aiter" / "jit"
    return {name: run_check(tree, name, request.python, jit, request.logs / f"{name}.{word}.log") for name in CHECKS}


def _check_against_build(published: Published, part: FamilyPart, tree: Path) -> None:
    """Check that a tree which has the table would serve it safely."""
    family = part.family
    build = Build(tree, BRANCH_NAME)
    tables, problems = check_tables([tree / part.tuned], family.name, family.aiter.err_ratio, build)
    errors = [problem for table in tables for problem in table.problems() if problem["level"] == "error"]
    problems = [*(f"{problem['line']}: {problem['text']}" for problem in errors), *problems]
    verdict = f"{VERDICTS[verdict_of(tables)]} {BRANCH_NAME}, over all tables that it merges"
    text = "; ".join([verdict, *problems[:MAX_PROBLEMS]])
    published.add_check(f"`db check --build` of gemmfleet, {family.name}", not problems, text)


def _verify_part(published: Published, part: FamilyPart, request: PublishRequest, words: Sequence[str]) -> None:
    """Verify the published rows on nodes."""
    family = part.family
    table = request.folder / family.tuned_csv
    rows = [[row.new.cells.get(name, "") for name in family.tuned_header] for row in part.written]
    write_csv(table, family.aiter_header, rows)
    passed, text = run_verify(words, table, request.logs / f"run_config.{family.name}.log")
    published.add_check(f"`--run_config`, {family.name}", passed, text)
