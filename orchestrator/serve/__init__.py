"""A run's page, live: a small server for the browser of this machine (docs/how-to/backends.md)."""
