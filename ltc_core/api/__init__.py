"""The verbs of a training script."""
