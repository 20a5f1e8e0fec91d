"""What a run leaves to read: its directory, events, metrics, curves."""
