"""The kits that tests are written with.

`fleet`: a folder with an inventory, shapes and runs, commands on it, and the books at the end of a run.
"""
