"""What is useful once a run has ended: commands as the user can type them, each with what it is good for."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote
from typing import TYPE_CHECKING

from orchestrator.command_hints import command
from orchestrator.families import get_family
from worker.tuners.catalog import recorded_tuner

if TYPE_CHECKING:
    from orchestrator.paths import RunPaths
    from orchestrator.run.config import RunConfig

Step = tuple[str, str]


def next_steps(paths: RunPaths, config: RunConfig, *, tuned: int, failed: int, unsettled: bool) -> list[Step]:
    """What is useful once a run has ended so: (words of a command, what it is good for), the first first."""
    name, family = paths.named, get_family(config.family)
    if unsettled:
        return [(f"resume {name}", "goes on with what is left")]
    steps: list[Step] = []
    if failed:
        steps += [(f"explain {name}", "why they failed"), (f"retry {name}", "try them again")]
    if not tuned:
        return [*steps, (f"status {name}", "how it stands")] if not failed else steps
    own = recorded_tuner(config.tuner).produces == "own"  # nothing of AITER's reads such a table
    table = f"{family.name}-{config.tuner}.csv" if own else family.tuned_csv
    if config.db is None:
        steps.append((f"db merge {quote(str(paths.root))} --into {quote(table)}", "the winners into a table"))
    steps.append((f"report {name}", "the page"))
    if not own:
        steps.append((f"verify {name}", "proof that AITER uses them, and that they are right"))
        steps.append((f"db export {quote(config.db or str(paths.tuned))} --env", "how a server is told of the table"))
    return steps


def print_next(steps: Sequence[Step]) -> None:
    """A command a line, each with what it is good for."""
    typed = [command(words) for words, _ in steps]
    wide = max((len(t) for t in typed), default=0)
    for i, (text, (_, why)) in enumerate(zip(typed, steps, strict=True)):
        print(f"{'next:' if i == 0 else '     '} {text:{wide}}  # {why}")
