"""What can be set: the options of a run, how they are declared, and the command line made from them."""
