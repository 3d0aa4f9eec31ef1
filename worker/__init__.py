"""The program in the container: drains its inbox, one attempt at a time, on one slot.

Stdlib only (a tuner may import what it needs), Python 3.10 to 3.13, and nothing from the controller.
"""
