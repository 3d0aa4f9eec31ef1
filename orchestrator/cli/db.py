"""`gemmfleet db`: the tuned DB."""

from __future__ import annotations

import typer

from orchestrator.cli import db_check, db_export, db_merge

app = typer.Typer(help="The tuned DB.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def db() -> None:
    """The tuned DB."""


app.command("merge")(db_merge.merge)
app.command("check")(db_check.check)
app.command("diff")(db_check.diff)
app.command("undo")(db_merge.undo)
app.command("split")(db_merge.split)
app.command("import")(db_merge.import_)
app.command("export")(db_export.export)
