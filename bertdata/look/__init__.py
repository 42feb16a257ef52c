"""What inspect, show and bench print: facts, samples, speed."""
