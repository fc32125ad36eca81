"""What the overlap system asks of the world that it runs in."""
