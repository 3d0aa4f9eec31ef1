"""Config sets of AITER's Triton GEMMs (`--config-set NAME=DIR`), each read into one text for the workers
(worker/bench/backends/config_sets.py)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.configs.winners import FOLDER, TABLE, read_winners
from orchestrator.errors import InputError
from orchestrator.tables.open import read_text
from worker.protocol.bench import ENV_NAME
from worker.text import plural
from worker.triton_configs.resolve import CONFIGS, GEMMS, MAX_BYTES, ConfigFileError, parse

TODAY = "today"
"""Name of the set that a single one is compared with: the configs of the node's AITER as they are."""


def config_sets(words: Sequence[str]) -> dict[str, str]:
    """Text of each set by its name, "" for `NAME=`, the node's own configs. Raises InputError."""
    found: dict[str, str] = {}
    for word in words:
        name, sep, folder = word.partition("=")
        if not sep or not ENV_NAME.match(name):
            raise InputError(f"--config-set {word!r} is not NAME=DIR")
        if name in found:
            raise InputError(f"--config-set: two sets have the name {name}")
        found[name] = _text(word, Path(folder).expanduser()) if folder else ""
    if words and not any(found.values()):
        raise InputError(f"--config-set {words[0]}: names no folder, and no other set does")
    if len(found) == 1:
        if TODAY in found:
            raise InputError(f"--config-set: {TODAY} is the node's own set here; give this one another name")
        found = {TODAY: "", **found}
    return found


def _text(word: str, folder: Path) -> str:
    run = folder.parents[1] if folder.parts[-2:] == tuple(FOLDER.split("/")) else folder
    if (run / FOLDER / TABLE).is_file():
        won = read_winners(run)
        return _document(folder, "winners", [
            {"kind": w.kind.name, "gfx": w.gfx, "shape": None if w.default else w.shape,
             "buckets": {b.bucket: b.values for b in w.winners.values()}}
            for w in won
        ])  # fmt: skip
    configs = folder / CONFIGS if (folder / CONFIGS).is_dir() else folder
    paths = sorted(p for where in GEMMS for p in configs.glob(f"{where}/**/*.json"))
    if not paths:
        raise InputError(
            f"--config-set {word}: holds neither GEMM configs of AITER ({CONFIGS}, or that folder itself) nor a"
            f" run's {FOLDER}/{TABLE}"
        )
    files = {p.relative_to(configs).as_posix(): read_text(p, MAX_BYTES, InputError) for p in paths}
    try:
        for rel, text in files.items():
            parse(text, configs / rel)
    except ConfigFileError as e:
        raise InputError(str(e)) from e
    return _document(folder, "files", files)


def _document(folder: Path, what: str, content: Sequence[Any] | Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    named = f"{folder} ({plural(len(content), 'file')}, sha256 {digest})"
    return json.dumps({"named": named, what: content}, sort_keys=True)
