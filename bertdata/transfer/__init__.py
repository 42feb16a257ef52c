"""Datasets that move: from a directory to a URL, and from a URL to a directory or to the cache of this host."""
