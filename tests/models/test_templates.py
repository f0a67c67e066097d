"""Chat templates are programs of other people: what real ones do is allowed, what has no bound is not."""

from __future__ import annotations

from typing import Any

import pytest

import families
from revisit.errors import RevisitError
from revisit.models import templates

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}]}]


def written(template: str) -> str:
    _, processor = families.build("llava")
    before = processor.chat_template
    processor.chat_template = template
    try:
        return templates.render(processor, MESSAGES, add_generation_prompt=True)
    finally:
        processor.chat_template = before


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0].content[0].text }}", "What is it?"),
        ("{% for m in messages %}{{ loop.index0 % 2 }}{{ loop.index * 2 }}{% endfor %}", "02"),
        ("{{ messages | tojson(indent=4) | length > 10 }}", "True"),
        ("* not * an * operator ** here {{ '*' }}", "* not * an * operator ** here *"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') ~ f('b') }}", "<a><b>"),
        ("{{ '%s %5d' % ('n', 7) }}", "n     7"),
    ],
)
def test_what_real_templates_do_is_written(template: str, text: str) -> None:
    assert written(template) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 999999 }}",
        "{{ messages[0].role * 2 * 2 * 2 * 2 * 2 }}",
        "{{ 2 ** 4 }}",
        "{{ 'x'.ljust(99) }}",
        "{{ 'x' | center(99) }}",
        "{{ 'x' | indent(width=10000000) }}",
        "{{ '{:>99999}'.format(1) }}",
    ],
)
def test_operations_without_a_bound_are_refused(template: str) -> None:
    with pytest.raises(RevisitError, match="is refused"):
        written(template)


def test_the_text_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_TEXT", 10)
    with pytest.raises(RevisitError, match="more than 10 characters"):
        written("{{ messages[0].content[0].text }}")
