"""Advice: what the user can do about an incident of a node or slot, or about the reason for which shapes failed."""

from __future__ import annotations

from shlex import quote

from orchestrator.command_hints import command
from orchestrator.paths import RunPaths
from orchestrator.policy.model import Node
from orchestrator.reasons import Reason
from orchestrator.view.timeline import Span

INCIDENTS = {
    "trouble": "Its measurements were kept. If this happens often, look at the link and at sshd.",
    "away": "Its work went elsewhere. Check it with: {check}",
    "ended": "Its work went elsewhere. There is nothing to do.",
    "busy": "We wait until it is free. To share or skip it: --busy share, --busy skip.",
    "shared": "Measure there again when nobody else uses it.",
    "quarantine": "Its work went elsewhere. Before you trust it again, look at the GPU's health ({status}), the driver"
    " and the image.",
    "gone": "Its worker could not be started again: look at its container's log on the node.",
    "canary": "The slot did not compute its known answer, so it gets no work. Look at the GPU, driver and image.",
}
"""Advice on an incident, by the kind of its span (`timeline.Span`)."""
LEASE_TROUBLE = "Its measurements were kept. If this happens often, look at what the scheduler says of its machine."
"""The advice on `trouble` of a lease: the scheduler leads to it, no sshd."""
STREAM_ENDED = (
    "Its measurements were kept. The process that sends its records was ended there (by docker kill, a restart of"
    " Docker, ...); the link is not the cause."
)
"""The advice on `trouble` in which the command on the node had an exit code, which a broken link never gives."""


def advise_on_incident(incident: Span, node: Node, paths: RunPaths) -> str:
    """Advice on an incident, with commands for this run."""
    if incident.kind == "trouble" and node.lease:
        return LEASE_TROUBLE
    if incident.kind == "trouble" and "the stream ended: ended with code" in incident.text:
        return STREAM_ENDED
    check = command(f"nodes check -i {quote(str(paths.inventory))}")
    return INCIDENTS[incident.kind].format(check=check, status=command(f"status {paths.named}"))


def advise_on_failure(reason: Reason, run: str, node: str) -> list[str]:
    """Sentences on what to do about a failure; `run` as it is named on a command line, `node`: where it happened."""
    logs = command(f"logs {run} --node {node}" if node else f"logs {run}")
    retry = command(f"retry {run} --reason {reason.value}")
    return [text.format(logs=logs, retry=retry) for text in reason.advice]
