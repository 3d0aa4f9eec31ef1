"""The input of a merge: tuned tables, profiles and runs' folders as one stream of rows with their provenance.

A table may also lie in a git repository, `REPOSITORY@REF:FILE`: nothing is checked out, nothing is fetched.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.command_hints import command
from orchestrator.errors import InputError, TunedDBError
from orchestrator.tables.locate import family_of, provenance_of
from orchestrator.tables.open import MAX_BYTES, csv_records
from orchestrator.tables.tuned import (
    MAX_FAULTS,
    PROFILE_EXTRA,
    TAG,
    KeyFault,
    RowReader,
    read_header,
)
from orchestrator.tables.write import utc
from orchestrator.tuned_db.merge_policy import SESSION, SOURCE, Newcomer
from orchestrator.tuned_db.records import Facts, read_records, record_of_newcomer
from orchestrator.tuned_db.rules import written_in_tb
from worker.families import Family
from worker.text import plural
from worker.tuners.catalog import recorded_tuner

STAGE = "stage"
"""A column of AITER's fmoe profiles, whose rows time one stage alone."""


@dataclass(slots=True)
class MergeInput:
    """`tables` give newcomers, `profiles` what was measured beside them; both are read when they are iterated."""

    family: Family
    tables: list[Path]
    profiles: list[Path]
    facts_of: dict[str, Facts] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    lenient: bool = False

    def newcomers(self) -> Iterator[dict[str, str]]:
        """The rows of the tables. Raises TunedDBError."""
        for path in self.tables:
            yield from read_rows(path, self.family, self.notes, lenient=self.lenient)

    def beside(self) -> Iterator[dict[str, str]]:
        """The rows of the profiles. Raises TunedDBError."""
        for path in self.profiles:
            yield from read_rows(path, self.family, self.notes, lenient=False)

    def facts(self, new: Newcomer) -> Mapping[str, Any]:
        """The fields of a newcomer's record."""
        source = new.cells.get(SOURCE, "")
        return self.facts_of[source](new) if source in self.facts_of else {}


def open_sources(
    given: Sequence[Path], profiles: Sequence[Path], into: Path | None, wanted: str | None, *, lenient: bool = False
) -> MergeInput:
    """The tables and profiles behind the paths. Raises InputError for what is no such thing, or of another family.

    A folder is a run's: its tuned.csv, with its profile.csv beside and its ledger for what is known.
    `lenient`: short rows are filled up, as AITER does.
    """
    runs = [p for p in given if p.is_dir()]
    tables, faults = list[Path](), list[str]()
    for path in dict.fromkeys(given):
        tables.append(path / "tuned.csv" if path.is_dir() else path)
        if path.is_dir() and not tables[-1].is_file():
            faults.append(f"{path}: holds no tuned.csv; is it a run's folder, and did the run end?")
        elif path.is_dir() and recorded_tuner(str(provenance_of(path).get("tuner") or "")).produces == "configs":
            merge = command(f"triton-config merge {shlex.quote(str(path))} --into TREE")
            faults.append(f"{path}: its winners are config files, which no table names; merge them so: {merge}")
    if faults:
        raise InputError(faults)
    family = one_family([*([into] if into and into.exists() else []), *tables], wanted)
    beside = [*profiles, *(p / "profile.csv" for p in runs if (p / "profile.csv").is_file())]
    out = MergeInput(family, tables, list(dict.fromkeys(beside)), lenient=lenient)
    for table in tables:
        out.facts_of[str(table)] = _facts(table, family)
    return out


def one_family(paths: Sequence[Path], wanted: str | None) -> Family:
    """The one family of all of them; a file of unknown family is taken to be of it."""
    found: dict[str, tuple[Family, Path]] = {}
    untold: TunedDBError | None = None
    for path in paths:
        try:
            of = family_of(path, wanted)
            found.setdefault(of.name, (of, path))
        except TunedDBError as e:
            untold = untold or e
    if not found and untold:
        raise untold
    if len(found) > 1:
        several = "; ".join(f"{path} is of {name}" for name, (_, path) in found.items())
        raise InputError(f"tables of several families do not merge: {several}; merge one after another")
    return next(iter(found.values()))[0]


def read_rows(path: Path, family: Family, notes: list[str], *, lenient: bool) -> Iterator[dict[str, str]]:
    """The rows of a tuned table or profile by column name, each with the file it is of, one at a time.

    Adds remarks to `notes`. Raises TunedDBError, at last with every fault of a row, by file and line.
    """
    faults: list[str] = []
    header: tuple[str, ...] = ()
    reader: RowReader | None = None
    short = in_tb = 0
    source = str(path)
    try:
        for at, _, cells in csv_records(path, cap=None):
            if reader is None:
                header = read_header(path, cells, family)
                reader = RowReader(header, family)
                notes += _columns(path, header, family)
                continue
            if not any(cells):
                continue
            if lenient and reader.us_at < len(cells) < len(header):
                short += 1
                cells = [*cells, *[""] * (len(header) - len(cells))]
            try:
                reader.read(cells)
            except KeyFault as e:
                if len(faults) <= MAX_FAULTS:
                    faults.append(f"{path}:{at}: {e}")
                continue
            if not faults:
                row = {**dict(zip(header, cells, strict=True)), SESSION: source, SOURCE: source}
                in_tb += written_in_tb(row)
                yield row
    except TunedDBError as e:
        raise TunedDBError([*faults, *e.faults]) from e
    if reader is None:
        raise TunedDBError(f"{path}: is empty: it has no header and no rows")
    if faults:
        raise TunedDBError([*faults[:MAX_FAULTS], *(["... and more"] if len(faults) > MAX_FAULTS else [])])
    notes += reader.notes(path)
    if in_tb:
        what = f"{path}: bw of {plural(in_tb, 'row')} is in TB/s, as in two of AITER's tables since 45ef6f313f;"
        notes.append(f"{what} its tuners write GB/s, and the cells stay as they are")
    if short:
        notes.append(f"{path}: filled up {plural(short, 'row')} short of cells with nothing, as AITER does")


def _columns(path: Path, header: Sequence[str], family: Family) -> list[str]:
    if STAGE in header:
        raise TunedDBError(f"{path}:1: times single stages (column {STAGE}), not whole shapes: give the tuned table")
    foreign = [n for n in header if n not in (*family.tuned_header, *PROFILE_EXTRA, TAG)]
    return [f"{path}: columns of no meaning here: {', '.join(foreign)[:200]}"] if foreign else []


def _facts(table: Path, family: Family) -> Facts:
    """The fields of a newcomer's record: by the run of its table, the records beside it, or its name alone."""
    if table.name == "tuned.csv" and (table.parent / "provenance.json").is_file():
        from orchestrator.tuned_db.run_facts import RunFacts

        return RunFacts(table.parent)
    records = read_records(table)
    alone = {"source": str(table)}

    def facts(new: Newcomer) -> Mapping[str, Any]:
        record = record_of_newcomer(records, new, family)
        beside = {n: new.cells[n] for n in ("attempt", "node", "slot", "samples", "margin") if new.cells.get(n)}
        return {**alone, **beside, "spread": new.spread or None, **(record.document() if record else {})}

    return facts


def imported(facts: Facts, origin: Mapping[str, Any]) -> Facts:
    """The fields of rows of an imported table: `imported` names its origin."""

    def of(new: Newcomer) -> Mapping[str, Any]:
        known = dict(facts(new))
        if "repo" in origin:
            known.pop("source", None)
        return {**known, "imported": dict(origin)}

    return of


TIMEOUT_S = 120.0
_COMMITTED = re.compile(r"^committer .* (\d{1,11}) [+-]\d{4}$", re.M)


@dataclass(frozen=True, slots=True)
class GitFile:
    """`ref` and `file` of the repository at `repo`, as they were given."""

    repo: Path
    ref: str
    file: str


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit that REF names, and its date (UTC)."""

    sha: str
    committed: str


def parse_git_file(text: str) -> GitFile | None:
    """None for what is a plain path (which may well hold an @)."""
    head, colon, file = text.rpartition(":")
    repo, at, ref = head.rpartition("@")
    if not (colon and at and repo and ref and file) or Path(text).exists():
        return None
    return GitFile(Path(repo), ref, file)


def extract_git_file(of: GitFile, to: Path) -> Commit:
    """Write the file as it was at REF to `to`. Raises InputError saying what is not there."""
    if not of.repo.is_dir():
        raise InputError(f"{of.repo}: there is no such folder; write REPOSITORY@REF:FILE")
    if shutil.which("git") is None:
        raise InputError("git is not installed here: give the path of the table instead")
    if of.ref.startswith("-") or "\n" in of.ref:
        raise InputError(f"{of.ref[:80]!r}: is no branch, tag or commit")
    resolved = _git_output(of.repo, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{of.ref}^{{commit}}")
    if resolved is None:
        raise InputError(
            f"{of.repo}: has no commit {of.ref[:80]!r} (fetch it there first), is no git repository, or git does not"
            " trust its owner"
        )
    sha = resolved.strip()
    name = f"{sha}:{of.file}"
    size = _git_output(of.repo, "cat-file", "-s", name)
    if size is None or _git_output(of.repo, "cat-file", "-t", name) != "blob\n":
        raise InputError(f"{of.repo}: commit {sha[:12]} has no file {of.file[:200]!r}")
    if int(size) > MAX_BYTES:
        raise InputError(f"{of.file}: is larger than {MAX_BYTES // 2**20} MB, which no tuned table is")
    with to.open("wb") as out:
        if _run_git(of.repo, ("cat-file", "blob", name), out.fileno()).returncode:
            raise InputError(f"{of.repo}: git could not read {of.file[:200]!r} of commit {sha[:12]}")
    at = _COMMITTED.search(_git_output(of.repo, "cat-file", "commit", sha) or "")
    return Commit(sha, utc(int(at[1])) if at else "")


def _git_output(repo: Path, *words: str) -> str | None:
    """The output of a git command, None where it fails."""
    done = _run_git(repo, words, subprocess.PIPE)
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


def _run_git(repo: Path, words: tuple[str, ...], out: int) -> subprocess.CompletedProcess[bytes]:
    # plumbing only, which runs nothing that the repository's own configuration names; no prompt, nothing is fetched
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env |= {"GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0"}
    argv = ["git", "-C", str(repo), *words]
    try:
        return subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.DEVNULL,
            env=env,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"{repo}: git did not answer within {TIMEOUT_S:g} s") from None
