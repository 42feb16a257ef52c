"""What can be set: the options of a run, values that are more than a number, and the command line made from them."""

from bertrain.options.config import Config

__all__ = ["Config"]
