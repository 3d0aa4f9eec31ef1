"""The tuned DB: merges and undo, provenance, checks, differences, imports (docs/reference/files.md)."""
