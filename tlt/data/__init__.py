"""Loading and augmentation."""
