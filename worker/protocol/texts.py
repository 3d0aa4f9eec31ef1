"""Long texts of a bench's options (the table in force, winners, Gluon files) as files by their hash.

The controller puts the texts on a node once, beside the code (NodePaths.texts); run.yaml, node.json and every group's
spec hold their hashes only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_REFERENCE = re.compile(r"sha256:[0-9a-f]{64}\Z")
MAX_BYTES = 64 << 20


def lodge(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(the options with references in place of texts, the texts by their hash)."""
    texts: dict[str, str] = {}

    def keep(text: str) -> str:
        digest = hashlib.sha256(text.encode()).hexdigest()
        texts[digest] = text
        return f"sha256:{digest}"

    out = dict(options)
    if out.get("table"):
        out["table"] = keep(out["table"])
    if out.get("winners"):
        out["winners"] = keep(json.dumps(out["winners"], sort_keys=True))
    if out.get("gluon"):
        out["gluon"] = {path: keep(text) for path, text in out["gluon"].items()}
    return out, texts


def fetch(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The options with the texts that they refer to; what is a text already stays. Raises ValueError."""
    out = dict(options)
    if is_reference(out.get("table")):
        out["table"] = _read(out["table"], folder)
    if is_reference(out.get("winners")):
        out["winners"] = json.loads(_read(out["winners"], folder))
    if isinstance(out.get("gluon"), Mapping):
        files = out["gluon"].items()
        out["gluon"] = {path: _read(text, folder) if is_reference(text) else text for path, text in files}
    return out


def is_reference(value: object) -> bool:
    """Whether an option's value stands for a text."""
    return isinstance(value, str) and bool(_REFERENCE.match(value))


def _read(reference: str, folder: Path) -> str:
    digest = reference.removeprefix("sha256:")
    try:
        with (folder / digest).open("rb") as f:
            data = f.read(MAX_BYTES + 1)
    except OSError as e:
        raise ValueError(f"the text {folder / digest} of the options cannot be read: {e.strerror or e}") from e
    if hashlib.sha256(data).hexdigest() != digest:
        raise ValueError(f"the text {folder / digest} of the options is not what was sent: its hash differs")
    return data.decode()
