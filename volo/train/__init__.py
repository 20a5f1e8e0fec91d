"""The training step and its parts: data, model, criterion, optimizer, schedule, precision, compilation, loop."""
