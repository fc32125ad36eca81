"""The contract of the trace: every kind of record, by whom it is written, when, and what it carries.

Worlds write records through these values (`world.trace.host(kinds.YIELD, to=1, index=0)`), detectors declare which of them they
read, and `dbo conform` fails a world that owes a kind or writes one otherwise. A record carries the name only, so stored
traces do not depend on this module.

Times are microseconds, sizes bytes or rows as named. A record's own fields (rank, line, step, ubatch, accesses …) are in
`dbo.trace.Record`.
"""

from __future__ import annotations

from dbo.trace.kind import NUMBER, Kind, attr, maybe

BOTH = ("sim", "gpu")

# -- a step ------------------------------------------------------------------------------------------------------------

CONFIG = Kind(
    "config",
    on="host",
    worlds=BOTH,
    when="once per rank, at its start",
    attrs={"config": attr(dict, "the rank's effective configuration")},
)
STEP_BEGIN = Kind(
    "step.begin",
    on="host",
    worlds=BOTH,
    when="a rank begins an engine step",
    attrs={"tokens": attr(int, "tokens scheduled on this rank"), "requests": attr(int, "requests scheduled")},
)
DECIDE = Kind(
    "decide",
    on="host",
    worlds=BOTH,
    when="a rank has coordinated a step",
    attrs={
        "column": attr(dict, "what this rank contributed"),
        "table": attr(list, "int32 [rows, ranks], what it saw"),
        "decision": attr(dict, "what it decided"),
    },
)
SLICES = Kind(
    "slices",
    on="host",
    worlds=BOTH,
    when="a step's batch is cut in ubatches",
    attrs={"parent": attr(dict, "the batch plan, integers"), "ubatches": attr(list, "a plan per ubatch")},
)
STEP_END = Kind(
    "step.end",
    on="host",
    worlds=BOTH,
    when="a rank's step is over, also after an error",
    attrs={
        "status": attr(str, '"ok", "error" or "idle"'),
        "error": attr(str, "the error's type, or empty"),
        "rows": attr(int, "rows of logits that came out"),
        "expected_rows": attr(int, "rows that the batch asks for"),
        "live_threads": attr(int, "ubatch threads that are still busy"),
    },
)
ERROR = Kind(
    "error",
    on="host",
    when="something was raised on this line",
    attrs={"type": attr(str, "the exception's class"), "message": attr(str, "its text")},
)
RECOVER = Kind(
    "recover",
    on="host",
    when="after a failed step, when this rank's devices have run dry",
    attrs={"epoch": attr(int, "the epoch of communicators that begins")},
)

# -- the ring ----------------------------------------------------------------------------------------------------------

UBATCH_ENTER = Kind("ubatch.enter", on="host", worlds=BOTH, when="a context holds the baton for the first time")
UBATCH_EXIT = Kind(
    "ubatch.exit",
    on="host",
    worlds=BOTH,
    when="a context has left the ring",
    attrs={
        "yields": attr(int, "how often it yielded"),
        "declared_yields": attr(int, "how often its schedule says that it does"),
        "played_yields": attr(int, "yields of the schedule that it has passed"),
        "error": attr(str, "the type of the error that ended it, or empty"),
        "hook_pending": attr(bool, "a receive hook was still registered on it"),
    },
)
YIELD = Kind(
    "yield",
    on="host",
    worlds=BOTH,
    when="a context passes the baton on",
    attrs={"to": attr(int, "the ubatch that comes next"), "index": attr(int, "which of its yields, from 0")},
)
RESUME = Kind(
    "resume",
    on="host",
    worlds=BOTH,
    when="the baton has come back",
    attrs={"index": attr(int, "which of its yields, from 0")},
)
BARRIER = Kind(
    "barrier",
    on="host",
    worlds=BOTH,
    when="one party arrives at a barrier of host lines",
    attrs={"name": attr(str, "the barrier's name")},
)
JOIN = Kind("join", on="host", worlds=BOTH, when="the step's starter has waited for all ubatch lines")
HOOK_REGISTER = Kind(
    "hook.register",
    on="host",
    worlds=BOTH,
    when="a receive hook is stored on the next context",
    attrs={
        "hook": attr(int, "its number, unique in the rank"),
        "owner": attr(int, "the ubatch whose receive it completes"),
        "holder": attr(int, "the ubatch that has to run it"),
    },
)
HOOK_RUN = Kind(
    "hook.run",
    on="host",
    worlds=BOTH,
    when="a receive hook is run",
    attrs={
        "hook": attr(int, "its number"),
        "owner": attr(int, "the ubatch whose receive it completes"),
        "runner": attr(int, "the ubatch that runs it"),
    },
)
HOOK_DROP = Kind(
    "hook.drop",
    on="host",
    when="a pending receive hook is dropped while an error unwinds the ring",
    attrs={"hook": attr(int, "its number"), "owner": attr(int, "the ubatch whose receive it was")},
)
POINT = Kind("point", on="host", when="a host line reaches a point of a layer; worlds that see every launch write none")
HOST_WAIT = Kind(
    "host.wait",
    on="host",
    worlds=("sim",),
    when="a host line has waited for a stream",
    attrs={
        "why": attr(str, "what it waited for"),
        "declared": attr(bool, "the program says that it waits here; otherwise it is a forced drain"),
        "gil": maybe(str, '"held" or "released" while it waited'),
        "since_us": maybe(NUMBER, "when the wait began"),
    },
)
CHOICE = Kind(
    "choice",
    on="host",
    worlds=("sim",),
    when="the simulator gave an answer that another schedule may give otherwise: a query, or who takes a baton",
    attrs={
        "what": attr(str, "what was open, in words"),
        "unless": maybe(int, "the record that closes it where it is ordered before this one; -1: none does"),
    },
)

# -- streams -----------------------------------------------------------------------------------------------------------

_SMS = {
    "sms": maybe(int, "SMs that the kernel needs all at once"),
    "holds_until_peers": maybe(bool, "it keeps them until its peers run, too"),
}
_TAGS = {"tags": maybe(dict, "by byte range, whose data it is")}

OP = Kind(
    "op",
    on="device",
    when="a device operation has run; gpu: a span of them at one point",
    attrs={
        **_SMS,
        **_TAGS,
        "expects": maybe(dict, "whose data it has to find, by buffer"),
        "rows": maybe(int, "rows that it dispatches"),
        "real": maybe(int, "real rows among them"),
        "group": maybe(str, "of the exchange that it belongs to"),
        "index": maybe(int, "of that exchange"),
    },
)
RECORD = Kind(
    "record",
    on="device",
    worlds=BOTH,
    when="a stream comes to the place where an event was recorded",
    attrs={"event": attr(str, "the event's name")},
)
WAIT = Kind(
    "wait",
    on="device",
    worlds=BOTH,
    when="a stream has waited for an event",
    attrs={"event": attr(str, "the event's name")},
)
FREE = Kind(
    "free",
    on="device",
    when="a storage that several streams used ends; it counts as a write of all of it on its home stream",
    attrs={"buffer": attr(int, "its number")},
)

# -- exchanges ---------------------------------------------------------------------------------------------------------

COLLECTIVE = Kind(
    "collective",
    on="device",
    worlds=BOTH,
    when="one member comes to a collective; host-level ones lie on host lines",
    attrs={
        **_SMS,
        "group": attr(str, "the communicator"),
        "index": attr(int, "the member's count of calls on it"),
        "op": attr(str, "the operation"),
        "shape": attr(list, "of its rows, as far as members must agree"),
        "dtype": attr(str, "of its elements"),
        "tag": attr((int, list), "the step, or [step, layer, ubatch, point]"),
        "ranks": attr((int, list), "how many members, or which ranks"),
        "epoch": maybe(int, "restarts of communicators before it"),
        "sends": maybe(list, "rows to each peer"),
        "receives": maybe(list, "rows from each peer"),
    },
)
MEET = Kind(
    "meet",
    on="end",
    worlds=BOTH,
    when="all members of an exchange have come; rank -1, ordered by `after` alone",
    attrs={
        "group": attr(str, "the communicator"),
        "index": attr(int, "of the exchange"),
        "members": maybe(list, "ranks, where they are not all"),
    },
)
EXCHANGE = Kind(
    "exchange",
    on="device",
    worlds=BOTH,
    when="the bytes of a device-level exchange move",
    attrs={
        **_SMS,
        **_TAGS,
        "op": attr(str, "the operation, or dispatch or combine"),
        "group": maybe(str, "the communicator"),
        "index": maybe(int, "of the exchange"),
        "rows": maybe(int, "rows that it dispatches"),
        "real": maybe(int, "real rows among them"),
        "epoch": maybe(int, "restarts of communicators before it"),
    },
)
SEND = Kind(
    "send",
    on="device",
    when="the send half of an exchange that has halves",
    attrs={
        **_SMS,
        **_TAGS,
        "call": attr(int, "the rank's count of calls"),
        "buffer": attr(int, "which receive buffer it uses"),
        "op": attr(str, "dispatch or combine"),
        "rows": maybe(int, "rows that it sends"),
        "real": maybe(int, "real rows among them"),
        "group": maybe(str, "the group of peers"),
        "index": maybe(int, "of the exchange"),
    },
)
RECV = Kind(
    "recv",
    on="device",
    when="the receive half of an exchange that has halves",
    attrs={
        **_TAGS,
        "call": attr(int, "the rank's count of calls"),
        "buffer": attr(int, "which receive buffer it uses"),
        "op": attr(str, "dispatch or combine"),
    },
)
TRANSFER = Kind(
    "transfer",
    on="device",
    when='bytes are under way on line "net"',
    attrs={
        **_SMS,
        **_TAGS,
        "op": attr(str, "dispatch, combine or the copy's name"),
        "call": maybe((int, str), "of the send that they belong to"),
        "dst": maybe((int, str), "the receiving rank"),
        "group": maybe(str, "the group of peers"),
        "index": maybe(int, "of the exchange"),
    },
)

# -- graphs and memory -------------------------------------------------------------------------------------------------

CAPTURE_BEGIN = Kind(
    "capture.begin", on="host", when="a graph's capture is opened", attrs={"graph": attr(str, "its name")}
)
CAPTURE_END = Kind(
    "capture.end",
    on="host",
    when="a graph's capture is closed",
    attrs={"graph": attr(str, "its name"), "calls": attr(int, "calls that it holds")},
)
REPLAY = Kind(
    "replay",
    on="host",
    when="a graph is launched",
    attrs={
        "graph": attr(str, "its name"),
        "calls": attr(int, "calls that it holds"),
        "baked": maybe(dict, "values as captured, by name"),
        "live": maybe(dict, "the same values as they have to be now"),
    },
)
GRAPH_PUT = Kind(
    "graph.put",
    on="host",
    when="a graph is stored under a key",
    attrs={"key": attr(dict, "what chose it"), "program": maybe(dict, "what is launched, whatever the key says")},
)
GRAPH_GET = Kind(
    "graph.get",
    on="host",
    when="a graph is looked for",
    attrs={"key": attr(dict, "what chose it"), "program": maybe(dict, "what is launched, whatever the key says")},
)
BAKE = Kind(
    "bake",
    on="host",
    when="a graph captures memory that it borrows from a workspace slot",
    attrs={
        "graph": attr((str, dict), "its name or key"),
        "slot": attr(str, "the slot"),
        "generation": attr(int, "of the slot's memory"),
        "what": maybe(str, "the workspace"),
    },
)
UNBAKE = Kind(
    "unbake",
    on="host",
    when="a buffer that live graphs captured is freed",
    attrs={"buffer": attr(int, "its number"), "graphs": attr(list, "names of these graphs")},
)
RESERVE = Kind(
    "reserve",
    on="host",
    worlds=BOTH,
    when="memory or rows are reserved",
    attrs={
        "what": attr(str, "of what"),
        "slot": attr(str, "whose"),
        "size": attr((int, list), "rows or bytes; a list is alive together"),
        "generation": maybe(int, "of growable memory"),
    },
)
USE = Kind(
    "use",
    on="host",
    worlds=BOTH,
    when="reserved memory or rows are used",
    attrs={
        "what": attr(str, "of what"),
        "slot": attr(str, "whose"),
        "size": attr((int, list), "rows or bytes; a list is alive together"),
        "generation": maybe(int, "of growable memory"),
    },
)
LOCK = Kind(
    "lock",
    on="host",
    when="no reservation grows from here on",
    attrs={"what": attr(str, "of what"), "slot": maybe(str, "whose")},
)

# -- at the end --------------------------------------------------------------------------------------------------------

NUMERIC = Kind(
    "numeric",
    on="end",
    when="a result was compared with its reference",
    attrs={
        "error": attr(NUMBER, "how far it is off"),
        "limit": attr(NUMBER, "how far it may be off"),
        "reference": attr(str, "what it was compared with"),
        "varied": maybe(str, '"padding" when only what padding rows hold differed'),
    },
)
BLOCKED = Kind(
    "blocked",
    on="end",
    when="a line can never go on: the run ended in a deadlock",
    attrs={"waits_for": attr(dict, "fields of dbo.check.waitfor.Waiter")},
)

KINDS: dict[str, Kind] = {str(value): value for value in list(globals().values()) if isinstance(value, Kind)}
"""Every kind, by its name."""

WITH_BYTES = (OP, EXCHANGE, SEND, RECV, TRANSFER, FREE)
"""Kinds whose records name the bytes that they read and write."""

KERNELS = (OP, COLLECTIVE, EXCHANGE, SEND, TRANSFER)
"""Kinds whose records may take SMs."""
