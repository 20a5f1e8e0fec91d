"""Everything between the command line and the model: arguments, optimisation, checkpoints, the training loop."""
