"""`revisit methods`, `revisit models` and `revisit benchmarks`: what there is to choose from."""

from __future__ import annotations

import typer

from revisit.cli import options
from revisit.cli.tables import show


def methods(as_json: bool = options.JSON) -> None:
    """List the decoding methods: what each does, what it costs, where it comes from."""
    import json

    from revisit.methods import find, names

    found = [(name, find(name)) for name in names()]
    if as_json:
        rows = [
            {
                "name": name,
                "summary": cls.summary,
                "cost": cls.cost,
                "source": cls.source,
                "settings": list(cls.model_fields),
            }
            for name, cls in found
        ]
        print(json.dumps(rows, ensure_ascii=False, indent=2))
        return
    from rich.table import Table

    table = Table("method", "what it does", "cost per token", "source", box=None)
    for name, cls in found:
        table.add_row(f"[bold]{name}[/]", cls.summary, cls.cost, cls.source)
    show(table)


def models(as_json: bool = options.JSON) -> None:
    """List the model families, and the layers the paper recommends for each."""
    import json

    from revisit.models import families

    rows = [
        {"family": family.model_type, "models": family.title, "needs": family.needs, "layers": family.layers}
        for family in families.tested()
    ]
    if as_json:
        print(json.dumps(rows, ensure_ascii=False, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("model_type", "models", "recommended layers", box=None)
    for row in rows:
        needs = f" (its processor needs {row['needs']})" if row["needs"] else ""
        table.add_row(f"[bold]{row['family']}[/]", f"{row['models']}{needs}", row["layers"])
    show(table)
    Console(soft_wrap=True).print(
        "\n'tiny' is the model that ships with this package, 'smol' the one with SmolLM2 (extra `smol`). The tests decode these "
        "families. Other decoder-only models with vision tokens in their prompts work too; a model that cannot work is refused."
    )


def benchmarks(as_json: bool = options.JSON) -> None:
    """List the benchmarks: their metrics, where their data comes from, and what answers on disk are scored against."""
    import json

    from revisit.benchmarks import find, names

    rows = [
        {
            "name": name,
            "title": cls.title,
            "metrics": [metric.name for metric in cls.metrics],
            "data": "authors' servers" if cls.downloads else f"hub: {cls.hub.repos[0]}" if cls.hub else cls.source,
            "license": cls.license,
            "scored_with": cls.truth,
            "options": list(cls.model_fields),
        }
        for name in names()
        for cls in [find(name)]
    ]
    if as_json:
        print(json.dumps(rows, ensure_ascii=False, indent=2))
        return
    from rich.table import Table

    table = Table("benchmark", "metrics", "data (`revisit data get`)", "answers on disk are scored with", box=None)
    for row in rows:
        table.add_row(
            f"[bold]{row['name']}[/]",
            ", ".join(row["metrics"]),
            str(row["data"]),
            str(row["scored_with"] or "nothing else"),
        )
    show(table)


def register(app: typer.Typer) -> None:
    app.command()(methods)
    app.command()(models)
    app.command()(benchmarks)
