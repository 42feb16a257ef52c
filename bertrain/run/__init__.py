"""A pre-training run: its phases and batches, its parts, its state, and what it writes down."""
