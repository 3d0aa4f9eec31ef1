"""The AITER of the worker's image: its tree, its findings and the chip.

tuner.py calls `inspect_image` once, when it opens. findings.py reads the tree's files, device_query.py asks the GPU.
"""

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
from worker.tuners.aiter.spec import AiterOptions
from worker.tuners.aiter.workarounds import Applied


@dataclass(frozen=True, slots=True)
class AiterImage:
    """The AITER that a worker runs, and the device that it runs on."""

    tree: Tree
    """A scratch copy if workarounds are in use (`applied`)."""
    findings: Findings
    device: Mapping[str, Any]
    """gfx, cu_num, device (the name), and the versions of torch and HIP."""
    key: str
    """A hash of what decides about built modules: the container's image, gfx (not cu_num), the tree's files, versions,
    switches."""
    digest: str
    """The image's digest, "" if it is unknown."""
    notes: tuple[str, ...] = ()
    seen_by_torch: bool = False
    """gfx and cu_num come from torch, as in AITER's rows."""
    applied: tuple[Applied, ...] = ()

    @property
    def gfx(self) -> str:
        return str(self.device.get("gfx") or "")

    def script(self, family: Family) -> TunerScript | None:
        """The family's script in this tree, None if the tree has none."""
        script = self.findings.families.get(family.name)
        path = self.tree.scripts.get(family.name)
        return replace(script, path=path) if script is not None and path is not None else None

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
            chips = " or ".join(family.aiter.gfx)
            return f"{family.name} needs {chips}, and this is {self.gfx or 'no GPU that is known'}"
        if self.script(family) is None:
            return f"{self.named} has no tuner script for {family.name}"
        if self.findings.misfit:
            return f"{self.warning or self.named}; its candidates cannot be watched: {self.findings.misfit}"
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


def inspect_image(options: AiterOptions) -> AiterImage:
    """Find AITER, read its files, query the chip. Raises NotATreeError with the ways out, RuntimeError if the chip
    gives no answer."""
    here = identify()
    tree, tree_notes = tree_here(str(here["gfx"] or ""), options.family, options.root)
    answer = query_device("facts", environment(os.environ, tree.root, None, {}))
    if "error" in answer:
        raise RuntimeError(f"the GPU cannot be queried: {answer['error']}")
    device = {fact: answer.get(fact) or here.get(fact) for fact in ("gfx", "cu_num", "device")}
    versions = {package: answer[package] for package in ("torch", "hip") if answer.get(package)}
    findings = inspect(tree, str(device["gfx"] or ""))
    digest = os.environ.get(IMAGE_ENV, "")
    notes = list(tree_notes)
    if "absent" in answer:
        notes.append(answer["absent"])
    notes += [f"warning: {warning}" for warning in switch_warnings(device)]
    return AiterImage(
        tree=tree,
        findings=findings,
        device={**device, **versions},
        key=_image_key(findings, digest, device, versions, str(here["python"])),
        digest=digest,
        notes=tuple(notes),
        seen_by_torch="absent" not in answer,
    )


def _image_key(
    findings: Findings, digest: str, device: Mapping[str, Any], versions: Mapping[str, Any], python: str
) -> str:
    """The name under which built modules and blocked candidates are kept: it changes with what may change a kernel.
    AITER builds for an architecture, whatever its number of compute units."""
    parts = {
        "image": digest,
        "gfx": str(device["gfx"] or ""),
        "root": str(findings.tree.root),
        "python": python,
        **findings.files,
        **{package: str(version) for package, version in versions.items()},
        **inventory_switches(),
    }
    text = "\n".join(f"{name}={parts[name]}" for name in sorted(parts) if parts[name])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tree_here(gfx: str, family: str, root: str = "") -> tuple[Tree, tuple[str, ...]]:
    """The tree of this machine that serves a family, with notes on the choice. Raises NotATreeError."""
    wanted = root or os.environ.get(AITER_ROOT_ENV, "")
    return choose(wanted, family=family, gfx=gfx if gfx.startswith("gfx") else "")
