"""Schedules as data: which point of a layer yields where, parsed, printed, played and refused.

model      the values             ring       the order that all ubatches give together
text       the file form          validate   what must hold before anything runs
order      the Order line         drawing    the Comp and Comm rows
presets    schedules by name      oplist     lists of operations with yield markers

period      from one period of the ring back to the program that every ubatch follows
statements  the lines of a schedule file, cut into keyword
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
