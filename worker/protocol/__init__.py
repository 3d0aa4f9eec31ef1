"""Protocol of controller and worker: paths in a node folder, group specs, records.

Standard library only. The controller imports this package; the worker imports nothing of the controller's.
"""

from worker.protocol.candidates import (
    MAX_BLOCKED,
    MAX_VERDICTS,
    BlockedRecord,
    BlockedVerdict,
    TableKernel,
    blocked_records,
    identity,
    is_wanted,
)
from worker.protocol.hardware import HOT_C, hardware_evidence
from worker.protocol.paths import ANY_SLOT, ATTEMPT_RE, LOCKS, LOCKS_ENV, SLOT_RE, InboxName, NodePaths
from worker.protocol.records import (
    BEAT_S,
    FIELDS,
    LOST_BEATS,
    MAX_RECORD_BYTES,
    OUTCOMES,
    PROTOCOL,
    RECORDS,
    SHAPE_VERDICTS,
    ProtocolError,
    Row,
    checked_row,
    is_wrong,
    parse_record,
    record,
)
from worker.protocol.spec import (
    CPUS,
    DEVICE_LOCK,
    DEVICE_SHARED,
    MAX_SPEC_BYTES,
    NodeConfig,
    Spec,
    SpecShape,
)

__all__ = [
    "ANY_SLOT",
    "ATTEMPT_RE",
    "BEAT_S",
    "CPUS",
    "DEVICE_LOCK",
    "DEVICE_SHARED",
    "FIELDS",
    "HOT_C",
    "LOCKS",
    "LOCKS_ENV",
    "LOST_BEATS",
    "MAX_BLOCKED",
    "MAX_RECORD_BYTES",
    "MAX_SPEC_BYTES",
    "MAX_VERDICTS",
    "OUTCOMES",
    "PROTOCOL",
    "RECORDS",
    "SHAPE_VERDICTS",
    "SLOT_RE",
    "BlockedRecord",
    "BlockedVerdict",
    "InboxName",
    "NodeConfig",
    "NodePaths",
    "ProtocolError",
    "Row",
    "Spec",
    "SpecShape",
    "TableKernel",
    "blocked_records",
    "checked_row",
    "hardware_evidence",
    "identity",
    "is_wanted",
    "is_wrong",
    "parse_record",
    "record",
]
