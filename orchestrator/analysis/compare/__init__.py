"""Two sets of repeated timings judged against each other, with a known rate of false alarms (docs/compare.md)."""
