"""Traces for other readers: files that Perfetto opens, timelines in text."""
