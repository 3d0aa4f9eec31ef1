"""Tables of a ledger, as numbered migrations. A released migration is never edited: add one.

Each is applied in one transaction together with its record (`migrations` and `PRAGMA user_version`).
Times are epoch seconds of the controller's clock, but `rows.t`, which is the node's.
"""

from __future__ import annotations

from dataclasses import dataclass

APPLICATION_ID = 0x674D4C67
"""Marks a SQLite file as one of ours (`PRAGMA application_id`)."""


READABLE = 2
"""The oldest version that is read as it is; what it lacks is taken to be empty. A writer brings it up to date."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema."""

    number: int
    name: str
    statements: tuple[str, ...]


def _append_only(table: str) -> tuple[str, ...]:
    return tuple(
        f"CREATE TRIGGER {table}_no_{verb} BEFORE {verb} ON {table}"
        f" BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
        for verb in ("DELETE", "UPDATE")
    )


_FIRST = (
    """CREATE TABLE migrations (
        number INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at REAL NOT NULL
    ) STRICT""",
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID",
    """CREATE TABLE shapes (
        id INTEGER PRIMARY KEY,
        key TEXT NOT NULL UNIQUE,       -- JSON list in the order of the family's key columns
        state TEXT NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'tuned', 'skipped', 'failed')),
        grp TEXT,                       -- the youngest group that holds it
        reason TEXT, detail TEXT, confirmed INTEGER,
        attempt TEXT,                   -- the settling attempt
        row INTEGER,                    -- the settling row
        settled_at REAL,
        CHECK (state <> 'tuned' OR (row IS NOT NULL AND attempt IS NOT NULL)),
        CHECK (state <> 'failed' OR reason IS NOT NULL)
    ) STRICT""",
    "CREATE INDEX shapes_by_state ON shapes (state, settled_at)",
    """CREATE TRIGGER shapes_settled BEFORE UPDATE OF state, row, attempt ON shapes
        WHEN OLD.state IN ('tuned', 'skipped')
        BEGIN SELECT RAISE(ABORT, 'a tuned or skipped shape stays so'); END""",
    "CREATE TRIGGER shapes_no_DELETE BEFORE DELETE ON shapes BEGIN SELECT RAISE(ABORT, 'shapes stay'); END",
    """CREATE TABLE groups (
        id TEXT PRIMARY KEY, parent TEXT, cost_s REAL NOT NULL, added_at REAL,
        split_at REAL, why TEXT         -- why it was split, or waits
    ) STRICT""",
    "CREATE TABLE members (grp TEXT, shape INTEGER, PRIMARY KEY (grp, shape)) STRICT, WITHOUT ROWID",
    "CREATE INDEX members_by_shape ON members (shape)",
    """CREATE TABLE attempts (
        id TEXT PRIMARY KEY, grp TEXT NOT NULL, number INTEGER NOT NULL, node TEXT NOT NULL,
        slot TEXT,                      -- where it runs; NULL until a worker claims what any slot may take
        seq INTEGER NOT NULL,
        sent_at REAL NOT NULL, started_at REAL,
        lost_at REAL,                   -- its node or slot was given up; NULL again at a sign of life
        ended_at REAL, outcome TEXT, in_flight INTEGER, exit INTEGER, detail TEXT, seconds REAL, spent TEXT,
        device TEXT,
        current INTEGER                 -- the shape in flight, as far as is known
    ) STRICT""",
    "CREATE INDEX attempts_by_group ON attempts (grp)",
    "CREATE INDEX attempts_open ON attempts (node) WHERE ended_at IS NULL",
    "CREATE TRIGGER attempts_no_DELETE BEFORE DELETE ON attempts"
    " BEGIN SELECT RAISE(ABORT, 'attempts is append-only'); END",
    """CREATE TRIGGER attempts_history BEFORE UPDATE ON attempts
        WHEN OLD.id IS NOT NEW.id OR OLD.grp IS NOT NEW.grp OR OLD.node IS NOT NEW.node
            OR OLD.number IS NOT NEW.number OR OLD.seq IS NOT NEW.seq OR OLD.sent_at IS NOT NEW.sent_at
        BEGIN SELECT RAISE(ABORT, 'what was sent is not rewritten'); END""",
    """CREATE TRIGGER attempts_end BEFORE UPDATE ON attempts
        WHEN OLD.ended_at IS NOT NULL AND (
            OLD.ended_at IS NOT NEW.ended_at OR OLD.outcome IS NOT NEW.outcome
            OR OLD.in_flight IS NOT NEW.in_flight OR OLD.detail IS NOT NEW.detail
            OR OLD.seconds IS NOT NEW.seconds
            OR (OLD.exit IS NOT NULL AND OLD.exit IS NOT NEW.exit)
            OR (OLD.spent IS NOT NULL AND OLD.spent IS NOT NEW.spent))
        BEGIN SELECT RAISE(ABORT, 'an attempt ends once'); END""",
    """CREATE TABLE rows (
        id INTEGER PRIMARY KEY, attempt TEXT NOT NULL, shape INTEGER NOT NULL,
        node TEXT NOT NULL, slot TEXT NOT NULL,
        t REAL NOT NULL,
        winner INTEGER NOT NULL,        -- 1: a valid winner; whether it settled the shape says shapes.row
        us REAL NOT NULL,               -- -1 where there is none
        err_ratio REAL, status TEXT NOT NULL, kernel_id INTEGER, split_k INTEGER, kernel_name TEXT NOT NULL,
        libtype TEXT NOT NULL, tflops REAL, bw REAL, spread REAL, samples INTEGER, detail TEXT NOT NULL,
        gfx TEXT NOT NULL, cu_num INTEGER,
        extra TEXT,                     -- JSON: columns of a family beyond these
        note TEXT                       -- why a winner was not accepted
    ) STRICT""",
    "CREATE INDEX rows_by_attempt ON rows (attempt, shape)",
    *_append_only("rows"),
    """CREATE TABLE slots (
        node TEXT, slot TEXT, info TEXT, device TEXT, PRIMARY KEY (node, slot)
    ) STRICT, WITHOUT ROWID""",
    """CREATE TABLE offsets (
        node TEXT, slot TEXT, stream TEXT, offset INTEGER NOT NULL DEFAULT 0,
        bad INTEGER NOT NULL DEFAULT 0, last_bad TEXT,
        PRIMARY KEY (node, slot, stream)
    ) STRICT, WITHOUT ROWID""",
    """CREATE TABLE canaries (
        attempt TEXT PRIMARY KEY, node TEXT NOT NULL, slot TEXT NOT NULL, asked_at REAL NOT NULL
    ) STRICT, WITHOUT ROWID""",
    """CREATE TABLE journal (
        id INTEGER PRIMARY KEY, t REAL NOT NULL, type TEXT NOT NULL, data TEXT NOT NULL
    ) STRICT""",
    *_append_only("journal"),
)

_CONDITIONS = (
    # JSON: {"before": reading, "after": reading} of worker/device/health.py, as far as the worker sent them
    "ALTER TABLE attempts ADD COLUMN conditions TEXT",
)

_WITHHELD = (
    # candidates that an attempt did not measure because they faulted, there or before
    """CREATE TABLE withheld (
        attempt TEXT NOT NULL, shape INTEGER NOT NULL,
        candidate TEXT NOT NULL,        -- JSON: its identity
        node TEXT NOT NULL, slot TEXT NOT NULL,
        entry TEXT NOT NULL,            -- JSON: key, slot, image, driver, t as the worker named them
        name TEXT NOT NULL, outcome TEXT NOT NULL, detail TEXT NOT NULL,
        source TEXT NOT NULL,           -- attempt: it faulted in it; blocklist: before
        confirmed INTEGER NOT NULL,     -- 1: the blocklist had it from two slots already
        verdict TEXT CHECK (verdict IN ('ran', 'faulted')),     -- what another slot made of it
        judged_at REAL,
        PRIMARY KEY (attempt, shape, candidate)
    ) STRICT, WITHOUT ROWID""",
    "CREATE INDEX withheld_by_shape ON withheld (shape)",
    "CREATE INDEX withheld_judged ON withheld (node, judged_at) WHERE judged_at IS NOT NULL",
    "CREATE TRIGGER withheld_no_DELETE BEFORE DELETE ON withheld"
    " BEGIN SELECT RAISE(ABORT, 'withheld is append-only'); END",
    "DROP TRIGGER shapes_settled",
    """CREATE TRIGGER shapes_settled BEFORE UPDATE OF state, row, attempt ON shapes
        WHEN OLD.state='skipped' OR (OLD.state='tuned' AND (OLD.confirmed IS NOT 0 OR NEW.state<>'pending'))
        BEGIN SELECT RAISE(ABORT, 'a tuned or skipped shape stays so'); END""",
)

MIGRATIONS: tuple[Migration, ...] = (
    Migration(1, "the first tables", _FIRST),
    Migration(2, "conditions of attempts", _CONDITIONS),
    Migration(3, "withheld candidates", _WITHHELD),
)
