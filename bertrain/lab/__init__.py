"""Methods and applications, built on what the trainer documents as public. No file of the trainer imports from here."""
