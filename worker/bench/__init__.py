"""Several backends on the same shapes, interleaved on one GPU (docs/bench.md). The worker's tuner `bench` drives it."""
