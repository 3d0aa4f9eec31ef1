"""The table of commands: the name that is typed, the function that runs, and the line that `--help` shows.

`gemmfleet --help` and completion read only this table. The module of a command is imported when the command is run, or
when its own `--help` is asked for; so modules of `orchestrator/cli` import at their top all that they need.
"""

from __future__ import annotations

from typing import NamedTuple


class CommandEntry(NamedTuple):
    """A command. `function`: module of `orchestrator/cli` and function in it, such as `nodes:check_nodes`. `summary`:
    the first line of the function's docstring."""

    name: str
    function: str
    summary: str


class GroupEntry(NamedTuple):
    """A group, such as `db`, whose commands are typed behind its name."""

    name: str
    summary: str
    commands: tuple[CommandEntry, ...]


RUNS = (
    CommandEntry("list", "runs:list_all_runs", "List the runs, oldest first."),
    CommandEntry("prune", "runs:prune", "Remove old runs here and their folders on the nodes."),
)
NODES = (
    CommandEntry("check", "nodes:check_nodes", "Check what every node has and what it lacks."),
    CommandEntry("add", "nodes:add_nodes", "Add the new nodes of an inventory to a running run."),
    CommandEntry("drain", "nodes:drain_node", "Give a node no more groups; its running groups may finish."),
)
INVENTORY = (
    CommandEntry("check", "inventory:check_inventory", "Check an inventory as `tune` reads it; contacts no node."),
)
IMAGE = (CommandEntry("build", "image:build_image", "Build the image with Docker, here or on nodes."),)
SHAPES = (
    CommandEntry("check", "shapes:check_list", "Check a shape list as `tune` reads it."),
    CommandEntry("from-model", "shapes:list_from_model", "List the GEMMs of one rank of a model for `tune`."),
    CommandEntry("from-log", "shapes:list_from_log", "List the shapes of a log without a tuned row."),
    CommandEntry("capture", "shapes:capture", "Run a workload and list its shapes without a tuned row."),
)
DB = (
    CommandEntry("merge", "db:merge_tables", "Merge the fastest newcomer of each key into a tuned table."),
    CommandEntry("check", "db:check_tables", "Check tuned tables against AITER's rules."),
    CommandEntry("diff", "db:diff_tables", "Compare two tuned tables row by row."),
    CommandEntry("undo", "db:undo_merge", "Restore a tuned table as it was before its last merge."),
    CommandEntry("export", "db:export_tables", "Make AITER use tuned tables: environment lines or files."),
)
CONFIGS = (
    CommandEntry("merge", "configs:merge_configs", "Write the winners of a run into files of AITER, vLLM or SGLang."),
    CommandEntry("undo", "configs:undo_configs", "Take back the last merge into a tree."),
    CommandEntry("check", "configs:check_configs", "Check Triton config files on this machine's CPU."),
)

HEADINGS: dict[str, tuple[CommandEntry | GroupEntry, ...]] = {
    "Tune": (
        CommandEntry("tune", "tune:tune", "Tune shapes on every slot of an inventory."),
        CommandEntry("recheck", "recheck:recheck", "Check a tuned table on a new build; tune what fails it."),
        CommandEntry("bench", "bench:bench", "Measure several backends on the same shapes, interleaved."),
        CommandEntry("resume", "runs:resume", "Continue a run whose controller died or was interrupted."),
        CommandEntry("retry", "retry:retry", "Queue the failed shapes of a run again, with fresh tries."),
        CommandEntry("cancel", "cancel:cancel", "Stop a run and its workers; results so far are kept."),
    ),
    "Look": (
        CommandEntry("status", "status:status", "Show shapes, nodes, progress and expected end of a run."),
        CommandEntry("logs", "runs:logs", "Print the merged log of a run's workers."),
        CommandEntry("explain", "runs:explain", "Explain why a group waits, failed, moved or was split."),
        GroupEntry("runs", "List runs, and remove old ones.", RUNS),
    ),
    "Results": (
        CommandEntry("analyze", "analyze:analyze", "Find the fastest backend of each shape, and by how much."),
        CommandEntry("compare", "compare:compare", "Judge a new stack against a golden one, row by row."),
        CommandEntry("report", "report:report", "Write the page of a run: one HTML file, no server needed."),
        CommandEntry("gain", "gain:gain", "Sum what a run won over the calls of a workload."),
        CommandEntry("verify", "verify:verify", "Check on nodes that AITER uses the tuned rows correctly."),
        CommandEntry("publish", "publish:publish", "Commit winners to a branch of AITER, vLLM or SGLang."),
    ),
    "Fleet": (
        CommandEntry("selftest", "selftest:selftest", "Try on one node with an MI355X what nobody has seen there yet."),
        GroupEntry("nodes", "Check nodes; add them to a running run, or drain them.", NODES),
        GroupEntry("inventory", "Check an inventory, or print its JSON schema.", INVENTORY),
        GroupEntry("image", "Build an image with AITER on your own base.", IMAGE),
    ),
    "Files": (
        GroupEntry("shapes", "Make and check shape lists.", SHAPES),
        GroupEntry("db", "Merge, check, compare, export and restore tuned tables.", DB),
        GroupEntry("configs", "Merge, check and restore Triton configs of AITER and vLLM.", CONFIGS),
    ),
}
"""Every command under its heading, in the order of `--help`."""
