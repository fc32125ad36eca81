"""What ranks say of themselves in shared memory, and the process that reads it."""
