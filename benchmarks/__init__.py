"""Speed, measured: `make benchmarks` prints each figure beside its bound or peer, taken in the same run."""
