"""Backends against each other: the best of each on each shape, from profiles of any size."""
