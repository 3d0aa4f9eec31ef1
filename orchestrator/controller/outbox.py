"""Outbox of decisions: specs into inboxes, take-backs of unclaimed ones, and the drain at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.controller.node_registry import NodeRegistry
from orchestrator.events import AskCanary, Decision, Send, TakeBack
from orchestrator.ledger.reader import LeftOut
from worker.protocol import BlocklistVerdict, InboxName, Spec, SpecShape, TableKernel


@dataclass(frozen=True, slots=True)
class SpecOptions:
    """Constant part of every spec of a run."""

    run: str
    family: str
    tuner: str
    watchdog_s: float
    err_ratio: float
    options: dict[str, object]
    kernels: Mapping[int, Sequence[TableKernel]] = field(default_factory=dict)
    """Shape id -> the only kernels to measure of it."""


class Outbox:
    """Writes of the controller to the nodes. A node that is not up gets nothing: its next NodeUp shows what never
    arrived."""

    def __init__(
        self,
        registry: NodeRegistry,
        spec: SpecOptions,
        keys: Callable[[int], dict[str, int | str]],
        epoch: int,
        verdicts: Callable[[str], tuple[list[LeftOut], list[LeftOut]]] = lambda _: ([], []),
    ) -> None:
        """`verdicts`: of a node, see LedgerReader.blocklist_verdicts."""
        self._verdicts = verdicts
        self._registry, self._spec, self._keys, self._epoch = registry, spec, keys, epoch
        self._names: dict[str, InboxName] = {}

    def carry_out(self, decision: Decision) -> None:
        """Carry one decision out; those that concern the state alone need nothing."""
        match decision:
            case Send(attempt, node, slot, seq, ids):
                name = self._names[attempt] = InboxName(seq, slot, attempt)
                shapes = tuple(SpecShape(s, self._keys(s)) for s in ids)
                self._put(node, name, self._with_verdicts(self._make_spec(attempt, "group", attempt, shapes), node))
            case TakeBack(attempt, node):
                known = self._names.get(attempt)
                if known is not None and node in self._registry.up:
                    self._registry.drivers[node].take_back(self._registry.sessions[node], known)
            case AskCanary(node, slot, attempt):
                self._put(node, InboxName(0, slot, attempt), self._make_spec(attempt, "canary", "", ()))
            case _:
                pass

    def drain(self) -> None:
        """Make every worker finish its attempt and claim no more; send the blocklist verdicts that no spec carried."""
        for driver in self._registry.reached():
            files = {"control/stop": b"drain\n"}
            verdicts = self._with_verdicts(self._make_spec("verdicts", "canary", "", ()), driver.node)
            if verdicts.refuted or verdicts.confirmed:
                files = {"control/verdicts.json": verdicts.dumps(), **files}
            driver.put(self._registry.sessions[driver.node], files)

    def _put(self, node: str, name: InboxName, spec: Spec) -> None:
        if node in self._registry.up:
            self._registry.drivers[node].put(self._registry.sessions[node], {f"inbox/{name}": spec.dumps()})

    def _with_verdicts(self, spec: Spec, node: str) -> Spec:
        """The spec with the verdicts on candidates of the node's blocklist."""
        ran, faulted = self._verdicts(node)
        if ran or faulted:
            refuted, confirmed = ([_verdict(spec.family, w) for w in which] for which in (ran, faulted))
            spec = replace(spec, refuted=refuted, confirmed=confirmed)
        return spec

    def _make_spec(self, attempt: str, kind: str, group: str, shapes: tuple[SpecShape, ...]) -> Spec:
        s = self._spec
        return Spec(
            attempt=attempt, run=s.run, epoch=self._epoch, kind=kind, group=group, family=s.family, tuner=s.tuner,
            shapes=shapes, watchdog_s=s.watchdog_s, err_ratio=s.err_ratio, options=dict(s.options),
            only={str(x.id): [k._asdict() for k in s.kernels[x.id]] for x in shapes if x.id in s.kernels},
        )  # fmt: skip


def _verdict(family: str, w: LeftOut) -> BlocklistVerdict:
    return BlocklistVerdict(family=family, key=list(w.key), candidate=list(w.candidate), slot=w.gpu, t=w.t)
