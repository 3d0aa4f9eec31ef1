"""The image's AITER: its tree, findings and chip. Read once, when the tuner opens."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from worker.aiter_tree.locate import Tree, find_trees, pick
from worker.device.probe import identify
from worker.families import FAMILIES, Family
from worker.protocol.environment import AITER_ROOT_ENV, IMAGE_ENV
from worker.tuners.aiter.drive.command import ScriptFacts
from worker.tuners.aiter.drive.environment import (
    Chip,
    chip_of,
    cleared_names,
    environment,
    image_key,
    inventory_switches,
    switch_record,
    switch_warnings,
)
from worker.tuners.aiter.drive.workarounds import AppliedWorkaround, ShimFit, shim_fit
from worker.tuners.aiter.inspect.device_query import query_device
from worker.tuners.aiter.inspect.findings import Findings, expected, inspect
from worker.tuners.aiter.options import Options

ASK_TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True)
class AiterImage:
    """`device`: gfx, cu_num, device name and versions; `key` names image and chip."""

    tree: Tree
    findings: Findings
    device: Mapping[str, Any]
    key: str
    digest: str
    watch: ShimFit
    notes: tuple[str, ...] = ()
    cleared: tuple[str, ...] = ()
    seen_by_torch: bool = False
    """True if gfx and cu_num come from torch, as in AITER's rows."""
    applied: tuple[AppliedWorkaround, ...] = ()
    """Workarounds in use: the tree is a scratch copy then."""
    options: Options = field(default_factory=Options)
    """The node's own: they name the family that the run is about."""

    @property
    def package(self) -> Path:
        return self.tree.package

    @property
    def cwd(self) -> Path:
        """Working directory of AITER's processes: default paths of the scripts are relative to the tree."""
        return self.tree.root

    @property
    def gfx(self) -> str:
        return str(self.device.get("gfx") or "")

    @property
    def chip(self) -> Chip:
        return chip_of(self.device)

    def script(self, family: Family) -> ScriptFacts | None:
        """The family's script, None where the tree has none."""
        return script_facts(self.findings, family, self.tree.scripts.get(family.name))

    def on(self, scratch: Tree, applied: tuple[AppliedWorkaround, ...]) -> AiterImage:
        """The same image with a scratch copy of its tree."""
        return replace(self, tree=scratch, applied=applied)

    def as_json(self) -> dict[str, Any]:
        """For the record of the tuner's start, and so for provenance."""
        ignored = {}
        for family in FAMILIES.values():
            script = self.script(family)
            if script is not None:
                flags = ("--warmup", "--iters", "--batch", "--splitK", "--timeout", "--errRatio")
                missing = [f for f in flags if not script.has(f)]
                missing += [f for f in flags if f in script.unused]
                if missing:
                    ignored[family.name] = missing
        family_ = FAMILIES.get(self.options.family)
        kinds = expected(self.tree, family_, self.gfx, self.options.tuner_args) if family_ else {}
        return {
            "root": str(self.tree.root), "version": self.tree.version, "commit": self.tree.commit, "image": self.digest,
            "key": self.key, "cleared_env": list(self.cleared), "ignores": ignored, "shim": self.watch.as_json(),
            "notes": list(self.notes)[:20], "env": switch_record(self.chip), "kinds": kinds,
        }  # fmt: skip


def script_facts(findings: Findings, family: Family, script: Path | None) -> ScriptFacts | None:
    """The findings on one family as the command needs them."""
    found = findings.families.get(family.name)
    if script is None or found is None:
        return None
    return ScriptFacts(
        path=script,
        flags=found.flags,
        key_columns=found.input_columns,
        topk_fault=found.topk_fault,
        profile_keeps_last_batch=found.profile_keeps_last_batch,
        timeout_from_submission=findings.facts.timeout_from_submission,
        hipblaslt_rule=found.prefers_hipblaslt,
        unused=frozenset(found.ignored),
        k256_sound=findings.k256_sound,
        broken=found.broken,
    )


def inspect_image(options: Options, alive: Callable[[], None], package_parent: Path) -> AiterImage:
    """Find AITER, read its files, query the chip. Raises NotATreeError with the ways out, RuntimeError where the chip
    gives no answer."""
    wanted = options.root or os.environ.get(AITER_ROOT_ENV, "")
    here = identify()
    roots = [Path(wanted)] if wanted else []
    gfx = str(here["gfx"] or "")
    chip = gfx if gfx.startswith("gfx") else ""
    tree, notes = pick(find_trees(roots, gfx=chip), Path(wanted) if wanted else None, options.family)
    alive()
    plain = environment(
        os.environ, paths=[tree.root], jit=Path(os.devnull), tmp=Path("/tmp"), worker_code=package_parent
    )
    plain.pop("AITER_JIT_DIR", None)
    plain.pop("TMPDIR", None)
    answer = query_device("facts", plain, ASK_TIMEOUT_S, alive, package_parent)
    if "error" in answer:
        raise RuntimeError(f"the GPU cannot be queried: {answer['error']}")
    more = [answer["absent"]] if "absent" in answer else []
    device = {k: answer.get(k) or here.get(k) for k in ("gfx", "cu_num", "device")}
    versions = {k: answer[k] for k in ("torch", "hip") if answer.get(k)}
    gfx = str(device["gfx"] or "")
    findings = inspect(tree, gfx) if gfx.startswith("gfx") else inspect(tree)
    digest = os.environ.get(IMAGE_ENV, "")
    seen = {
        "image": digest, "gfx": gfx, "root": str(tree.root), "python": str(here["python"]), **findings.files,
        **{k: str(v) for k, v in versions.items()}, **inventory_switches(),
    }  # fmt: skip
    return AiterImage(
        tree=tree,
        findings=findings,
        device={**device, **versions},
        key=image_key(seen),
        digest=digest,
        watch=shim_fit(tree.package),
        notes=(*notes, *more, *(f"warning: {w}" for w in switch_warnings(chip_of(device)))),
        cleared=tuple(cleared_names()),
        seen_by_torch="absent" not in answer,
        options=options,
    )
