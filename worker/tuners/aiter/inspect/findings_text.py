"""Findings for people: what `worker probe --aiter-root` prints, as text or JSON, and the advice in it."""

from __future__ import annotations

import textwrap
from dataclasses import fields
from typing import Any

from worker.families import FAMILIES
from worker.tuners.aiter.inspect.findings import Findings


def lines(found: Findings) -> list[str]:
    """The findings, a screen or two."""
    tree = found.tree
    what = "an installed wheel" if tree.wheel else "a checkout"
    out = [
        f"tree         {tree.root} ({what})",
        f"version      {tree.version or 'unknown'}",
        f"commit       {tree.commit or 'unknown'}",
        f"asm_dir      {found.asm_dir or 'unknown'} (for {found.gfx})",
        f"k256_sound   {'yes' if found.k256_sound else 'no'}",
        "",
        "families",
    ]
    for name, family in found.families.items():
        out.append(f"  {name}: {family.path.relative_to(tree.root)}")
        if family.broken:
            out.append(f"    cannot run: {family.broken}")
            continue
        out.append(f"    key: {', '.join(family.key_columns) or 'unknown'}")
        flags = ", ".join(f if kind == "flag" else f"{f} X" for f, kind in sorted(family.flags.items()))
        out += textwrap.wrap(f"options: {flags or 'unknown'}", 110, initial_indent="    ", subsequent_indent="      ")
        if kinds := found.kinds(name):
            shown = [f"{k} ({', '.join(where)})" if where else k for k, where in kinds.items()]
            out += textwrap.wrap(f"kinds: {', '.join(shown)}", 110, initial_indent="    ", subsequent_indent="      ")
        if family.ignored:
            out.append(f"    without effect: {', '.join(family.ignored)}")
    out += ["", "workarounds"]
    for name, verdict in found.workarounds.items():
        out.append(f"  {name}: {verdict.verdict}")
        out += [f"    {e}" for e in verdict.evidence]
    if sentences := advice(found):
        out += ["", "advice"]
        for sentence in sentences:
            out += textwrap.wrap(sentence, 110, initial_indent="  - ", subsequent_indent="    ")
    return out


def as_json(found: Findings) -> dict[str, Any]:
    """Findings as JSON for people's tools: the keys of `worker probe --aiter-root` (docs/how-to/new-aiter.md)."""
    named = {f.name: getattr(found.facts, f.name) for f in fields(found.facts)}
    return {
        "tree": found.tree.as_json(),
        "gfx": found.gfx,
        "families": {
            name: {
                "script": str(f.path.relative_to(found.tree.root)),
                "flags": dict(f.flags),
                "key_columns": list(f.key_columns),
                "ignored": list(f.ignored),
                "broken": f.broken,
                "kinds": found.kinds(name),
            }
            for name, f in found.families.items()
        },
        "asm_dir": found.asm_dir,
        "workarounds": {
            name: {"verdict": v.verdict, "evidence": [e.as_json() for e in v.evidence]}
            for name, v in found.workarounds.items()
        },
        "k256_sound": found.k256_sound,
        "facts": named,
        "evidence": {name: [e.as_json() for e in lines] for name, lines in found.evidence.items()},
        "files": dict(found.files),
        "problems": list(found.problems),
        "advice": list(advice(found)),
    }


def advice(found: Findings) -> tuple[str, ...]:
    """The sentences, what matters most first."""
    out = [*_files(found), *_workarounds(found), *_batches(found), *_processes(found), *_results(found)]
    return tuple(out)


def _files(found: Findings) -> list[str]:
    out = [f"{p}. What depends on it was judged with care, not known." for p in found.problems]
    out += [f"{note[0].upper()}{note[1:]}." for note in found.tree.notes]
    missing = [name for name in FAMILIES if name not in found.families]
    if missing:
        out.append(f"This tree has no script for {', '.join(missing)}: runs of these families are refused here.")
    for name, family in found.families.items():
        if family.broken:
            out.append(f"{name} cannot be tuned with this tree's {family.path.name}: {family.broken}.")
        elif not family.key_columns or not family.flags:
            what = "options" if not family.flags else "key columns"
            out.append(f"The {what} of {family.path.name} ({name}) cannot be read; its own --help is read instead.")
    if not found.asm_dir:
        out.append(
            "Where get_asm_dir() leads cannot be read; if assembly kernels are missing from a profile, look there."
        )
    return out


def _workarounds(found: Findings) -> list[str]:
    out: list[str] = []
    verdict = {name: v.verdict for name, v in found.workarounds.items()}
    if verdict["asm_dir_symlink"] == "needed":
        out.append(
            "get_asm_dir() leaves out the chip's folder, so no assembly kernel would be tried: gemmfleet links the "
            "chip's folders in a scratch copy of hsa/ (asm_dir_symlink). The tree itself stays as it is."
        )
    if verdict["tile_column_case"] == "needed":
        out.append(
            "The a4w4 script reads columns that the list of assembly kernels spells otherwise (KeyError, nothing "
            "tuned): gemmfleet changes a scratch copy of the script (tile_column_case), never the list."
        )
    if verdict["tile_column_case"] == "harmful":
        out.append(
            "Do not rename tile_M and tile_N in the list of assembly kernels, as older guides advise: script and C++ "
            "code of this tree read these names, and both the tuner and the production kernel would break."
        )
    if not found.k256_sound and any(FAMILIES[name].aiter.pads_k_to for name in found.families):
        trim = "trims the scales of the reference (k_trim), " if verdict["k_trim"] == "needed" else ""
        out.append(
            "This AITER lays out the scales of a4w4 wrongly where K is no multiple of 256 (mended by ROCm/aiter "
            f"d6cefa9783, 2026-04-30, in v0.1.14). For such shapes gemmfleet {trim}tunes 64x256x384 first, and "
            "reports them as failed if not even that has a candidate within errRatio. Where they are tuned, production "
            "code of this image has the same fault: an image from v0.1.14 on is the way out."
        )
    return out


def _batches(found: Findings) -> list[str]:
    out: list[str] = []
    if [n for n, f in found.families.items() if f.topk_fault]:
        out.append(
            "A shape without a valid candidate makes the later ones of its batch lose theirs: gemmfleet tunes one "
            "shape a batch, and chooses winners from the profile."
        )
    if [n for n, f in found.families.items() if f.profile_keeps_last_batch]:
        out.append("The profile file holds the last batch only: gemmfleet runs one process a shape.")
    if found.facts.groups_reindexed:
        out.append(
            "Shapes of a batch get their inputs by position, so one without candidates would mix up the others: one "
            "shape a batch where a family may have such shapes."
        )
    if not found.facts.shared_base:
        out.append(
            "The scripts are from before the shared base (2025-09): they write all rows at their end, know no profile "
            "(but fmoe) and no batches, so gemmfleet runs one process a shape."
        )
    return out


def _processes(found: Findings) -> list[str]:
    out: list[str] = []
    if not found.facts.pool_restarts:
        out.append(
            "A process of AITER's that a GPU fault kills is awaited for ever here: gemmfleet's own watchdog ends it, "
            "and the shape runs again alone."
        )
    elif found.facts.timeout_from_submission:
        out.append(
            "--timeout counts from when a batch is handed in, not from a task's start: gemmfleet keeps time itself."
        )
    if not found.facts.clears_stale_locks:
        out.append(
            "The lock of a build that was killed stays for ever: each slot has build folders of its own, and gemmfleet "
            "clears a lock whose owner is dead."
        )
    without: dict[str, list[str]] = {}
    for name, family in found.families.items():
        for option in family.ignored:
            without.setdefault(option, []).append(name)
    for option, names in without.items():
        out.append(f"{option} is taken by the scripts of {', '.join(names)}, and does nothing when they tune.")
    return out


def _results(found: Findings) -> list[str]:
    out: list[str] = []
    if not found.facts.checks_partial_writes:
        out.append(
            "Outputs are not filled with NaN before a candidate runs, so one that writes only part of them may pass: "
            "verify winners (gemmfleet verify) before they go into production."
        )
    if not found.facts.has_gfx_column and found.families:
        out.append(
            "Tuned tables of this tree have no gfx column: they do not fit AITER from v0.1.12.post2 on as they are."
        )
    if found.facts.duplicates_fatal:
        out.append(
            "Two rows of one key in tables that AITER merges end its import with an error and rewrite them: a new "
            "table must replace the old one, not lie beside it."
        )
    return out
