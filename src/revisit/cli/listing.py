"""`revisit methods`, `revisit models` and `revisit benchmarks`: list the names that other commands accept."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

import typer

from revisit.cli import options
from revisit.decoding.method import METHODS, as_method
from revisit.decoding.method_id import value_text
from revisit.errors import RevisitError
from revisit.eval.benchmarks import find, names
from revisit.eval.report.document import Table
from revisit.eval.report.terminal import print_table
from revisit.io.records import Fields
from revisit.models import DESCRIBE, families

if TYPE_CHECKING:
    from revisit.decoding.method import Method
    from revisit.eval.benchmarks.base import Benchmark
    from revisit.registry import Settings

NEVER_MET = 100_000_000  # larger bounds only keep numbers finite
NAME = typer.Argument("", help="Name, or FILE.py:Class, to show in detail; by default all are listed.")


def describe(cls: type[Settings]) -> list[Fields]:
    """List the settings of a class, its own first, ready for JSON: name, default, allowed values, description."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        arguments = inspect.cleandoc(base.__doc__ or "").partition("\nArgs:\n")[2]
        texts.update(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE))
    schema = cls.model_json_schema()["properties"] if cls.model_fields else {}
    return [
        {
            "name": name,
            "default": list(field.default) if isinstance(field.default, tuple) else field.default,
            "allowed": _allowed(schema[name]),
            "about": " ".join(texts.get(name, "").split()),
        }
        for name, field in sorted(cls.model_fields.items(), key=lambda item: item[0] not in cls.__annotations__)
    ]


def _allowed(schema: Fields) -> str:
    """Describe the values that a JSON schema allows, for example "number > 0, <= 1"."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_allowed, schema["anyOf"])))
    if choices := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return " or ".join(map(repr, choices))
    kind = {"null": "none", "array": "list", "string": "text"}.get(schema.get("type", ""), schema.get("type", "any"))
    if schema.get("items"):
        return f"{kind} of {_allowed(schema['items'])}"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<="}
    bounds = ", ".join(
        f"{sign} {schema[key]:{',' if kind == 'integer' else ',.9g'}}"
        for key, sign in signs.items()
        if key in schema and schema[key] < NEVER_MET
    )
    return f"{kind} {bounds}".rstrip()


def _text(value: object) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)


def _list(rows: Iterable[Mapping[str, object]], columns: Mapping[str, str], as_json: bool) -> None:
    """Print all fields as JSON, or these columns (field -> heading) as a table."""
    if as_json:
        options.print_json(list(rows), indent=2)
        return
    lines = [[_text(row[field]) for field in columns] for row in rows]
    print_table(Table(tuple(columns.values()), lines, "", left=len(columns)))


def _detail(row: Fields, settings: str, example: str, as_json: bool) -> None:
    """Print one entry: its facts, its settings, and how to use it."""
    if as_json:
        options.print_json(row, indent=2)
        return
    facts = {key: value for key, value in row.items() if key not in ("name", settings)}
    options.print_facts(row["name"], ((key, _text(value)) for key, value in facts.items()))
    print()
    lines = [(e["name"], value_text(e["default"]), e["allowed"], e["about"]) for e in row[settings]]
    if lines:
        print_table(Table((settings.removesuffix("s"), "default", "allowed", "what it does"), lines, "", left=4))
    else:
        print(f"No {settings}.\n")
    print(f"Example:\n  {example}")


def _method(cls: type[Method]) -> Fields:
    facts = {field: getattr(cls, field) for field in ("name", "summary", "cost", "source")}
    return {**facts, "settings": describe(cls)}


def methods(
    name: str = NAME,
    model: str = typer.Option(
        "", "--prompt", metavar="MODEL", help="Show the prompts that the method sends to this model."
    ),
    as_json: bool = options.JSON,
) -> None:
    """List the decoding methods, or show one with its settings, defaults and an example.

    Examples:

      revisit methods vcd
      revisit methods icd:place=image --prompt llava-hf/llava-1.5-7b-hf
    """
    if model:
        _prompts(name, model, as_json)
        return
    if not name:
        columns = {"name": "method", "summary": "what it does", "cost": "cost per token", "source": "source"}
        known = sorted(METHODS.names(), key=lambda known: (known != "revisit", known != "greedy"))
        _list((_method(METHODS.find(name)) for name in known), columns, as_json)
        return
    row = _method(METHODS.load(name))
    first = "".join(f":{entry['name']}={value_text(entry['default'])}" for entry in row["settings"][:1])
    _detail(row, "settings", f"revisit generate photo.jpg --model photo --method {name}{first}", as_json)


def _prompts(name: str, model: str, as_json: bool) -> None:
    """Print the text and tokens of every prompt that a method sends for a sample image and the usual request."""
    if not name:
        raise RevisitError("--prompt needs the name of a method; for example: revisit methods icd --prompt tiny")
    method, settings = options.chosen_method(name, [])
    as_method(method, **settings)

    from revisit.embedded.samples import sample
    from revisit.explain.prompts import sent_prompts
    from revisit.models.prompts import prepare

    image = sample().image()
    loaded, processor = options.load_for_image(model, image, "the sample image", any_image=True)
    inputs = prepare(processor, DESCRIBE, image, device=loaded.device)
    prompts = sent_prompts(loaded, processor, as_method(method, loaded, **settings), inputs)
    if as_json:
        options.print_json([asdict(prompt) for prompt in prompts], indent=2)
        return
    for prompt in prompts:
        times = f", run {prompt.runs} times" if prompt.runs > 1 else ""
        ids = ((token, len(list(run))) for token, run in groupby(prompt.tokens))
        tokens = " ".join(f"{token}" if count == 1 else f"{token}(x{count})" for token, count in ids)
        print(f"-- {prompt.kind}{times}, {len(prompt.tokens)} tokens\n{prompt.text}\n\nTokens: {tokens}\n")


def models(as_json: bool = options.JSON) -> None:
    """List the tested model families, with the layers that the paper recommends."""
    rows = [
        {"family": family.model_type, "models": family.title, "needs": family.needs, "layers": family.layers}
        for family in families.tested()
    ]
    columns = {"family": "model_type", "models": "models", "needs": "processor needs", "layers": "layers"}
    _list(rows, columns, as_json)
    if not as_json:
        typer.echo(
            "\n'tiny' ships with this package; 'photo' is for photographs (extra `photo`). Other decoder-only models with vision tokens "
            "in their prompts work too; unsupported models raise an error."
        )


def _benchmark(cls: type[Benchmark]) -> Fields:
    return {
        "name": cls.name,
        "title": cls.title,
        "metrics": [metric.name for metric in cls.metrics],
        "headline": cls.headline,
        "max_new_tokens": cls.max_new_tokens,
        "data": "authors' servers" if cls.downloads else f"hub: {cls.hub.repos[0]}" if cls.hub else cls.source,
        "license": cls.license,
        "options": describe(cls),
    }


def benchmarks(name: str = NAME, as_json: bool = options.JSON) -> None:
    """List the benchmarks, or show one with its options, metrics, data and license.

    Example: revisit benchmarks pope
    """
    if not name:
        columns = {"name": "benchmark", "metrics": "metrics", "data": "data (`revisit data get`)", "license": "license"}
        _list((_benchmark(find(known)) for known in names()), columns, as_json)
        return
    cls = find(name)
    data = "--data download" if cls.downloads or cls.hub else "--data DIR"
    run = f"revisit eval --benchmark {name} --method greedy,revisit --model MODEL"
    _detail(_benchmark(cls), "options", f"{run} {data} --limit 100 --out runs/{cls.name}", as_json)
