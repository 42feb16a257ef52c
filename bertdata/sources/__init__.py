"""Named inputs → documents. Nothing here knows a tokenizer."""
