"""What feeds the device and what saves its work: images, labels, augmentation, starts, checkpoints."""
