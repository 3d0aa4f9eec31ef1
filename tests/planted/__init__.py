"""Planted bugs: forty small faults against the laws of the design, each of which the tests must catch.

`make planted` puts one at a time into a copy of the checkout and runs the tests that are named beside it.
"""
