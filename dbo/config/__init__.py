"""What a run is told, what is refused before it starts, and how ranks find out that they were told different things.

agreement        effective configuration, comparison over ranks
capacity         sizes that follow: graph ladder, low-latency buffer, batches to profile
case             what a rule looks at, and what a rule is
declaration      how an option of `DBOConfig` is declared: once, beside its field
facts            backends, choices, shapes of models and devices
flags            the command line's options, one entry each, and those refused by name
options          `DBOConfig`, values and derived defaults
paths            reading files that a user names: regular ones of a bounded size
rules            every refusal and every warning
rules_exchange   what exchanges between ranks ask for: SMs
rules_sizes      what batches, caches and graphs must hold, and what the model and the machine must offer
rules_ubatching  what splitting a step asks for: expert parallelism
rules_values     each option by itself: its choices and its bounds, as declared
support          what is built so far, per world
"""

from dbo.config.agreement import RANK_LOCAL_FIELDS, compare_configs, effective
from dbo.config.capacity import capture_ladder, low_latency_size_hint_bytes, profile_shapes, require_profiled
from dbo.config.facts import BACKENDS, DeviceLimits, ModelShape, Workload
from dbo.config.flags import FLAGS, NOT_NOW, Flag, NotNow
from dbo.config.options import DBOConfig
from dbo.config.rules import validate
from dbo.config.support import IMPLEMENTED, require_implemented

__all__ = [
    "BACKENDS",
    "FLAGS",
    "IMPLEMENTED",
    "NOT_NOW",
    "RANK_LOCAL_FIELDS",
    "DBOConfig",
    "DeviceLimits",
    "Flag",
    "ModelShape",
    "NotNow",
    "Workload",
    "capture_ladder",
    "compare_configs",
    "effective",
    "low_latency_size_hint_bytes",
    "profile_shapes",
    "require_implemented",
    "require_profiled",
    "validate",
]
