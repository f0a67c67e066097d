"""The decoding methods, one file each, and functions that find them by name."""

from __future__ import annotations

from revisit.decoding.method import METHODS, as_method, method_text, value_text

find = METHODS.find
get = METHODS.get
names = METHODS.names
parse_method = METHODS.parse
parse_methods = METHODS.parse_list
register = METHODS.register

__all__ = [
    "as_method",
    "find",
    "get",
    "method_text",
    "names",
    "parse_method",
    "parse_methods",
    "register",
    "value_text",
]
