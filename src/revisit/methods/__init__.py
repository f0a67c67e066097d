"""The decoding methods, one file each. Looking them up by name: `revisit.decoding.registry`, whose functions are here too."""

from __future__ import annotations

from revisit.decoding.registry import (
    as_method,
    find,
    get,
    method_text,
    names,
    parse_method,
    parse_methods,
    recommended,
    register,
    value_text,
)

__all__ = [
    "as_method",
    "find",
    "get",
    "method_text",
    "names",
    "parse_method",
    "parse_methods",
    "recommended",
    "register",
    "value_text",
]
