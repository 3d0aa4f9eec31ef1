"""Table of all commands, and the help printed from it without importing any of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from orchestrator import __version__


class Entry(NamedTuple):
    """A command: its name, its one-line summary, and the function that it runs (`module:function`); of a group, its
    commands instead."""

    name: str
    summary: str
    target: str = ""
    commands: tuple[Entry, ...] = ()


VERSION = f"gemmfleet {__version__}"
SUMMARY = "Tune GPU GEMM kernels across a fleet, and explain every shape that failed."
HELP = {"--help": "Show this message and exit."}
OPTIONS = {
    "--version": "Show the version.",
    "--install-completion": "Install completion for the shell in use.",
    "--show-completion": "Print the completion script for the shell in use.",
    **HELP,
}
RUNS = (
    Entry("list", "List the runs, oldest first.", "orchestrator.cli.runs:list_"),
    Entry("prune", "Remove old runs here and their folders on the nodes.", "orchestrator.cli.runs:prune"),
)
NODES = (
    Entry("check", "Check what every node has and what it lacks.", "orchestrator.cli.nodes:check"),
    Entry("add", "Add the new nodes of an inventory to a running run.", "orchestrator.cli.nodes:add"),
    Entry("drain", "Give a node no more groups; those it runs may end.", "orchestrator.cli.nodes:drain"),
    Entry("blocklist", "List the candidates that the tuner aiter skips, by node.", "orchestrator.cli.nodes:blocklist"),
)
INVENTORY = (
    Entry("check", "Check an inventory as `tune` reads it; contacts no node.", "orchestrator.cli.inventory:check"),
    Entry("schema", "Print the JSON schema of inventories, for editors.", "orchestrator.cli.inventory:schema"),
)
IMAGE = (
    Entry("render", "Print the Dockerfile, or write the whole build folder.", "orchestrator.cli.image:render"),
    Entry("build", "Build the image with Docker, here or on nodes.", "orchestrator.cli.image:build"),
)
SHAPES = (
    Entry("check", "Check a shape list as `tune` reads it.", "orchestrator.cli.shapes:check"),
    Entry("from-model", "List the GEMMs of one rank of a model for `tune`.", "orchestrator.cli.shapes:from_model"),
    Entry("from-log", "List the shapes of a log without a tuned row.", "orchestrator.cli.shapes:from_log"),
    Entry("capture", "Run a workload and list its shapes without a tuned row.", "orchestrator.cli.shapes:capture"),
)
DB = (
    Entry("merge", "Merge the fastest newcomer of each key into a tuned table.", "orchestrator.cli.db:merge"),
    Entry("check", "Check tuned tables against AITER's rules.", "orchestrator.cli.db_check:check"),
    Entry("diff", "Compare two tuned tables row by row.", "orchestrator.cli.db:diff"),
    Entry("undo", "Restore a tuned table as it was before its last merge.", "orchestrator.cli.db:undo"),
    Entry("split", "Move the rows of gemmfleet's own tuners out of a table.", "orchestrator.cli.db:split"),
    Entry("import", "Merge a table from elsewhere, such as AITER's at a commit.", "orchestrator.cli.db:import_"),
    Entry("export", "Make AITER use tuned tables: environment lines or files.", "orchestrator.cli.db_export:export"),
)
TRITON_CONFIG = (
    Entry(
        "merge",
        "Write the winners of a run into the files that AITER loads.",
        "orchestrator.cli.triton_config:merge",
    ),
    Entry("undo", "Take back the last merge into a tree.", "orchestrator.cli.triton_config:undo"),
    Entry("check", "Check AITER's Triton configs on this machine's CPU.", "orchestrator.cli.triton_config:check"),
    Entry(
        "order",
        "Compile the candidates of shapes on this machine's cores, for nodes to try in that order.",
        "orchestrator.cli.triton_config:order",
    ),
    Entry(
        "rows", "Write tuned rows that route shapes to AITER's Triton kernel.", "orchestrator.cli.triton_config:rows"
    ),
)
COMMANDS = {
    "Tune": (
        Entry("tune", "Tune the shapes of a CSV on every slot of an inventory.", "orchestrator.cli.tune:tune"),
        Entry("recheck", "Check a tuned table on a new build; tune what fails it.", "orchestrator.cli.recheck:recheck"),
        Entry("bench", "Measure several backends on the same shapes, interleaved.", "orchestrator.cli.bench:bench"),
        Entry("resume", "Continue a run whose controller died or was interrupted.", "orchestrator.cli.runs:resume"),
        Entry("retry", "Queue the failed shapes of a run again, with fresh tries.", "orchestrator.cli.runs:retry"),
        Entry("cancel", "Stop a run and its workers; what was measured stays.", "orchestrator.cli.runs:cancel"),
    ),
    "Look": (
        Entry("status", "Show shapes, nodes, progress and expected end of a run.", "orchestrator.cli.runs:status"),
        Entry("logs", "Print the merged log of a run's workers.", "orchestrator.cli.runs:logs"),
        Entry("explain", "Explain why a group waits, failed, moved or was split.", "orchestrator.cli.runs:explain"),
        Entry("runs", "List runs, and remove old ones.", commands=RUNS),
    ),
    "Results": (
        Entry(
            "analyze", "Find the fastest backend of each shape, and by how much.", "orchestrator.cli.analyze:analyze"
        ),
        Entry("compare", "Judge a new stack against a golden one, row by row.", "orchestrator.cli.compare:compare"),
        Entry("report", "Write the page of a run: one HTML file, no server needed.", "orchestrator.cli.runs:report"),
        Entry("serve", "Show the page of a run live in a browser of this machine.", "orchestrator.cli.runs:serve"),
        Entry("gain", "Sum what a run won over the calls of a workload.", "orchestrator.cli.gain:gain"),
        Entry("verify", "Check on nodes that AITER uses the tuned rows correctly.", "orchestrator.cli.verify:verify"),
        Entry(
            "publish", "Commit winners to a branch of a local checkout of AITER.", "orchestrator.cli.publish:publish"
        ),
        Entry("collect", "Fetch, check and merge results from a folder of nodes.", "orchestrator.cli.collect:collect"),
    ),
    "Fleet": (
        Entry("nodes", "Check nodes; add them to a running run, or drain them.", commands=NODES),
        Entry("inventory", "Check an inventory, or print the JSON schema of inventories.", commands=INVENTORY),
        Entry("image", "Render or build an image with AITER on your own base.", commands=IMAGE),
    ),
    "Data": (
        Entry("shapes", "Make and check shape lists.", commands=SHAPES),
        Entry("db", "Merge, check, compare, export and restore tuned tables.", commands=DB),
        Entry("triton-config", "Merge, check and restore AITER's Triton configs.", commands=TRITON_CONFIG),
    ),
}
"""Every command under its heading, in the order of `--help`; a summary is the first paragraph of its docstring."""


def help_of(program: str, words: Sequence[str]) -> str | None:
    """Return the help of the program or of a group, None where `words` request anything else."""
    if list(words) == ["--help"]:
        return help_text(program, SUMMARY, OPTIONS, COMMANDS)
    for entries in COMMANDS.values():
        for e in entries:
            if e.commands and list(words) == [e.name, "--help"]:
                return help_text(f"{program} {e.name}", e.summary, HELP, {"Commands": e.commands})
    return None


def help_text(program: str, summary: str, options: Mapping[str, str], headings: Mapping[str, Sequence[Entry]]) -> str:
    """Return usage, summary, options, and the commands below their headings."""
    lines = [f"Usage: {program} [OPTIONS] COMMAND [ARGS]...", "", f"  {summary}", "", "Options:"]
    width = max(map(len, options))
    lines += [f"  {name:{width}}  {text}" for name, text in options.items()]
    lines.append("")
    width = max(len(e.name) for entries in headings.values() for e in entries)
    for heading, entries in headings.items():
        lines.append(f"{heading}:")
        lines += [f"  {e.name:{width}}  {e.summary}" for e in entries]
    return "\n".join(lines)
