"""The tables of the page on families: `python -m tests.support.families_page` prints them."""

from __future__ import annotations

from worker.families import FAMILIES


def as_markdown() -> str:
    """The table of families as the docs show it."""
    lines = [
        "| family | key columns | limits | result columns | table | environment variable |",
        "|---|---|---|---|---|---|",
    ]
    for f in FAMILIES.values():
        names = [f"`{c.name}`" + (f" (`{c.aiter}`)" if c.aiter else "") for c in f.columns]
        keys = ", ".join(n if c.required else f"{n} = {c.default}" for n, c in zip(names, f.columns, strict=True))
        limits = ", ".join(f"{x.column} % {x.multiple_of} == 0 ({x.why})" for x in f.limits)
        results = ",".join(f.result_columns)
        lines.append(f"| `{f.name}` | {keys} | {limits} | `{results}` | `{f.tuned_csv}` | `{f.env}` |")
    lines += ["", "| family | columns | legal values |", "|---|---|---|"]
    for f in FAMILIES.values():
        for legal in dict.fromkeys(c.legal for c in f.columns if c.legal):
            columns = ", ".join(f"`{c.name}`" for c in f.columns if c.legal == legal)
            lines.append(f"| `{f.name}` | {columns} | {', '.join(f'`{v}`' for v in legal)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_markdown())
