"""The bytes of a dataset: arrays, records, shards, manifest. Both wings meet here."""
