"""What is done to an image, planned from (seed, epoch, index), and the stage on the device that does it."""
