"""Show a dataset: facts, samples, an HTML page, and the reading speed."""
