"""Whole runs of the real controller and real agents in under a second: see `fleet.Fleet`."""
