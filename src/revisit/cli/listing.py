"""`revisit methods`, `revisit models` and `revisit benchmarks`: what there is to choose from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import typer

from revisit.cli import options
from revisit.cli.tables import show


def _list(rows: Iterable[Mapping[str, object]], columns: Mapping[str, str], as_json: bool) -> None:
    """Print all fields as JSON, or these columns (field -> heading) as a table whose first column is bold."""
    if as_json:
        import json

        print(json.dumps(list(rows), ensure_ascii=False, indent=2))
        return
    from rich.table import Table

    table = Table(*columns.values(), box=None)
    for row in rows:
        first, *others = (row[field] for field in columns)
        cells = (", ".join(cell) if isinstance(cell, list) else str(cell) for cell in others)
        table.add_row(f"[bold]{first}[/]", *cells)
    show(table)


def methods(as_json: bool = options.JSON) -> None:
    """List the decoding methods: what each does, what it costs, where it comes from."""
    from revisit.methods import find, names

    fields = ("summary", "cost", "source")
    rows = [
        {"name": name, **{field: getattr(cls, field) for field in fields}, "settings": list(cls.model_fields)}
        for name in names()
        for cls in [find(name)]
    ]
    columns = {"name": "method", "summary": "what it does", "cost": "cost per token", "source": "source"}
    _list(rows, columns, as_json)


def models(as_json: bool = options.JSON) -> None:
    """List the model families, and the layers the paper recommends for each."""
    from revisit.models import families

    rows = [
        {"family": family.model_type, "models": family.title, "needs": family.needs, "layers": family.layers}
        for family in families.tested()
    ]
    columns = {"family": "model_type", "models": "models", "needs": "processor needs", "layers": "layers"}
    _list(rows, columns, as_json)
    if not as_json:
        typer.echo(
            "\n'tiny' is the model that ships with this package, 'photo' knows photographs (extra `photo`). The tests decode these "
            "families. Other decoder-only models with vision tokens in their prompts work too; a model that cannot work is refused."
        )


def benchmarks(as_json: bool = options.JSON) -> None:
    """List the benchmarks: their metrics, and where their data comes from."""
    from revisit.benchmarks import find, names

    rows = [
        {
            "name": name,
            "title": cls.title,
            "metrics": [metric.name for metric in cls.metrics],
            "data": "authors' servers" if cls.downloads else f"hub: {cls.hub.repos[0]}" if cls.hub else cls.source,
            "license": cls.license,
            "options": list(cls.model_fields),
        }
        for name in names()
        for cls in [find(name)]
    ]
    columns = {"name": "benchmark", "metrics": "metrics", "data": "data (`revisit data get`)", "license": "license"}
    _list(rows, columns, as_json)
