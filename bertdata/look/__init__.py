"""What is shown of a dataset and of a run: facts, samples, texts, pages, speed."""
