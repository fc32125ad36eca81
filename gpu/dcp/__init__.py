"""A DCP group of ranks on devices."""
