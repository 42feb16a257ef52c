"""The inputs of a build → documents. This package is independent of tokenizers."""
