"""Reading an AITER tree without importing it: files are parsed, and answers name the lines they were read from."""
