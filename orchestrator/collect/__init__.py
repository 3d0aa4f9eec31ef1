"""Results of runs started by hand, fetched from the nodes and merged (docs/how-to/table-to-production.md)."""
