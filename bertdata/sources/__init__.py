"""The inputs that a user names → documents. Nothing here knows about tokenizers."""
