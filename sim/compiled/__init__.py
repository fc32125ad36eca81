"""A schedule's compiled form: built once, replayed for any number of ranks."""
