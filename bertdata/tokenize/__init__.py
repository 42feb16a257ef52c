"""Documents → token ids, identical to those of the tokenizers library."""
