"""The page of a run: its shapes, results, measurements and failures (docs/how-to/backends.md)."""
