"""Carries out the policy's decisions on the nodes: puts specs into inboxes, takes unclaimed ones back, and drains
workers.

The loop calls it after a turn is committed. The files go through the node's driver (node_driver.py), whose thread
writes them soon; if the node is not up, nothing is written.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.controller.context import RunContext
from orchestrator.controller.node_registry import NodeRegistry
from orchestrator.events import AskCanary, Decision, Send, TakeBack
from orchestrator.families import get_family
from orchestrator.ledger.blocked import BlockedCandidate
from orchestrator.results.recheck import kernels_to_check
from worker.protocol import BlockedVerdict, InboxName, Spec, SpecShape


class Outbox:
    """The controller's writes to the nodes. Nothing is sent to a node that is not up; its next NodeUp shows which
    attempts never arrived."""

    def __init__(self, context: RunContext, registry: NodeRegistry) -> None:
        self._context = context
        self._registry = registry
        self._key_names = get_family(context.config.family).key_names
        self._kernels = kernels_to_check(context.paths.recheck)
        """Shape -> the only kernels to measure for it (`recheck`)."""
        self._names: dict[str, InboxName] = {}
        """Attempt -> the name of its file in the inbox."""

    def carry_out(self, decision: Decision) -> None:
        """Carry out a decision. Decisions that only change the state need no action."""
        match decision:
            case Send(attempt, node, slot, seq, ids):
                name = InboxName(seq, slot, attempt)
                self._names[attempt] = name
                spec = self._make_spec(attempt, "group", attempt, ids)
                self._put(node, name, self._with_verdicts(spec, node))
            case TakeBack(attempt, node):
                known = self._names.get(attempt)
                session = self._registry.session_of(node)
                if known is not None and session is not None:
                    self._registry.drivers[node].take_back(session, known)
            case AskCanary(node, slot, attempt):
                self._put(node, InboxName(0, slot, attempt), self._make_spec(attempt, "canary", "", ()))

    def drain(self) -> None:
        """Make every worker finish its attempt and claim no more. Send verdicts on blocked candidates that no spec has
        carried."""
        for driver in self._registry.reached_drivers():
            session = self._registry.session_of(driver.node)
            files = {}
            verdicts = self._with_verdicts(self._make_spec("verdicts", "canary", "", ()), driver.node)
            if verdicts.refuted or verdicts.confirmed:
                files["control/verdicts.json"] = verdicts.dumps()
            files["control/stop"] = b"drain\n"  # after the verdicts, because the worker reads them when it stops
            if session is not None:
                driver.put(session, files)

    def _put(self, node: str, name: InboxName, spec: Spec) -> None:
        session = self._registry.session_of(node)
        if session is not None:
            self._registry.drivers[node].put(session, {f"inbox/{name}": spec.dumps()})

    def _with_verdicts(self, spec: Spec, node: str) -> Spec:
        """The spec, with verdicts on the node's blocked candidates added."""
        ran, faulted = self._context.ledger.blocked_verdicts(node)
        family = spec.family
        return replace(spec, refuted=_verdicts(ran, family), confirmed=_verdicts(faulted, family))

    def _make_spec(self, attempt: str, kind: str, group: str, ids: tuple[int, ...]) -> Spec:
        """The spec of an attempt. `kind`: group or canary (worker/protocol/spec.py); `group`: its name for people."""
        config = self._context.config
        return Spec(
            attempt=attempt,
            run=config.run,
            epoch=self._context.epoch,
            kind=kind,
            group=group,
            family=config.family,
            tuner=config.tuner,
            shapes=tuple(SpecShape(i, self._key_of(i)) for i in ids),
            watchdog_s=config.watchdog_s,
            err_ratio=config.err_ratio,
            options=dict(config.options),
            only={str(i): [kernel._asdict() for kernel in self._kernels[i]] for i in ids if i in self._kernels},
        )

    def _key_of(self, shape: int) -> dict[str, int | str]:
        return dict(zip(self._key_names, self._context.ledger.keys[shape], strict=True))


def _verdicts(candidates: list[BlockedCandidate], family: str) -> list[BlockedVerdict]:
    """The candidates in the form in which a worker finds them among its blocked candidates."""
    return [
        BlockedVerdict(family=family, key=[*c.key], candidate=[*c.candidate], slot=c.gpu, t=c.t) for c in candidates
    ]
