"""The compiled loops that turn text into ids.

The contract is the same as in read/kernels/: Python validates the arguments and allocates the arrays, and a kernel
never raises. A kernel that needs help returns a code for the kind of help. Arguments are records of arrays (`Text`,
`WordTables`, ...). tests/ compares every kernel with the `tokenizers` library.

Four words have a special meaning here. A *word* is a unit that the pre-tokenizer passes to the model. A *run* is text
whose ids do not depend on its context: a raw word or, for BERT, the text between two stops. A *stop* is an ASCII byte
that is not a letter or digit. A *value* is a uint64 that holds up to three ids and their count, so that one store
writes the ids of a frequent run. Ids stored as uint16 have 16 bits each, ids stored as uint32 have 20 bits each; the
count is in the bits above. A slot of the tables of runs has a second value for up to four (uint16) or three more ids.
If a run has more ids, its value is their index in the pool.

Kernels may run in several threads at the same time. They share only arrays that no longer change; every array that
changes belongs to one thread (see engine.py).
"""
