"""The tuned DB: judging newcomers, keeping and undoing, provenance, checks, differences, imports (docs/tuned-db.md)."""
