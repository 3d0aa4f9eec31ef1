"""The command line of `bench` as options of the workers' tuner, with every fault found before a run begins."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.bench.config_sets import config_sets
from orchestrator.errors import InputError
from orchestrator.shapes import Shape
from orchestrator.tables.open import read_text
from worker.families import Family
from worker.families.backends import BATCHED
from worker.protocol.bench import ENV_NAME, Options

TUNER = "bench"
SUITE_FAMILY = "a4w4_blockscale"
MAX_FILE, MAX_FILES = 4 << 20, 100
GLUON = "aiter/ops/triton/gluon"
CONFIGS = "aiter/ops/triton/configs"
FLAT_CONFIGS = f"{CONFIGS}/gemm/gluon"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}\Z")
_OURS = re.compile(r"GEMMFLEET_|(PYTHONPATH|TRITON_CACHE_DIR|AITER_JIT_DIR|\w+_VISIBLE_DEVICES)\Z")


@dataclass(frozen=True, slots=True)
class Stack:
    """An environment to compare: an interpreter on the node ("": the worker's own), or an image of the worker, with
    environment variables of its own."""

    name: str
    python: str = ""
    image: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """The options of `bench` as they were typed, but for those that `tune` has too."""

    backends: Sequence[str] = ()
    """Empty: the worker decides by what is there."""
    envs: Sequence[str] = ()
    timer: str = "events"
    kernel: str = ""
    runs: int = 3
    extra: int = 2
    stability: float = 0.05
    sample_s: float = 0.2
    table: Path | None = None
    gluon_from: Path | None = None
    config_sets: Sequence[str] = ()
    more: Mapping[str, Any] = field(default_factory=dict)


def options(wanted: BenchRequest, family: Family, shapes: Sequence[Shape]) -> dict[str, Any]:
    """The options of the tuner `bench`. Raises InputError."""
    made: dict[str, Any] = {
        "runs": wanted.runs, "extra": wanted.extra, "within": wanted.stability, "sample_s": wanted.sample_s,
        "timer": wanted.timer, **wanted.more,
    }  # fmt: skip
    if wanted.backends:
        made["backends"] = [b for word in wanted.backends for b in word.split(",")]
    if wanted.kernel:
        made["kernel"] = wanted.kernel
    named = stacks(wanted.envs)
    sets = config_sets(wanted.config_sets)
    if sets:
        if len(named) > 1 or any(s.image for s in named):
            raise InputError("--config-set: with it at most one --env, an interpreter: the one that reads all sets")
        named = [replace(named[0] if named else Stack(""), name=name) for name in sets]
        made["configs"] = sets
    if named and not any(s.image for s in named):
        made["envs"] = [{"name": s.name, "python": s.python, "variables": dict(s.variables)} for s in named]
    if wanted.table is not None:
        made["table"] = table_text(wanted.table, shapes, family)
    if wanted.gluon_from is not None:
        made["gluon"] = gluon_files(wanted.gluon_from)
    try:
        parsed = Options.parse(made)
    except ValueError as e:
        raise InputError(str(e)) from e
    if wanted.backends:
        made["backends"] = list(parsed.backends)
    other = [b for b in parsed.backends if b not in ("aiter-triton", *BATCHED)]
    if sets and other:
        raise InputError(f"--config-set: {', '.join(other)} reads no such configs; aiter-triton and aiter-batched do")
    return made


def suite() -> Path:
    """The 15 shapes of the FP4 guide, for a bench without a file."""
    from orchestrator.templating import data_folder

    return data_folder("examples") / "fp4_suite.csv"


def stacks(words: Sequence[str]) -> list[Stack]:
    """`NAME=[PYTHON|IMAGE][,VAR=VALUE...]`, PYTHON an absolute path, two or more, all of one kind. Raises
    InputError."""
    found: list[Stack] = []
    for word in words:
        name, sep, rest = word.partition("=")
        value, *settings = rest.split(",")
        if not sep or not (value or settings) or not ENV_NAME.match(name):
            raise InputError(f"--env {word!r} is not NAME=/path/to/python or NAME=IMAGE, with any ,VAR=VALUE behind it")
        if value.startswith("~"):
            value = str(Path(value).expanduser())
        of_node = not value or value.startswith("/")
        python, image = (value, "") if of_node else ("", value)
        found.append(Stack(name, python, image, _variables(name, settings)))
    if len({s.name for s in found}) != len(found):
        raise InputError("--env: two environments have the same name")
    if found and len({bool(s.image) for s in found}) != 1:
        raise InputError("--env: name interpreters (absolute paths) or images, not both")
    return found


def _variables(stack: str, settings: Sequence[str]) -> dict[str, str]:
    """Environment variables of `VAR=VALUE` words. Raises InputError."""
    out: dict[str, str] = {}
    for setting in settings:
        name, sep, value = setting.partition("=")
        if not sep or not _VARIABLE.match(name) or not value.isprintable():
            raise InputError(f"--env {stack}: {setting!r} is not VAR=VALUE (a value holds no comma)")
        if _OURS.match(name):
            raise InputError(f"--env {stack}: {name} is set by gemmfleet itself for every process")
        if name in out:
            raise InputError(f"--env {stack}: {name} is there twice")
        out[name] = value
    return out


def table_text(path: Path, shapes: Sequence[Shape], family: Family) -> str:
    """The rows of a tuned table that can serve these shapes: those of their N and K, whatever M. Raises InputError."""
    text = read_text(path, MAX_FILE, InputError)
    reader = csv.DictReader(io.StringIO(text, newline=""))
    header = reader.fieldnames or []
    missing = [c for c in (*family.key_names[:3], "us") if c not in header]
    if missing:
        raise InputError(f"{path}:1: no column {', '.join(missing)}: no tuned table of {family.name}")
    shared = [c for c in ("N", "K", "B") if c in family.key_names and c in header]
    wanted = {tuple(str(s.key_dict(family)[c]) for c in shared) for s in shapes}
    out = io.StringIO()
    writer = csv.DictWriter(out, header, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    try:
        writer.writerows(
            r for r in reader if tuple((r[c] or "").strip() for c in shared) in wanted and None not in r.values()
        )
    except csv.Error as e:
        raise InputError(f"{path}:{reader.line_num}: {e}") from e
    return out.getvalue()


def gluon_files(folder: Path) -> dict[str, str]:
    """Kernel and configurations by their path in AITER's tree: from a checkout, or from a flat folder as the runbook
    leaves them (`gluon_gemm_afp4wfp4.py` or `gemm_*.py`, `*.json`). Raises InputError."""
    if not folder.is_dir():
        raise InputError(f"--gluon-from {folder}: no such folder")
    found: dict[str, Path] = {}
    if (folder / GLUON).is_dir():
        files = [*(folder / GLUON).glob("*.py"), *(p for p in (folder / CONFIGS).rglob("*.json") if "gluon" in p.parts)]
        found = {p.relative_to(folder).as_posix(): p for p in files}
    else:
        for path in sorted(folder.glob("*.py")):
            name = path.name.removeprefix("gluon_")
            if name.startswith("gemm_") or name == "triton_version.py":
                found[f"{GLUON}/{name}"] = path
        found |= {f"{FLAT_CONFIGS}/{p.name}": p for p in sorted(folder.glob("*.json"))}
    if not any(rel.startswith(f"{GLUON}/gemm_") for rel in found):
        raise InputError(f"--gluon-from {folder}: neither {GLUON}/gemm_*.py nor a gemm_*.py or gluon_gemm_*.py in it")
    if len(found) > MAX_FILES:
        raise InputError(f"--gluon-from {folder}: {len(found)} files; at most {MAX_FILES} are taken")
    return {rel: read_text(path, MAX_FILE, InputError) for rel, path in sorted(found.items())}
