"""The records of a run for its readers: directory, events, metrics, curves."""
