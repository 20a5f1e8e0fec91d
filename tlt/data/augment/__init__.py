"""Plans the augmentation of each image from (seed, epoch, index), and carries it out on the training device."""
