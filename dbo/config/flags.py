"""The command line's view of `DBOConfig`: its declared options, and other engines' that are refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dbo.config.declaration import Option, comma_separated_ints, option_of
from dbo.config.options import DBOConfig
from dbo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One command-line option.

    Attributes:
        field: of `DBOConfig`.
        type: turns the text into a value; None for a switch that stores True.
        declared: what the field's declaration says.
    """

    field: str
    type: Callable[[str], Any] | None
    declared: Option

    @property
    def flag(self) -> str:
        """Its spelling."""
        return self.declared.flag

    @property
    def choices(self) -> tuple[str, ...] | None:
        """The texts that are taken; None: any."""
        return self.declared.choices() if self.declared.choices is not None else None

    @property
    def metavar(self) -> str:
        """What a help text calls the value."""
        return (self.declared.unit or self.flag.rpartition("-")[2]).upper()

    def typed(self, value: Any) -> list[str]:
        """The words that give this value on a command line."""
        if self.type is None:
            return [self.flag if value else self.flag.replace("--", "--no-", 1)]
        return [self.flag, self._shown(value)]

    def help(self, effective: Any, source: str | None = None) -> str:
        """A line of help.

        Args:
            effective: the value of a run that does not give this option; None: it has none.
            source: where that comes from, in words; None: as the field's declaration says.
        """
        words = self.declared.default if source is None else source
        shown = self._shown(effective) if effective is not None else ""
        return f"{self.declared.help} (default: {', '.join(filter(None, (shown, words)))})"

    def _shown(self, value: Any) -> str:
        if self.type is None:
            return "on" if value else "off"
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, kw_only=True)
class NotNow:
    """An option of other engines that this project does not have yet, refused when it asks for something.

    Attributes:
        flag, field: its spelling on a command line and in a configuration file.
        neutral: values that ask for nothing.
        what: what it would ask for.
        instead: what to do.
    """

    flag: str
    field: str
    neutral: tuple[Any, ...] = (None, False)
    what: str
    instead: str = "drop the option"


_TYPES: Mapping[str, Callable[[str], Any] | None] = {
    "bool": None,
    "int": int,
    "str": str,
    "str | None": str,
    "tuple[int, ...] | None": comma_separated_ints,
}
"""How a field's annotation is read from text; None: a switch."""


def _flag(field: dataclasses.Field[Any], declared: Option) -> Flag:
    return Flag(field=field.name, type=_TYPES[str(field.type)], declared=declared)


FLAGS: tuple[Flag, ...] = tuple(
    _flag(field, declared) for field in dataclasses.fields(DBOConfig) if (declared := option_of(field)) is not None
)

NOT_NOW: tuple[NotNow, ...] = (
    NotNow(flag="--kv-cache-dtype", field="kv_cache_dtype", neutral=(None, "auto"), what="a quantized KV cache"),
    NotNow(flag="--quantization", field="quantization", what="quantized weights"),
    NotNow(flag="--fp8-dispatch", field="fp8_dispatch", what="fp8 dispatch", instead="payloads are sent as they are"),
    NotNow(flag="--enable-eplb", field="enable_eplb", what="expert load balancing"),
    NotNow(
        flag="--num-redundant-experts",
        field="num_redundant_experts",
        neutral=(None, 0),
        what="redundant experts",
    ),
    NotNow(
        flag="--tensor-parallel-size",
        field="tensor_parallel_size",
        neutral=(None, 1),
        what="tensor parallelism",
        instead="use --data-parallel-size or --decode-context-parallel-size",
    ),
    NotNow(
        flag="--pipeline-parallel-size",
        field="pipeline_parallel_size",
        neutral=(None, 1),
        what="pipeline parallelism",
        instead="use --data-parallel-size",
    ),
    NotNow(flag="--speculative-config", field="speculative_config", what="drafters"),
    NotNow(flag="--enable-lora", field="enable_lora", what="LoRA"),
    NotNow(flag="--limit-mm-per-prompt", field="limit_mm_per_prompt", what="multimodal input"),
    NotNow(flag="--port", field="port", what="HTTP serving", instead="pass prompts on the command line or from Python"),
    NotNow(flag="--gsm8k", field="gsm8k", what="the GSM8K evaluation", instead="token equality with DBO off stands in"),
)


def refuse_not_now(options: Mapping[str, Any]) -> None:
    """Refuse, by name, options that ask for what is not built; neutral values and other names pass.

    Args:
        options: values by field name or by flag.

    Raises:
        ConfigError: the first such option.
    """
    for entry in NOT_NOW:
        for name in (entry.field, entry.flag):
            if name in options and options[name] not in entry.neutral:
                raise ConfigError.of(f"{entry.what}: not now", fix=entry.instead, **{name: options[name]})
