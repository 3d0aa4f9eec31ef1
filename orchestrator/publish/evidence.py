"""The evidence in a pull request's text: facts of the measurements, and the commands that repeat them.

`publication.py` puts what `collect_evidence` returns into the text. The facts of a row are a record such as
`{"device": "AMD Instinct MI355X", "rocm": "7.1.0", "run": "20261129-1", "tried": 31, "failed": 2, ...}`
(`results/run_facts.py`); the text says which values all rows have, and how many rows each of several.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.tables.run_folders import provenance_of
from worker.text import plural

CLOCKS = {"clock_mhz": "GPU clock (MHz)", "memory_clock_mhz": "memory clock (MHz)"}
"""Fields of a reading of clocks, and their names in the text."""
COUNTS = {"tried": "candidates tried", "failed": "of them without a right result"}
"""Fields of a row's record that are added up, and their names in the text."""
UNKNOWN = "not recorded"


class FactNames(NamedTuple):
    """The facts that a project's text has."""

    in_text: Mapping[str, str]
    """Fields of a record, and their names in the text."""
    needed: Sequence[str]
    """The fields that a review asks for."""


class Evidence(NamedTuple):
    """The evidence for a review."""

    facts: dict[str, str]
    """Facts of the measurements, by their names in the text."""
    commands: list[str]
    """Commands that repeat the measurements."""
    missing: list[str]
    """Facts that a reviewer will ask for and the runs do not have."""


def collect_evidence(
    row_facts: Iterable[Mapping[str, Any]],
    folders: Sequence[Path],
    runs: Path,
    names: FactNames,
    *,
    has_config_files: bool,
) -> Evidence:
    """The evidence of what is published. `row_facts`: the records of the published rows of tables; `folders`: the runs
    that were named; `runs`: where the runs of the records lie; `has_config_files`: config files are published as well,
    whose facts are those of the runs' slots."""
    records = list(row_facts)
    run_folders = {str(facts["run"]): runs / str(facts["run"]) for facts in records if facts.get("run")}
    run_folders |= {folder.name: folder for folder in folders}
    documents = {run: provenance_of(folder) for run, folder in run_folders.items()}
    if has_config_files:
        records += [facts for document in documents.values() for facts in _facts_of_slots(document)]
    facts, missing = _summarize_facts(records, names)
    commands: list[str] = []
    for run, document in documents.items():
        if document.get("argv"):
            commands.append(f"gemmfleet {shlex.join(public_words(document['argv']))}")
        else:
            missing.append(f"command of the run {run}")
    return Evidence(facts, commands, missing)


def public_words(words: Iterable[Any]) -> list[str]:
    """The words of a command for a public text: of an absolute path the name alone, without folders of this machine.

    `/home/me/runs/r1` becomes `r1`, and `--out=/tmp/x` becomes `--out=x`.
    """
    shown: list[str] = []
    for word in map(str, words):
        option, equals, value = word.partition("=")
        if word.startswith("/"):
            shown.append(Path(word).name)
        elif value.startswith("/"):
            shown.append(f"{option}{equals}{Path(value).name}")
        else:
            shown.append(word)
    return shown


def _facts_of_slots(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Facts of a run that wrote config files, one record for each slot. `document`: the run's provenance."""
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


def _summarize_facts(records: Sequence[Mapping[str, Any]], names: FactNames) -> tuple[dict[str, str], list[str]]:
    """(the facts by their names in the text, the names of those that a review needs and that some record lacks)."""
    summary: dict[str, str] = {}
    missing: list[str] = []
    for field, name in names.in_text.items():
        counts = Counter(str(record.get(field) or UNKNOWN) for record in records)
        summary[name] = "; ".join(counts)
        if len(counts) > 1:
            summary[name] = "; ".join(f"{value} ({plural(rows, 'row')})" for value, rows in counts.most_common())
        if field in names.needed and (UNKNOWN in counts or not counts):
            missing.append(name)
    clocks = [clock for record in records for clock in (record.get("clocks") or {}).values()]
    for field, name in CLOCKS.items():
        numbers = [clock[field] for clock in clocks if clock.get(field)]
        summary[name] = f"{min(numbers):g} to {max(numbers):g}" if numbers else UNKNOWN
    for field, name in COUNTS.items():
        candidates = [record[field] for record in records if record.get(field) is not None]
        summary[name] = f"{sum(candidates):,}" if candidates else UNKNOWN
    return summary, missing
