"""What a run leaves to go on from: the state, its files, the choice among them, weights for another run."""
