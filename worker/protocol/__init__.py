"""Protocol of controller and worker: paths in a node folder, group specs, records.

Standard library only. The controller imports this package; the worker imports nothing of the controller's.
"""

from worker.protocol.candidates import (
    BAD_ENDS,
    MAX_ONLY,
    MAX_VERDICTS,
    MAX_WITHHELD,
    BlocklistVerdict,
    Identity,
    Withheld,
    identities,
    identity,
    withheld_entry,
    withheld_list,
)
from worker.protocol.checks import MAX_SECONDS, PROTOCOL, ProtocolError
from worker.protocol.paths import ANY_SLOT, ATTEMPT_RE, SLOT_RE, InboxName, NodePaths
from worker.protocol.records import (
    BEAT_S,
    LOST_BEATS,
    MAX_RECORD_BYTES,
    OPTIONAL,
    OUTCOMES,
    RECORDS,
    SHAPE_VERDICTS,
    BenchRow,
    FmoeRow,
    Row,
    parse_record,
    record,
)
from worker.protocol.spec import CPUS, MAX_SPEC_BYTES, NodeConfig, Spec, SpecShape

__all__ = [
    "ANY_SLOT",
    "ATTEMPT_RE",
    "BAD_ENDS",
    "BEAT_S",
    "CPUS",
    "LOST_BEATS",
    "MAX_ONLY",
    "MAX_RECORD_BYTES",
    "MAX_SECONDS",
    "MAX_SPEC_BYTES",
    "MAX_VERDICTS",
    "MAX_WITHHELD",
    "OPTIONAL",
    "OUTCOMES",
    "PROTOCOL",
    "RECORDS",
    "SHAPE_VERDICTS",
    "SLOT_RE",
    "BenchRow",
    "BlocklistVerdict",
    "FmoeRow",
    "Identity",
    "InboxName",
    "NodeConfig",
    "NodePaths",
    "ProtocolError",
    "Row",
    "Spec",
    "SpecShape",
    "Withheld",
    "identities",
    "identity",
    "parse_record",
    "record",
    "withheld_entry",
    "withheld_list",
]
