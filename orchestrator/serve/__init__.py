"""Server of a run's live page for browsers of this machine (docs/how-to/backends.md)."""
