"""The tuner `replay`: recorded or made-up rows in recorded time, for tests and demonstrations."""
