"""Checkpoints: a run's state, its files, finding the one to resume, and loading weights for another run."""
