"""The winning configs of a run as files: `write_winners` writes them from its ledger into `configs/`, and
`read_winners` reads them there for a merge (docs/reference/files.md).

`decisions.py` decides on each bucket: of an AITER file, in `configs/aiter/`, one of its buckets of M (`M_LEQ_16`); of
an engine's file, in `configs/vllm/`, the range of M that one key serves (`M=57-80`). The table `tuned.csv` beside the
files has a line for each measurement, which ends with the document of its row. `read_winners` reads these documents
alone, for a merge, `publish` and a bench of config sets; the files are for people:

    file,bucket,shape,M,caller,count,old_us,new_us,err_ratio,document
    gfx950-GEMM-A16W16-N=1280-K=8192.json,M_LEQ_16,N=1280 K=8192,16,,3,9.6,8.1,0.0,"{""kind"": ""a16w16"", ...}"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.configs.bucket_decision import (
    BucketDecision,
    BucketPlace,
    MeasuredShape,
    layers_of,
    parse_decision,
)
from orchestrator.configs.decisions import decide_winners, join_decisions
from orchestrator.errors import InputError
from orchestrator.files.faults import Faults
from orchestrator.files.read import csv_records
from orchestrator.files.write import write_atomic, write_csv
from orchestrator.ledger.reader import LedgerReader
from worker.triton_configs.config_file import Bucket, json_in_form_of, text_of_buckets
from worker.triton_configs.engine_package import Layer
from worker.triton_configs.pair import needs_down_file, split_entries

AITER_FOLDER = "configs/aiter"
ENGINE_FOLDERS = {"vllm": "configs/vllm", "sglang": "configs/sglang"}
"""The folder of a run's winners by engine, whose name is its tuner's too."""
TABLE = "tuned.csv"
COLUMNS = ("file", "bucket", "shape", "M", "caller", "count", "old_us", "new_us", "err_ratio", "document")


@dataclass(slots=True)
class WinnerFile:
    """The winners of one file."""

    path: Path
    """The file in the run's folder."""
    place: BucketPlace
    """The place of one of its buckets; all are of one device and kind."""
    winners: dict[str, BucketDecision] = field(default_factory=dict)
    """By bucket."""

    @property
    def values(self) -> dict[str, Bucket]:
        """The new values by bucket."""
        return {name: winner.values for name, winner in self.winners.items()}

    @property
    def measured(self) -> list[MeasuredShape]:
        """All measurements."""
        return [row for winner in self.winners.values() for row in winner.measured]

    @property
    def layers(self) -> list[Layer]:
        """The layers that were measured, of an engine's file."""
        return layers_of(self.measured)

    @property
    def shape(self) -> tuple[int | None, int, int]:
        """(B, N, K) of the first measurement. All have the same, except in AITER's default file."""
        first = self.measured[0]
        return first.b, first.n, first.k


def write_winners(ledger: LedgerReader, root: Path) -> list[str]:
    """Write the winners of a run into config files, and tuned.csv beside them; files of an earlier export are removed.
    Returns sentences on the buckets that were left out. `root`: the run's folder. Raises OSError."""
    rows = ((row.key, row.row) for row in ledger.winners())
    winners, notes = decide_winners(ledger.family, rows, ledger.points())
    tuner = ledger.meta("tuner", "")
    is_engine = tuner in ENGINE_FOLDERS
    folder = root / ENGINE_FOLDERS.get(tuner, AITER_FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, Bucket]] = {}
    for place in sorted(winners, key=lambda place: place.key):
        files.setdefault(place.file, {})[place.name_in_file] = winners[place].values
    if is_engine:
        files = _with_down_files(files)
    for name, buckets in files.items():
        text = json_in_form_of("", buckets) if is_engine else text_of_buckets(buckets)
        write_atomic(folder / name, text)
    for path in folder.glob("*.json"):
        if path.name not in files:
            path.unlink()
    lines = [_table_line(place, row) for place, winner in winners.items() for row in winner.measured]
    write_csv(folder / TABLE, COLUMNS, lines)
    return notes


def _with_down_files(files: Mapping[str, dict[str, Bucket]]) -> dict[str, dict[str, Bucket]]:
    """An engine's files, those with pairs (`worker/triton_configs/pair.py`) as two files."""
    split: dict[str, dict[str, Bucket]] = {}
    for name, buckets in files.items():
        split[name], down_buckets = split_entries(buckets)
        if any(needs_down_file(values) for values in buckets.values()):
            split[name.replace(".json", "_down.json")] = down_buckets
    return split


def _table_line(place: BucketPlace, row: MeasuredShape) -> list[str]:
    """The cells of COLUMNS."""
    measured = (row.m, row.caller, row.count, row.old_us, row.new_us, row.err_ratio)
    return [str(cell) for cell in (place.file, place.bucket, row.sizes, *measured, row.document)]


def engine_of_winners(run: Path) -> str:
    """The engine whose files a run's winners are for, such as "vllm"; "" if they are AITER's, or if it has none."""
    for engine, folder in ENGINE_FOLDERS.items():
        if (run / folder / TABLE).is_file():
            return engine
    return ""


def read_winners(run: Path) -> list[WinnerFile]:
    """The files of a run's winners. Raises InputError with every fault by line."""
    table = run / ENGINE_FOLDERS.get(engine_of_winners(run), AITER_FOLDER) / TABLE
    if not table.is_file():
        raise InputError(
            f"{run}: holds no {TABLE} in configs/aiter, configs/vllm or configs/sglang; a finished run of"
            " `tune --tuner aiter-triton`, `vllm` or `sglang` has one"
        )
    decisions: list[BucketDecision] = []
    faults = Faults(table)
    for text, line in _documents_in(table).items():
        decision = parse_decision(text, line)
        if decision is None:
            faults.add("does not end with the document of a winner", line=line)
        else:
            decisions.append(decision)
    faults.raise_as(InputError)
    winners, _ = join_decisions(decisions)
    files: dict[str, WinnerFile] = {}
    for place, winner in winners.items():
        file = files.setdefault(place.file, WinnerFile(table.parent / place.file, place))
        file.winners[place.bucket] = winner
    if not files:
        raise InputError(f"{table}: has no row: the run proved no winner, so there is nothing to merge")
    return list(files.values())


def _documents_in(table: Path) -> dict[str, int]:
    """The documents at the ends of a table's lines but the header's, each with the number of its first line."""
    lines: dict[str, int] = {}
    for line, _, cells in csv_records(table):
        if cells[-1] not in ("", COLUMNS[-1]):
            lines.setdefault(cells[-1], line)
    return lines
