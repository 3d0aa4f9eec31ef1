"""The AITER of the worker's image: its tree, its findings and the chip, read once, when the tuner opens."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from worker.aiter_tree.locate import Tree, choose
from worker.device import identify
from worker.families import Family
from worker.protocol.paths import AITER_ROOT_ENV, IMAGE_ENV
from worker.tuners.aiter.adapted_tree import Applied
from worker.tuners.aiter.device_query import query_device
from worker.tuners.aiter.environment import (
    cleared_names,
    environment,
    inventory_switches,
    switch_record,
    switch_warnings,
)
from worker.tuners.aiter.findings import WINDOWS, Findings, inspect
from worker.tuners.aiter.script import TunerScript
from worker.tuners.aiter.spec import Options


@dataclass(frozen=True, slots=True)
class AiterImage:
    """`tree`: a scratch copy if workarounds are in use (`applied`). `device`: gfx, cu_num, device name and versions.
    `key` names image and chip. `seen_by_torch`: gfx and cu_num come from torch, as in AITER's rows."""

    tree: Tree
    findings: Findings
    device: Mapping[str, Any]
    key: str
    digest: str
    notes: tuple[str, ...] = ()
    seen_by_torch: bool = False
    applied: tuple[Applied, ...] = ()

    @property
    def gfx(self) -> str:
        return str(self.device.get("gfx") or "")

    def script(self, family: Family) -> TunerScript | None:
        """The family's script in this tree, None if the tree has none."""
        found, path = self.findings.families.get(family.name), self.tree.scripts.get(family.name)
        return replace(found, path=path) if found is not None and path is not None else None

    @property
    def named(self) -> str:
        return f"AITER {self.tree.version or self.tree.commit[:10] or 'of unknown version'} in {self.tree.root}"

    @property
    def warning(self) -> str:
        """Sentence for the user of a run if this AITER is not promised to work, else ""."""
        if self.findings.promised:
            return ""
        return f"{self.named} is not one that gemmfleet promises to drive ({WINDOWS}): look at its rows with care"

    def refusal(self, family: Family) -> str:
        """Reason that no shape of the family can be tuned here, "" if nothing prevents it."""
        if family.aiter.gfx and self.gfx not in family.aiter.gfx:
            chips, here = " or ".join(family.aiter.gfx), self.gfx or "no GPU that is known"
            return f"{family.name} needs {chips}, and this is {here}"
        if self.script(family) is None:
            return f"{self.named} has no tuner script for {family.name}"
        if why := self.findings.misfit:
            return f"{self.warning or self.named}; its candidates cannot be watched: {why}"
        return ""

    def as_json(self) -> dict[str, Any]:
        """Data for the record of the tuner's start, and so for provenance."""
        return {
            "root": str(self.tree.root),
            "version": self.tree.version,
            "commit": self.tree.commit,
            "image": self.digest,
            "key": self.key,
            "cleared_env": cleared_names(),
            "shim": self.findings.misfit or "used",
            "warning": self.warning,
            "notes": list(self.notes)[:20],
            "env": switch_record(self.device),
        }


def inspect_image(options: Options) -> AiterImage:
    """Find AITER, read its files, query the chip. Raises NotATreeError with the ways out, RuntimeError if the chip
    gives no answer."""
    here = identify()
    tree, notes = tree_here(str(here["gfx"] or ""), options.family, options.root)
    answer = query_device("facts", environment(os.environ, tree.root, None, {}))
    if "error" in answer:
        raise RuntimeError(f"the GPU cannot be queried: {answer['error']}")
    device = {k: answer.get(k) or here.get(k) for k in ("gfx", "cu_num", "device")}
    versions = {k: answer[k] for k in ("torch", "hip") if answer.get(k)}
    gfx, digest = str(device["gfx"] or ""), os.environ.get(IMAGE_ENV, "")
    findings = inspect(tree, gfx)
    seen = {
        "image": digest,
        "gfx": gfx,
        "root": str(tree.root),
        "python": str(here["python"]),
        **findings.files,
        **{k: str(v) for k, v in versions.items()},
        **inventory_switches(),
    }
    text = "\n".join(f"{k}={seen[k]}" for k in sorted(seen) if seen[k])
    more = [answer["absent"]] if "absent" in answer else []
    return AiterImage(
        tree=tree,
        findings=findings,
        device={**device, **versions},
        key=hashlib.sha256(text.encode()).hexdigest()[:16],
        digest=digest,
        notes=(*notes, *more, *(f"warning: {w}" for w in switch_warnings(device))),
        seen_by_torch="absent" not in answer,
    )


def tree_here(gfx: str, family: str, root: str = "") -> tuple[Tree, tuple[str, ...]]:
    """The tree of this machine that serves a family, with notes on the choice. Raises NotATreeError."""
    wanted = root or os.environ.get(AITER_ROOT_ENV, "")
    return choose(wanted, family=family, gfx=gfx if gfx.startswith("gfx") else "")
