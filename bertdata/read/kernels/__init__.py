"""The compiled loops of the read path.

Python checks the arguments and allocates the arrays; a kernel only loops, and never raises. What a kernel reads from a
file is checked against the array that it points into, and damage is reported through the return value. Keys are uint64,
and their arithmetic is modulo 2**64; docs/determinism.md defines it, and tests/reference/ holds a slow, plain
reference implementation of each kernel.

Kernels take their arguments as records. A NamedTuple groups arrays and numbers that belong together; it is passed as a
plain tuple, which takes half the time to start a kernel, and the kernel names its members again. A structured dtype
(SPAN, PAIR) is a row of a table with named columns.

Letters in shapes: B rows, T places of a row, K slots for masked places, V ids of the vocabulary, S sources of a mix.
Several datasets can fill rows of one batch. So kernels that lay out rows take `which`, int64 [n]: the rows that they
write, and whose entries they read of the other arrays.
"""
