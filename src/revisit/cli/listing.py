"""`revisit methods` and `revisit models`: what there is to choose from."""

from __future__ import annotations

import typer

# What was decoded with ReVisiT on a tiny model of the family, through its own processor, in the tests.
TESTED = {
    "aya_vision": "Aya Vision",
    "gemma3": "Gemma 3",
    "glm4v": "GLM-4V",
    "idefics3": "Idefics 3",
    "internvl": "InternVL 2.5, 3",
    "llava": "LLaVA 1.5",
    "llava_next": "LLaVA-NeXT",
    "llava_onevision": "LLaVA-OneVision",
    "mistral3": "Mistral 3, Pixtral (its processor needs torchvision)",
    "paligemma": "PaliGemma",
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "smolvlm": "SmolVLM",
    "vipllava": "ViP-LLaVA",
}


def methods(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """List the decoding methods: what each does, what it costs, where it comes from."""
    import dataclasses
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
                "settings": [f.name for f in dataclasses.fields(cls)],
            }
            for name, cls in found
        ]
        print(json.dumps(rows, ensure_ascii=False, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("method", "what it does", "cost per token", "source", box=None)
    for name, cls in found:
        table.add_row(f"[bold]{name}[/]", cls.summary, cls.cost, cls.source)
    Console().print(table)


def models(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """List the model families, and the layers the paper recommends for each."""
    import json

    from revisit import ReVisiT

    rows = [{"family": key, "models": text, "layers": ReVisiT.recommended(key).layers} for key, text in TESTED.items()]
    if as_json:
        print(json.dumps(rows, ensure_ascii=False, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("model_type", "models", "recommended layers", box=None)
    for row in rows:
        table.add_row(f"[bold]{row['family']}[/]", str(row["models"]), str(row["layers"]))
    console = Console()
    console.print(table)
    console.print(
        "\n'tiny' is the embedded model. Other decoder-only models whose prompts hold vision tokens work too: they are "
        "found by what the model declares, and refused in one sentence where they cannot."
    )


def register(app: typer.Typer) -> None:
    app.command()(methods)
    app.command()(models)
