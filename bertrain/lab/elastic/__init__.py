"""Sub-networks that share the weights of one model: they are trained together, searched, and extracted."""
