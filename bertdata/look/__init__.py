"""What people look at: facts, samples, speed."""
