"""`gemmfleet bench`: what is asked of the workers' tuner `bench`, and what becomes of its rows (docs/bench.md)."""
