"""Child processes, workers' entry point, health, and the folders on disk."""
