"""The program in the container: drains its inbox, one attempt at a time, on one slot.

Stdlib only (a tuner may import what it needs), Python 3.10 to 3.13, and nothing from the controller.
"""

from pathlib import Path

# the folder that has this package in it: what a child process needs on its path
PACKAGE_PARENT = Path(__file__).resolve().parent.parent
