"""What the device does: steps, inference, attention, the loss."""
