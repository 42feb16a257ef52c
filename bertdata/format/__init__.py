"""The files of a dataset: arrays, records, shards, manifest. What writes datasets and what reads them meet here."""
