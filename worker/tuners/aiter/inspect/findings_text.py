"""Findings for a person: what `worker probe --aiter-root` prints without --json."""

from __future__ import annotations

import textwrap

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
        out.append(f"  {name}: {family.script.relative_to(tree.root)}")
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
    if found.advice:
        out += ["", "advice"]
        for sentence in found.advice:
            out += textwrap.wrap(sentence, 110, initial_indent="  - ", subsequent_indent="    ")
    return out
