"""Tables of users: found, opened, read with every fault by file and line, written whole."""
