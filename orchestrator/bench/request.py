"""The command line of `bench` as options of the workers' tuner, with every fault found before a run begins.

`gemmfleet bench` calls `parse_sides`, then `tuner_options`. A side is a software stack or a config set. Sides of one
node alternate inside its worker (worker/bench/tuner.py); sides that are images alternate in `image_passes.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from orchestrator.configs.winners import AITER_FOLDER, TABLE, WinnerFile, read_winners
from orchestrator.errors import InputError
from orchestrator.files.read import read_text
from orchestrator.pages import Document
from orchestrator.templating import data_folder
from worker.families import BATCHED
from worker.protocol.bench import SIDE_NAME, BenchOptions, Side
from worker.text import plural
from worker.triton_configs.config_file import MAX_BYTES, ConfigFileError, parse_config_file
from worker.triton_configs.resolve import CONFIGS, GEMMS

TUNER = "bench"
MAX_FILE = 4 << 20
GLUON = "aiter/ops/triton/gluon"
READS_CONFIGS = "aiter-triton"
"""The backend of a bench of config sets."""
TODAY = "today"
"""Name of the set that a single one is compared with: the configs of the node's AITER as they are."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}\Z")
_OURS = re.compile(r"GEMMFLEET_|(PYTHONPATH|TRITON_CACHE_DIR|AITER_JIT_DIR|\w+_VISIBLE_DEVICES)\Z")


def example_suite() -> Path:
    """The 15 shapes of the FP4 guide, for a bench without a file."""
    return data_folder("examples") / "fp4_suite.csv"


def tuner_options(
    sides: Sequence[Side],
    backends: Sequence[str],
    table: Path | None = None,
    gluon_from: Path | None = None,
    **plain: Any,
) -> Document:
    """The options of the tuner `bench` (worker.protocol.bench.Options) as JSON values. `table` and `gluon_from`: files
    whose text goes with them. `plain`: options that are taken as they are.

    Without `backends` a worker measures those that its software has. Raises InputError.
    """
    has_config_sets = any(side.configs is not None for side in sides)
    options = dict(plain)
    names = [name for word in backends for name in word.split(",")]
    if not names and has_config_sets:
        names = [READS_CONFIGS]
    if names:
        options["backends"] = names
    if sides:
        options["sides"] = [asdict(side) for side in sides]
    if table:
        options["table"] = _read_table(table)
    if gluon_from:
        options["gluon"] = gluon_files(gluon_from)
    try:
        parsed = BenchOptions.parse(options)
    except ValueError as e:
        raise InputError(str(e)) from e
    if parsed.backends:
        options["backends"] = list(parsed.backends)
    if (parsed.warmup and not parsed.iters) or (parsed.iters and parsed.timer != "events"):
        raise InputError("--warmup belongs to --iters, and --iters to --timer events")
    others = [name for name in parsed.backends if name not in (READS_CONFIGS, *BATCHED)]
    if others and has_config_sets:
        raise InputError(f"--config-set: {', '.join(others)} reads no such configs; aiter-triton and aiter-batched do")
    return options


def parse_sides(envs: Sequence[str], sets: Sequence[str]) -> list[Side]:
    """The sides of a bench: stacks, which are interpreters or images, or config sets that one stack reads. Raises
    InputError."""
    stacks = [_parse_stack(word) for word in envs]
    if len({bool(stack.image) for stack in stacks}) > 1:
        raise InputError("--env: name interpreters (absolute paths) or images, not both")
    if len({stack.name for stack in stacks}) != len(stacks):
        raise InputError("--env: two environments have the same name")
    if not sets:
        return stacks
    if len(stacks) > 1 or any(stack.image for stack in stacks):
        raise InputError("--config-set: with it at most one --env, an interpreter: the one that reads all sets")
    reader = stacks[0] if stacks else Side()
    return [replace(reader, name=name, configs=text) for name, text in config_sets(sets).items()]


def _parse_stack(word: str) -> Side:
    """`NAME=[PYTHON|IMAGE][,VAR=VALUE...]`, PYTHON an absolute path. Raises InputError."""
    name, sep, rest = word.partition("=")
    value, *settings = rest.split(",")
    if not sep or not (value or settings) or not SIDE_NAME.match(name):
        raise InputError(f"--env {word!r} is not NAME=/path/to/python or NAME=IMAGE, with any ,VAR=VALUE behind it")
    if value.startswith("~"):
        value = str(Path(value).expanduser())
    if value.startswith("."):
        raise InputError(f"--env {word}: the nodes know no folder of yours; give an absolute path")
    variables = _parse_variables(name, settings)
    if not value or value.startswith("/"):
        return Side(name, variables=variables, python=value)
    return Side(name, variables=variables, image=value)


def _parse_variables(side: str, settings: Sequence[str]) -> dict[str, str]:
    """Environment variables of `VAR=VALUE` words. Raises InputError."""
    variables: dict[str, str] = {}
    for setting in settings:
        name, sep, value = setting.partition("=")
        if not sep or not _VARIABLE.match(name) or not value.isprintable():
            raise InputError(f"--env {side}: {setting!r} is not VAR=VALUE (a value holds no comma)")
        if _OURS.match(name):
            raise InputError(f"--env {side}: {name} is set by gemmfleet itself for every process")
        if name in variables:
            raise InputError(f"--env {side}: {name} is there twice")
        variables[name] = value
    return variables


def _read_table(path: Path) -> str:
    """The text of a tuned table. Raises InputError."""
    text = read_text(path, MAX_FILE, InputError)
    header = [name.strip() for name in text.partition("\n")[0].split(",")]
    missing = [column for column in ("M", "N", "K", "us") if column not in header]
    if missing:
        raise InputError(f"{path}:1: no column {', '.join(missing)}: no tuned table")
    return text


def gluon_files(folder: Path) -> dict[str, str]:
    """Kernel and configurations by their path in AITER's tree: from a checkout, or from a flat folder as the runbook
    leaves them (`gluon_gemm_afp4wfp4.py` or `gemm_*.py`, `*.json`). Raises InputError."""
    if not folder.is_dir():
        raise InputError(f"--gluon-from {folder}: no such folder")
    if (folder / GLUON).is_dir():
        files = _files_of_checkout(folder)
    else:
        files = _files_of_flat_folder(folder)
    if not any(name.startswith(f"{GLUON}/gemm_") for name in files):
        raise InputError(f"--gluon-from {folder}: neither {GLUON}/gemm_*.py nor a gemm_*.py or gluon_gemm_*.py in it")
    return {name: read_text(path, MAX_FILE, InputError) for name, path in sorted(files.items())}


def _files_of_checkout(folder: Path) -> dict[str, Path]:
    kernels = (folder / GLUON).glob("*.py")
    configs = [path for path in (folder / CONFIGS).rglob("*.json") if "gluon" in path.parts]
    return {path.relative_to(folder).as_posix(): path for path in (*kernels, *configs)}


def _files_of_flat_folder(folder: Path) -> dict[str, Path]:
    files = {}
    for path in sorted(folder.glob("*.py")):
        name = path.name.removeprefix("gluon_")
        if name.startswith("gemm_") or name == "triton_version.py":
            files[f"{GLUON}/{name}"] = path
    for path in sorted(folder.glob("*.json")):
        files[f"{CONFIGS}/gemm/gluon/{path.name}"] = path
    return files


def config_sets(words: Sequence[str]) -> dict[str, str]:
    """Text of each set by its name, "" for `NAME=`, the node's own configs. Raises InputError."""
    sets: dict[str, str] = {}
    for word in words:
        name, sep, folder = word.partition("=")
        if not sep or not SIDE_NAME.match(name) or name in sets:
            raise InputError(f"--config-set {word!r} is not NAME=DIR with a name of its own")
        sets[name] = _read_config_set(word, Path(folder).expanduser()) if folder else ""
    if words and not any(sets.values()):
        raise InputError(f"--config-set {words[0]}: names no folder, and no other set does")
    if list(sets) == [TODAY]:
        raise InputError(f"--config-set: {TODAY} is the node's own set here; give this one another name")
    return {TODAY: "", **sets} if len(sets) == 1 else sets


def _read_config_set(word: str, folder: Path) -> str:
    """The winners of a run, or the GEMM configs of an AITER, as JSON for the worker: `{"named": "DIR (3 files, ...)",
    "winners": [{"kind": ..., "gfx": ..., "shape": ..., "buckets": ...}]}`, or with `"files": {"gemm/x.json": "{...}"}`
    in place of the winners. Raises InputError."""
    run = folder
    if folder.parts[-2:] == tuple(AITER_FOLDER.split("/")):
        run = folder.parents[1]
    if (run / AITER_FOLDER / TABLE).is_file():
        return _document(folder, "winners", [_describe_winners(file) for file in read_winners(run)])
    configs = folder
    if (folder / CONFIGS).is_dir():
        configs = folder / CONFIGS
    paths = sorted(path for gemms in GEMMS for path in configs.glob(f"{gemms}/**/*.json"))
    if not paths:
        raise InputError(
            f"--config-set {word}: holds neither GEMM configs of AITER ({CONFIGS}, or that folder itself) nor a"
            f" run's {AITER_FOLDER}/{TABLE}"
        )
    files = {path.relative_to(configs).as_posix(): read_text(path, MAX_BYTES, InputError) for path in paths}
    try:
        for name, text in files.items():
            parse_config_file(text, configs / name)
    except ConfigFileError as e:
        raise InputError(str(e)) from e
    return _document(folder, "files", files)


def _describe_winners(file: WinnerFile) -> Document:
    return {
        "kind": file.place.kind.name,
        "gfx": file.place.device.name,
        "shape": None if file.place.is_default else file.shape,
        "buckets": file.values,
    }


def _document(folder: Path, what: str, content: Sequence[Any] | Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    named = f"{folder} ({plural(len(content), 'file')}, sha256 {digest})"
    return json.dumps({"named": named, what: content}, sort_keys=True)
