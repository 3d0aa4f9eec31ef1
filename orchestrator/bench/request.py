"""The command line of `bench` as options of the workers' tuner, with every fault found before a run begins; and sides
that are images of the worker, in turn on one slot.

Sides of one node alternate inside its worker (worker/bench/tuner.py). An image is a container, so images alternate pass
by pass: each pass is a run of its own with one round over all shapes, in an order drawn anew, and equal pass numbers
are paired. Everything happens on one slot: the first of the first usable node.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from orchestrator.configs.winners import AITER_FOLDER, TABLE, read_winners
from orchestrator.controller.prepare import Prepared, RunRequest, prepare
from orchestrator.engines import find_engine
from orchestrator.errors import InputError
from orchestrator.files.read import read_text
from orchestrator.ledger.reader import LedgerReader, ProfileRow
from orchestrator.paths import RunPaths, create_run_folder, new_run_id
from orchestrator.results.bench import BenchResults, environments, results, rule_of, settled_rows
from orchestrator.shapes.model import render_shapes
from orchestrator.templating import data_folder
from worker.families import BATCHED
from worker.protocol.bench import ENV_NAME, Options, Side
from worker.text import plural
from worker.triton_configs.config_file import MAX_BYTES, ConfigFileError, parse_config_file
from worker.triton_configs.resolve import CONFIGS, GEMMS

TUNER = "bench"
MAX_FILE = 4 << 20
GLUON = "aiter/ops/triton/gluon"
TODAY = "today"
"""Name of the set that a single one is compared with: the configs of the node's AITER as they are."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}\Z")
_OURS = re.compile(r"GEMMFLEET_|(PYTHONPATH|TRITON_CACHE_DIR|AITER_JIT_DIR|\w+_VISIBLE_DEVICES)\Z")


def suite() -> Path:
    """The 15 shapes of the FP4 guide, for a bench without a file."""
    return data_folder("examples") / "fp4_suite.csv"


def options(
    compared: Sequence[Side], backends: Sequence[str], table: Path | None = None, gluon_from: Path | None = None,
    **plain: Any,
) -> dict[str, Any]:  # fmt: skip
    """The options of the tuner `bench`; no backends: the worker decides by what is there. Raises InputError."""
    sets = any(s.configs is not None for s in compared)
    given = {
        "backends": [b for word in backends for b in word.split(",")] or ["aiter-triton"] * sets,
        "sides": [asdict(s) for s in compared],
        "table": _table(table) if table else "",
        "gluon": gluon_files(gluon_from) if gluon_from else {},
    }
    made = plain | {name: value for name, value in given.items() if value}
    try:
        parsed = Options.parse(made)
    except ValueError as e:
        raise InputError(str(e)) from e
    made |= {"backends": list(parsed.backends)} if parsed.backends else {}
    if (parsed.warmup and not parsed.iters) or (parsed.iters and parsed.timer != "events"):
        raise InputError("--warmup belongs to --iters, and --iters to --timer events")
    other = [b for b in parsed.backends if b not in ("aiter-triton", *BATCHED)]
    if other and sets:
        raise InputError(f"--config-set: {', '.join(other)} reads no such configs; aiter-triton and aiter-batched do")
    return made


def sides(envs: Sequence[str], sets: Sequence[str]) -> list[Side]:
    """The sides of a bench: stacks, which are interpreters or images, or config sets that one stack reads. Raises
    InputError."""
    stacks = [_stack(word) for word in envs]
    if stacks and len({bool(s.image) for s in stacks}) != 1:
        raise InputError("--env: name interpreters (absolute paths) or images, not both")
    if len({s.name for s in stacks}) != len(stacks):
        raise InputError("--env: two environments have the same name")
    if not sets:
        return stacks
    if len(stacks) > 1 or any(s.image for s in stacks):
        raise InputError("--config-set: with it at most one --env, an interpreter: the one that reads all sets")
    reader = stacks[0] if stacks else Side()
    return [replace(reader, name=name, configs=text) for name, text in config_sets(sets).items()]


def _stack(word: str) -> Side:
    """`NAME=[PYTHON|IMAGE][,VAR=VALUE...]`, PYTHON an absolute path. Raises InputError."""
    name, sep, rest = word.partition("=")
    value, *settings = rest.split(",")
    if not sep or not (value or settings) or not ENV_NAME.match(name):
        raise InputError(f"--env {word!r} is not NAME=/path/to/python or NAME=IMAGE, with any ,VAR=VALUE behind it")
    value = str(Path(value).expanduser()) if value.startswith("~") else value
    if value.startswith("."):
        raise InputError(f"--env {word}: the nodes know no folder of yours; give an absolute path")
    kind = "python" if not value or value.startswith("/") else "image"
    return Side(name, variables=_variables(name, settings), **{kind: value})


def _variables(side: str, settings: Sequence[str]) -> dict[str, str]:
    """Environment variables of `VAR=VALUE` words. Raises InputError."""
    out: dict[str, str] = {}
    for setting in settings:
        name, sep, value = setting.partition("=")
        if not sep or not _VARIABLE.match(name) or not value.isprintable():
            raise InputError(f"--env {side}: {setting!r} is not VAR=VALUE (a value holds no comma)")
        if _OURS.match(name):
            raise InputError(f"--env {side}: {name} is set by gemmfleet itself for every process")
        if name in out:
            raise InputError(f"--env {side}: {name} is there twice")
        out[name] = value
    return out


def _table(path: Path) -> str:
    """The text of a tuned table. Raises InputError."""
    text = read_text(path, MAX_FILE, InputError)
    header = [name.strip() for name in text.partition("\n")[0].split(",")]
    if missing := [c for c in ("M", "N", "K", "us") if c not in header]:
        raise InputError(f"{path}:1: no column {', '.join(missing)}: no tuned table")
    return text


def gluon_files(folder: Path) -> dict[str, str]:
    """Kernel and configurations by their path in AITER's tree: from a checkout, or from a flat folder as the runbook
    leaves them (`gluon_gemm_afp4wfp4.py` or `gemm_*.py`, `*.json`). Raises InputError."""
    if not folder.is_dir():
        raise InputError(f"--gluon-from {folder}: no such folder")
    if (folder / GLUON).is_dir():
        files = [*(folder / GLUON).glob("*.py"), *(p for p in (folder / CONFIGS).rglob("*.json") if "gluon" in p.parts)]
        found = {p.relative_to(folder).as_posix(): p for p in files}
    else:
        flat = {p.name.removeprefix("gluon_"): p for p in sorted(folder.glob("*.py"))}
        found = {f"{GLUON}/{n}": p for n, p in flat.items() if n.startswith("gemm_") or n == "triton_version.py"}
        found |= {f"{CONFIGS}/gemm/gluon/{p.name}": p for p in sorted(folder.glob("*.json"))}
    if not any(rel.startswith(f"{GLUON}/gemm_") for rel in found):
        raise InputError(f"--gluon-from {folder}: neither {GLUON}/gemm_*.py nor a gemm_*.py or gluon_gemm_*.py in it")
    return {rel: read_text(path, MAX_FILE, InputError) for rel, path in sorted(found.items())}


def config_sets(words: Sequence[str]) -> dict[str, str]:
    """Text of each set by its name, "" for `NAME=`, the node's own configs. Raises InputError."""
    found: dict[str, str] = {}
    for word in words:
        name, sep, folder = word.partition("=")
        if not sep or not ENV_NAME.match(name) or name in found:
            raise InputError(f"--config-set {word!r} is not NAME=DIR with a name of its own")
        found[name] = _text(word, Path(folder).expanduser()) if folder else ""
    if words and not any(found.values()):
        raise InputError(f"--config-set {words[0]}: names no folder, and no other set does")
    if list(found) == [TODAY]:
        raise InputError(f"--config-set: {TODAY} is the node's own set here; give this one another name")
    return {TODAY: "", **found} if len(found) == 1 else found


def _text(word: str, folder: Path) -> str:
    run = folder.parents[1] if folder.parts[-2:] == tuple(AITER_FOLDER.split("/")) else folder
    if (run / AITER_FOLDER / TABLE).is_file():
        won = read_winners(run)
        return _document(folder, "winners", [
            {"kind": w.place.kind.name, "gfx": w.place.device.name, "shape": None if w.place.is_default else w.shape,
             "buckets": w.values}
            for w in won
        ])  # fmt: skip
    configs = folder / CONFIGS if (folder / CONFIGS).is_dir() else folder
    paths = sorted(p for where in GEMMS for p in configs.glob(f"{where}/**/*.json"))
    if not paths:
        raise InputError(
            f"--config-set {word}: holds neither GEMM configs of AITER ({CONFIGS}, or that folder itself) nor a"
            f" run's {AITER_FOLDER}/{TABLE}"
        )
    files = {p.relative_to(configs).as_posix(): read_text(p, MAX_BYTES, InputError) for p in paths}
    try:
        for rel, text in files.items():
            parse_config_file(text, configs / rel)
    except ConfigFileError as e:
        raise InputError(str(e)) from e
    return _document(folder, "files", files)


def _document(folder: Path, what: str, content: Sequence[Any] | Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    named = f"{folder} ({plural(len(content), 'file')}, sha256 {digest})"
    return json.dumps({"named": named, what: content}, sort_keys=True)


def refuse_other_engines(first: Prepared) -> None:
    """Raise InputError where a node does not run images."""
    for node in first.nodes:
        if not find_engine(node.engine).runs_images:
            raise InputError(f"--env with images: node {node.node} has engine {node.engine}; only docker runs images")


def run_passes(
    first: Prepared, request: RunRequest, compared: Sequence[Side], drive: Callable[[RunPaths, str], str]
) -> tuple[BenchResults, str]:
    """Run passes until the runs agree or none is left; their results, and `finished` or `interrupted`.

    `drive` runs one pass to its end and returns its state. Raises what a run raises.
    """
    root = create_run_folder(request.runs, f"bench-{new_run_id(time.time())}")
    node = first.nodes[0]
    gpus = [int(node.slots[0])] if node.devices[node.slots[0]]["HIP_VISIBLE_DEVICES"] else 0
    inventory = one_slot(first.inventory_path, root.root / "inventory.yaml", node.node, gpus)
    rule, rng, left = rule_of(request.options), random.Random(root.run), list(first.listed.shapes)
    rows: list[ProfileRow] = []
    stacks: dict[str, dict[str, Any]] = {s.name: {} for s in compared}

    def so_far() -> BenchResults:
        return BenchResults(root, first.family, results(rows, rule, list(stacks)), stacks, len(first.listed.shapes))

    for number in range(rule.runs + rule.extra):
        if number >= rule.runs:
            loose = {r.key for r in so_far().found if r.status == "unstable"}
            left = [s for s in left if s.key in loose]
        if not left:
            break
        shapes = root.root / f"shapes-{number + 1}.csv"
        shapes.write_text(render_shapes(left, first.family))
        for side in rng.sample(compared, len(compared)):
            made = {**request.options, "sides": [asdict(side)], "runs": 1, "extra": 0, "first": number}
            paths = prepare(
                replace(request, shapes=shapes, inventory=inventory, image=side.image, limit=None, options=made)
            ).create()
            state = drive(paths, f"pass {number + 1}, {side.name} ({side.image})")
            with LedgerReader.open_readonly(paths.ledger) as ledger:
                rows += settled_rows(ledger)
                stacks |= environments(ledger)
            if state != "finished":
                return so_far(), "interrupted"
    return so_far(), "finished"


def one_slot(source: Path, path: Path, node: str, gpus: list[int] | int) -> Path:
    """Write an inventory with one node of another one, and one of its GPUs."""
    raw = yaml.safe_load(source.read_text())
    raw["nodes"] = {node: {**((raw.get("nodes") or {}).get(node) or {}), "gpus": gpus}}
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    return path
