"""The compiled loops that turn text into ids.

The contract is that of read/kernels/: Python validates the arguments and allocates the arrays, and a kernel never
raises. A kernel that needs help returns a code that says which. Kernels take records of arrays (`Text`,
`WordTables`, ...). tests/ compares every kernel with the `tokenizers` library.

Four words have a special meaning here. A *word* is what the pre-tokenizer passes to the model. A *run* is text whose
ids depend on nothing else: a word as it stands in the text, or for BERT the text between two stops. A *stop* is an
ASCII byte that is not a letter or digit. A *value* is a uint64 that holds up to three ids and their count, so that the
ids of a frequent run are written by one store. The ids take 16 bits each if they are stored as uint16, and 20 bits each
if they are stored as uint32; the count lies above them. A slot of the tables of runs has a second value for up to four
or three ids more. If a run has more ids, its value says where they are in the pool.

Two kernels may run at the same time in two threads. They share only arrays that nobody writes to any more; every array
that changes belongs to one thread (see engine.py).
"""
