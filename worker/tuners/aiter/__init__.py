"""The tuner `aiter`: AITER's own tuner scripts, driven in the image that the worker runs in."""
