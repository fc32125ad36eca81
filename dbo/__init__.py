"""Dual Batch Overlap: the system, written once against `dbo.contract`, for every world. `docs/map.md` is the long
form.

Rooms: `config` (options and rules), `contract` (what a world offers), `trace` (what a world writes), `check`
(detectors and verdicts), `schedule` and `presets` (schedules as data), `batch` (a step as integers), `ubatching` (the
ring, the wrapper, graphs), `engine` (requests and steps), `moe` (the layer and its backends), `dcp` (the packed
exchange), `model` (DeepSeek-V2), `job` (the main job), `conformance` (the suite of every world), `export`
(timelines), `bench` (timing), `cli` (the command line).

errors         the one exception tree
pytest_plugin  pytest plugin (entry point `dbo`): the `world` fixture
registry       names of worlds, and the lazy way from a name to the world
"""

__version__ = "0.1.0"
