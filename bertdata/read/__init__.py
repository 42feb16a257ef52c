"""A dataset → masked batches."""
