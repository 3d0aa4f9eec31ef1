"""`gemmfleet bench`: the request to the workers' tuner `bench`, and its result files (docs/how-to/backends.md)."""
