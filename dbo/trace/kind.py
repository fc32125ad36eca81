"""What a kind of record is: its name, who writes it and when, its attributes with their types and units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

NUMBER = (int, float)

Types = type | tuple[type, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attr:
    """One attribute of a kind.

    Attributes:
        type: of its value, as `isinstance` takes it; what JSON can hold.
        what: what it says, with its unit.
        required: every record of the kind has it.
    """

    type: Types
    what: str
    required: bool = True


def attr(type: Types, what: str) -> Attr:
    """An attribute that every record of the kind has."""
    return Attr(type=type, what=what)


def maybe(type: Types, what: str) -> Attr:
    """An attribute that some records of the kind have."""
    return Attr(type=type, what=what, required=False)


class Kind(str):
    """The name of a kind, which is what a record carries, with what the contract says of it.

    Attributes:
        on: "host" (a host line writes it), "device" (a stream's line), or "end" (written when the run is over).
        when: when it is written, in one sentence.
        attrs: by name.
        worlds: which worlds owe it in the programs of `dbo conform`; empty: those give no reason to write one.
    """

    __slots__ = ("attrs", "on", "when", "worlds")

    on: str
    when: str
    attrs: Mapping[str, Attr]
    worlds: tuple[str, ...]

    def __new__(
        cls, name: str, *, on: str, when: str, attrs: Mapping[str, Attr] | None = None, worlds: tuple[str, ...] = ()
    ) -> Kind:
        kind = super().__new__(cls, name)
        kind.on, kind.when, kind.worlds = on, when, worlds
        kind.attrs = MappingProxyType(dict(attrs or {}))
        return kind

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Traces travel between processes as plain names."""
        return str, (str(self),)

    def faults_of(self, attrs: Mapping[str, Any]) -> list[str]:
        """What is wrong with the attributes of a record of this kind, a sentence each; empty when nothing is."""
        wrong = [f"lacks {name}" for name, attr in self.attrs.items() if attr.required and name not in attrs]
        for name, value in attrs.items():
            if name not in self.attrs:
                wrong.append(f"carries {name}, which the contract does not name")
            elif not isinstance(value, self.attrs[name].type):
                wrong.append(f"carries {name}={value!r}, which is no {_words(self.attrs[name].type)}")
        return wrong


def _words(type: Types) -> str:
    types = type if isinstance(type, tuple) else (type,)
    return " or ".join(t.__name__ for t in types)
