"""Learning from a teacher: its answers come from a cache, or are computed while the student trains."""
