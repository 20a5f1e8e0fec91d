"""Predicts the memory of a training step before a run starts."""
