"""Many devices: step time against ranks, measured and predicted."""
