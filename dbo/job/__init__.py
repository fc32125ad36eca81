"""The main job: its request, the run of each rank, the reference, the report."""
