"""The commands except `pretrain`, and modules that several of them use. `bertrain` lists them."""
