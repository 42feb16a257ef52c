"""Documents → token ids, exactly as the tokenizers library gives them."""
