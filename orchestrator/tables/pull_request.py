"""The parts of a pull request's text that are drawn from the rows and their records: the title, the facts of the
measurements, and the commands that repeat them.

`publish.py` calls `title_of` and then `collect_evidence`. `templates/pull-request.md.j2` is the text.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.errors import InputError
from orchestrator.families import ELEMENT_TYPES, family_type
from orchestrator.tables.newcomers import Judged
from orchestrator.tables.publish_rows import Part
from orchestrator.tables.run_folders import provenance_of
from worker.families import Family
from worker.text import plural

FACTS: Mapping[str, str] = {
    "device": "GPU",
    "rocm": "ROCm",
    "aiter_commit": "AITER commit when measured",
    "image": "image digest",
    "tuner": "tuner",
    "node": "node",
    "run": "run",
}
"""Fields of a row's record, and their names in the text."""
NEEDED = ("device", "rocm", "aiter_commit", "run")
"""Fields that a review asks for."""
CLOCKS = {"clock_mhz": "GPU clock (MHz)", "memory_clock_mhz": "memory clock (MHz)"}
"""Fields of a reading of clocks, and their names in the text."""
COUNTS = {"tried": "candidates tried", "failed": "of them without a right result"}
"""Fields of a row's record that are added up, and their names in the text."""
UNKNOWN = "not recorded"
TYPE_COLUMNS = ("q_dtype_a", "q_dtype_w", "dtype")
_TYPE_WORD = re.compile(r"(?<![a-z0-9])(?:mx)?(?:fp|bf|int)\d+(?![0-9])", re.I)


def types_of(family: Family, rows: Iterable[Judged]) -> set[str]:
    """The data types of rows as people call them, by their own columns, else by the family."""
    columns = [column for column in TYPE_COLUMNS if column in family.key_names][:2]
    if not columns:
        type_of_all, _ = family_type(family) or ("fp8", 1)
        return {type_of_all}
    names = {row.new.cells.get(column, "") for row in rows for column in columns}
    return {ELEMENT_TYPES[name][0] if name in ELEMENT_TYPES else name.removeprefix("torch.") for name in names}


def title_of(wanted: str, model: str, parts: Sequence[Part], winner_files: Sequence[Any]) -> str:
    """The title, checked where the user gave one. Raises InputError where that names data types of no row."""
    written = {part.family: part.written for part in parts}
    types = {name for family, rows in written.items() for name in types_of(family, rows)}
    named = {word.lower().removeprefix("mx") for word in _TYPE_WORD.findall(wanted)}
    wrong = named - types
    if wrong and not winner_files:
        raise InputError(f"--title names {', '.join(sorted(wrong))}, and the rows are of {', '.join(sorted(types))}")
    if wanted:
        return wanted
    chips = {str(file.place.device.name) for file in winner_files}
    subjects = []
    for family, rows in written.items():
        chips |= {str(row.new.key[0]) for row in rows}
        if rows:
            subjects.append(f"{family.name} ({', '.join(sorted(types_of(family, rows)))})")
    subjects += sorted({f"Triton {file.place.kind.config}" for file in winner_files})
    tags = "[Triton/Gluon] [Config]" if winner_files else "[Config]"
    return f"{tags} Tune {model} {' and '.join(subjects)} GEMMs for {', '.join(sorted(chips))}"


class Evidence(NamedTuple):
    """The evidence for a review."""

    facts: dict[str, str]
    """Facts of the measurements, by their names in the text."""
    commands: list[str]
    """Commands that repeat the measurements."""
    missing: list[str]
    """Facts that a reviewer will ask for and the runs do not have."""


def collect_evidence(
    parts: Sequence[Part],
    winner_files: Sequence[Any],
    folders: Sequence[Path],
    runs: Path,
    names: Mapping[str, str] = FACTS,
    needed: Sequence[str] = NEEDED,
) -> Evidence:
    """The evidence of the published rows. `winner_files`: winners that are config files; `folders`: the runs that were
    named; `runs`: where the runs of the rows' records lie; `names`, `needed`: see FACTS and NEEDED, AITER's."""
    row_facts = [facts for part in parts for facts in part.facts]
    run_folders = {str(facts["run"]): runs / str(facts["run"]) for facts in row_facts if facts.get("run")}
    run_folders |= {folder.name: folder for folder in folders}
    documents = {run: provenance_of(folder) for run, folder in run_folders.items()}
    if winner_files:
        row_facts += [facts for document in documents.values() for facts in _facts_of_slots(document)]
    facts, missing = summarize_facts(row_facts, names, needed)
    commands = []
    for run, document in documents.items():
        if document.get("argv"):
            commands.append(f"gemmfleet {shlex.join(map(str, document['argv']))}")
        else:
            missing.append(f"command of the run {run}")
    return Evidence(facts, commands, missing)


def _facts_of_slots(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Facts of a run that wrote config files: those of its slots."""
    slots = []
    for slot in document.get("devices") or []:
        device = slot.get("device") or {}
        facts = {**device, **(device.get("versions") or {})}
        facts |= {name: document.get(name) for name in ("run", "tuner")}
        facts.setdefault("rocm", facts.get("hip"))
        facts["node"] = slot.get("node")
        facts["image"] = (document.get("images") or {}).get(slot.get("node"))
        facts["aiter_commit"] = (device.get("aiter") or {}).get("commit")
        engine = device.get("engine") or {}
        facts["engine"] = " ".join(filter(None, (engine.get("project"), engine.get("version"))))
        slots.append(facts)
    return slots


def summarize_facts(
    facts: Sequence[Mapping[str, Any]], names: Mapping[str, str], needed: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """(what rows were measured with, by its name; the names of what a review needs and some row has no record of)."""
    summary: dict[str, str] = {}
    missing: list[str] = []
    for field, name in names.items():
        counts = Counter(str(row.get(field) or UNKNOWN) for row in facts)
        summary[name] = "; ".join(counts)
        if len(counts) > 1:
            summary[name] = "; ".join(f"{value} ({plural(rows, 'row')})" for value, rows in counts.most_common())
        if field in needed and (UNKNOWN in counts or not counts):
            missing.append(name)
    clocks = [clock for row in facts for clock in (row.get("clocks") or {}).values()]
    for field, name in CLOCKS.items():
        numbers = [clock[field] for clock in clocks if clock.get(field)]
        summary[name] = f"{min(numbers):g} to {max(numbers):g}" if numbers else UNKNOWN
    for field, name in COUNTS.items():
        candidates = [row[field] for row in facts if row.get(field) is not None]
        summary[name] = f"{sum(candidates):,}" if candidates else UNKNOWN
    return summary, missing
