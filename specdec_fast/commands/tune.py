"""`specdec tune`: what drafters are made of, found by measuring."""

from __future__ import annotations

import typer

from specdec_fast.commands.tune_tree import tree

app = typer.Typer(help="Choose by measuring what a drafter is made of.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """Choose by measuring what a drafter is made of."""


app.command()(tree)
