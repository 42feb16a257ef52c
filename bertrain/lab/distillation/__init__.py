"""Learning from a teacher, which answers from a cache or while the student trains."""
