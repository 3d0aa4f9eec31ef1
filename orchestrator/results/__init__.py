"""The result files of a run: tuned table, profile, failures, provenance (docs/reference/files.md)."""
