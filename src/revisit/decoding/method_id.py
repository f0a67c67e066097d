"""What tables, titles and logs call a method, and the text that selects it on a command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from revisit.decoding.method import METHODS, Method


@dataclass(frozen=True, eq=False)
class MethodId:
    """A method with its settings. It equals its text, `revisit(alpha=0.01)`, so a table can be indexed by either.

    Attributes:
        name: The method's name.
        settings: Those that are not its defaults.
        control: What replaces the images of the items; empty if the method sees them.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    control: str = ""

    @classmethod
    def of(cls, method: Method, control: str = "") -> MethodId:
        """Return the identity of a method under a control."""
        return cls(method.name, changed(method.settings(), type(method)().settings()), control)

    def __str__(self) -> str:
        return labelled(self.name, self.settings) + self.control_text

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other) if isinstance(other, (MethodId, str)) else NotImplemented

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def short(self) -> str:
        """The text without settings."""
        return self.name + self.control_text

    @property
    def control_text(self) -> str:
        """The control as the text has it, with a leading space."""
        return f" [{self.control}]" if self.control else ""

    @property
    def command(self) -> str:
        """The method as typed on a command line: `revisit:alpha=0.01`."""
        text = ",".join(assignments(self.settings))
        return f"{self.name}:{text}" if text else self.name


def changed(settings: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, Any]:
    """Return the settings that are not defaults."""
    return {key: value for key, value in settings.items() if key not in defaults or defaults[key] != value}


def labelled(name: str, settings: Mapping[str, object]) -> str:
    """Return a name with settings as tables print it: `revisit(alpha=0.01, layers=all)`."""
    text = ", ".join(assignments(settings))
    return f"{name}({text})" if text else name


def assignments(settings: Mapping[str, object]) -> list[str]:
    """Return settings as a user types them."""
    return [f"{key}={value_text(value)}" for key, value in settings.items()]


def method_text(name: str, settings: Mapping[str, object]) -> str:
    """Return the text that selects a method with these settings, without its defaults."""
    defaults = METHODS.get(name).settings() if name in METHODS.names() else {}
    return MethodId(name, changed(settings, defaults)).command


def value_text(value: object) -> str:
    """Return a setting's value as a user types it; the methods of a chain with their settings."""
    if isinstance(value, Mapping):
        return method_text(value["name"], {key: own for key, own in value.items() if key != "name"})
    if isinstance(value, (list, tuple)):
        separator = ";" if any(isinstance(entry, Mapping) for entry in value) else ","
        return f"[{separator.join(map(value_text, value))}]"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
