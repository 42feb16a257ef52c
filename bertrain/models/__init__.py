"""Models: families of transformers, how one is built or loaded, and attention that stays inside a document."""
