"""What fits: the memory of a step, predicted before the first one."""
