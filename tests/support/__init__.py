"""What tests share: builders, commands, and fakes of the store, the disk and a GPU."""
