"""Schedules as data: which point of a layer yields where, parsed, printed, played and refused.

drawing     the two-row drawing of a steady state: what computes above what communicates
model       the values             ring       the order that all ubatches give together
oplist      importer for lists of operations with yield markers
order       the Order line         drawing    the Comp and Comm rows
period      from one period of the ring back to the program that every ubatch follows
presets     schedules by name      oplist     lists of operations with yield markers
ring        the order in which a schedule issues its points
statements  the lines of a schedule file, cut into keyword
text        the file form          validate   what must hold before anything runs
validate    what must hold before a schedule may run: each rule is one function, each refusal one sentence
"""

from dbo.schedule.drawing import drawing
from dbo.schedule.model import BACKENDS, HOOK_BACKENDS, POINTS, Item, LayerProgram, Point, RunRecvHook, Schedule, Yield
from dbo.schedule.oplist import parse_operations
from dbo.schedule.order import order_line
from dbo.schedule.presets import load_schedule, presets
from dbo.schedule.ring import Step, ring_order, steady_window
from dbo.schedule.text import parse_schedule, to_text
from dbo.schedule.validate import validate

__all__ = [
    "BACKENDS",
    "HOOK_BACKENDS",
    "POINTS",
    "RunRecvHook",
    "Item",
    "Point",
    "LayerProgram",
    "Schedule",
    "Step",
    "Yield",
    "drawing",
    "load_schedule",
    "order_line",
    "parse_operations",
    "parse_schedule",
    "presets",
    "ring_order",
    "steady_window",
    "to_text",
    "validate",
]
