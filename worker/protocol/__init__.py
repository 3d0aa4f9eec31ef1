"""Protocol of controller and worker: paths in a node folder, group specs, records.

Standard library only. The controller imports this package; the worker imports nothing of the controller's.
"""

from worker.protocol.candidates import (
    MAX_VERDICTS,
    MAX_WITHHELD,
    BlocklistVerdict,
    TableKernel,
    Withheld,
    identity,
    is_wanted,
    withheld_list,
)
from worker.protocol.paths import ANY_SLOT, ATTEMPT_RE, LOCKS, LOCKS_ENV, SLOT_RE, InboxName, NodePaths
from worker.protocol.records import (
    BEAT_S,
    LOST_BEATS,
    MAX_RECORD_BYTES,
    OUTCOMES,
    PROTOCOL,
    RECORDS,
    SHAPE_VERDICTS,
    ProtocolError,
    parse_record,
    record,
)
from worker.protocol.row import FIELDS, Row, checked_row, is_wrong
from worker.protocol.spec import CPUS, DEVICE_LOCK, DEVICE_SHARED, MAX_SPEC_BYTES, NodeConfig, Spec, SpecShape

__all__ = [
    "ANY_SLOT",
    "ATTEMPT_RE",
    "BEAT_S",
    "CPUS",
    "DEVICE_LOCK",
    "DEVICE_SHARED",
    "FIELDS",
    "LOCKS",
    "LOCKS_ENV",
    "LOST_BEATS",
    "MAX_RECORD_BYTES",
    "MAX_SPEC_BYTES",
    "MAX_VERDICTS",
    "MAX_WITHHELD",
    "OUTCOMES",
    "PROTOCOL",
    "RECORDS",
    "SHAPE_VERDICTS",
    "SLOT_RE",
    "BlocklistVerdict",
    "InboxName",
    "NodeConfig",
    "NodePaths",
    "ProtocolError",
    "Row",
    "Spec",
    "SpecShape",
    "TableKernel",
    "Withheld",
    "checked_row",
    "identity",
    "is_wanted",
    "is_wrong",
    "parse_record",
    "record",
    "withheld_list",
]
