"""Families of masked language models, how to build or load a model, and attention within documents."""
