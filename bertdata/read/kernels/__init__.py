"""The compiled loops of the read path.

Python checks the arguments and allocates the arrays. A kernel only loops, and never raises. It checks each index from a
file, and its return value reports damage. Keys are uint64, with arithmetic modulo 2**64. docs/determinism.md defines
the keys, and tests/reference/ has a slow, plain implementation of each kernel.

A NamedTuple groups related arguments. It is passed as a plain tuple, which halves the time to start a kernel, and
becomes a NamedTuple again in the kernel. A structured dtype (SPAN, PAIR) is a row of a table with named columns.

Letters in shapes: B rows, T tokens of a row, K targets of a row, V ids of the vocabulary, S sources of a mix. Several
datasets can fill rows of one batch. So kernels that lay out rows take `which`, int64 [n]: the rows to write. They read
only these rows of their other arguments.
"""
