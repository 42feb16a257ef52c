"""bertrain: a lean data-parallel loop that trains BERT-style encoders on bertdata's batches.

torchrun --nproc-per-node 2 -m bertrain.pretrain --data shards/ --out run/
python -m bertrain.evaluate --checkpoint run/ --data shards/
"""
