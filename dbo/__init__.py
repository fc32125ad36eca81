"""Dual Batch Overlap: the overlap system, written once against `dbo.contract.world`. Loads neither torch nor hypothesis."""

__version__ = "0.1.0"
