"""Measuring which launch serves which row count: timing, search, the on-disk cache, and agreement between ranks."""

from .report import TunedHead, TunedRow, TuningReport

__all__ = ["TunedHead", "TunedRow", "TuningReport"]
