"""Results of runs that were started by hand on the nodes, brought home and merged (docs/using-results.md)."""
