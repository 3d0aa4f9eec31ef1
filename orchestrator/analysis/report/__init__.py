"""The page of a run: what was asked, what came of it, what was measured, and what went wrong (docs/report.md)."""
