"""What every command needs while it runs, and knows no model: ranks, tensors of a batch, clock, signals, trackers."""
