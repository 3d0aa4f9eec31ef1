"""Several backends on the same shapes, interleaved on a GPU; driven by the tuner `bench` (docs/how-to/backends.md)."""
