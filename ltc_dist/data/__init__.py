"""Batches on their way from a DataLoader to the device."""
