"""`python -m worker.families` prints the table of families as the docs show it."""

from worker.families import as_markdown

if __name__ == "__main__":
    print(as_markdown())
