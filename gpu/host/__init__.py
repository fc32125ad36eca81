"""Host tasks of one rank: batons, barriers and workers on threads or greenlets."""
