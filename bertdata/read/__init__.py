"""Read a dataset as masked batches."""
