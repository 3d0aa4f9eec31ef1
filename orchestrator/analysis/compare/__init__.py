"""Two sets of repeated timings judged against each other (docs/explanation/measurement.md: the false-alarm rate)."""
