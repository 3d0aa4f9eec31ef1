"""The kits that tests are written with.

`fleet`: a folder with an inventory, shapes and runs, commands on it, and the books at the end of a run.
`worker`: real agents on a node folder, and single groups by hand.
`results`: a run's ledger and folder, made without nodes.
"""
