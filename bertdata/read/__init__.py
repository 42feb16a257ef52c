"""Reads a dataset as masked batches."""
