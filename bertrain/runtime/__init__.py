"""What every command needs while it runs: ranks, checkpoints, the log, rates, warnings."""
