"""Modules served to the real tuner base in place of those that need a GPU; see sitecustomize.py."""
