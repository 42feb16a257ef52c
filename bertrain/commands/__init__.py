"""The commands beside `pretrain`; each file is one, or what several need. `bertrain` lists them."""
