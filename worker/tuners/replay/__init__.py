"""The tuner `replay`: answers from recorded or made-up rows, in recorded time."""
