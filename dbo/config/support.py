"""What is built so far. An option outside this table is refused by name: nothing is accepted and then ignored.

Widening it is one line, in the change that builds the thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dbo.config import facts
from dbo.errors import NotAvailable

if TYPE_CHECKING:
    from dbo.config.options import DBOConfig

IMPLEMENTED: Mapping[str, Mapping[str, frozenset[object]]] = {
    "sim": {
        "all2all_backend": frozenset(facts.BACKENDS),
        "cudagraph_mode": frozenset({"NONE", "FULL"}),
        "shared_experts": frozenset({"overlap", "before", "stream"}),
    },
    "gpu": {
        "all2all_backend": frozenset(facts.BACKENDS),
        "cudagraph_mode": frozenset({"NONE", "FULL"}),
        "shared_experts": frozenset({"overlap", "before", "stream"}),
    },
}
"""World -> option -> the values that work there. An option that is not listed works with every value."""


def require_implemented(config: DBOConfig) -> None:
    """Refuse what this build cannot run.

    Raises:
        NotAvailable: the first option whose value is not in `IMPLEMENTED`, and what is.
    """
    for name, built in IMPLEMENTED[config.world].items():
        value = getattr(config, name)
        if value not in built:
            choices = ", ".join(sorted(map(str, built)))
            raise NotAvailable.of(
                f"world {config.world} runs only what is built for it",
                fix=f"use one of: {choices}" if choices else "use another world",
                **{name: value},
            )
