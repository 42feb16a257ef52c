"""Show a dataset: facts, samples, a page, the speed of reading."""
