"""Backends, which run in a process of their own and need torch; the rest of worker/bench needs none."""
