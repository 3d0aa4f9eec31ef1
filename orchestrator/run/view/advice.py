"""What a person can do about each reason of a failure."""

from __future__ import annotations

from orchestrator.command_hints import command
from orchestrator.reasons import Reason

_AGAIN = "Try it again once the cause is gone: {retry}"
_LOG = "See what the tuner printed: {logs}"

_ADVICE: dict[Reason, tuple[str, ...]] = {
    Reason.FAULT: (
        "Confirmed on two slots, a candidate of this shape kills its process: report shape and detail to the kernels'"
        " authors, and leave that backend out for it.",
        "Unconfirmed, it was seen on one slot only: run it on another node before you blame the shape.",
        _LOG,
        _AGAIN,
    ),
    Reason.OOM: (
        "Make room on the device: end other programs, tune fewer shapes at once (--batch), or give the container more"
        " memory.",
        _AGAIN,
    ),
    Reason.HANG: (
        "If the shape is only slow, give it more time: --watchdog (or --tuner-timeout) in a new run.",
        _LOG,
        _AGAIN,
    ),
    Reason.ERROR: ("The detail is the tuner's own message; the lines before it are in its log.", _LOG, _AGAIN),
    Reason.NOT_DELIVERED: (
        "The tuner came to its end without a word on the shape, each time: look for it in its log.",
        _LOG,
        _AGAIN,
    ),
    Reason.REJECTED: (
        "Worker and controller do not agree on what a spec is: is the node's code of this version?",
        _AGAIN,
    ),
    Reason.NO_CANDIDATE: (
        "No kernel of this image takes the shape on this device: try a newer image, another backend, or a padded"
        " shape.",
    ),
    Reason.WRONG_RESULT: (
        "Every candidate missed the error limit. Raise it with --err-ratio only if the model bears that; a kernel that"
        " is wrong everywhere is worth a report.",
    ),
    Reason.UNSUPPORTED: (
        "The tuner cannot do this shape on this device: another tuner or family can, or the device is the wrong one.",
    ),
    Reason.KILLS_NODES: (
        "It took its worker or node down every time: keep it off shared machines, and try it alone on one that may"
        " die.",
        _LOG,
        _AGAIN,
    ),
}

_INCIDENTS = {
    "trouble": "What it measured meanwhile was kept. If it comes often, look at the link and at sshd.",
    "away": "Its work went elsewhere. Check it with: {check}",
    "busy": "It waits until others are done; --busy share or skip does otherwise.",
    "quarantine": "Its work went elsewhere. Look at the GPU's health ({status}) before you trust it again.",
    "gone": "Its worker could not be started again: look at its container's log on the node.",
    "charged": "Kernels that fault here run elsewhere: look at the GPU's health ({status}), its driver and its memory.",
    "canary": "The slot did not compute its known answer, so it gets no work. Look at the GPU, driver and image.",
}
_COMMANDS = {"check": command("nodes check"), "status": command("status")}
INCIDENTS = {kind: text.format_map(_COMMANDS) for kind, text in _INCIDENTS.items()}
"""What to do about what happened to a node or slot, by the kind of its span or mark."""


def advice(reason: str, run: str, node: str = "") -> list[str]:
    """Sentences for a reason by name; `run` as it is named on a command line."""
    try:
        known = Reason(reason)
    except ValueError:
        return []
    logs = command(f"logs {run}") + (f" --node {node}" if node else "")
    retry = command(f"retry {run} --reason {reason}")
    return [text.format(logs=logs, retry=retry) for text in _ADVICE.get(known, ())]
