"""The step and what it is made of: data, model, criterion, optimizer, schedule, precision, compilation, loop."""
