"""The files of a dataset: arrays, records, shards, manifest. Writers and readers of datasets share this package."""
