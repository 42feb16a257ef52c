"""The commands other than `pretrain`, and what several of them need. `bertrain` lists them."""
