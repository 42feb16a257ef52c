"""The libraries of bench_tokenize.py, ours among them: each in a process of its own, others in their own environments.

This file is both ends of the pipe. The benchmark imports it for `Other`. The Python of a library's environment runs it
as a script, which needs numpy, the standard library and that library:

    python other_tokenize.py LIBRARY TOKENIZER DOCUMENTS    reads a request as a line of JSON, writes its time as one

The process keeps to one core, because `tokenizers` 1.0 and tokie take all cores, whatever RAYON_NUM_THREADS and
TOKENIZERS_PARALLELISM say. It ends when its standard input is closed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from select import select
from typing import Any

import numpy as np
from environments import LeftOut, command_of, one_core, python_of, short
from numpy.typing import NDArray

ANSWER_S = 300.0  # a library that has not answered by then is left out

# One class for each library: `Name(path)` reads a tokenizer file; `encode` gives ids without special tokens, of
# documents of the type that it encodes fastest; `ids`, which is not timed, makes one array for each document.


class Ours:
    takes = bytes

    def __init__(self, path: str) -> None:
        from bertdata import Tokenizer

        self.tokenizer = Tokenizer.load(path)

    def encode(self, documents: list) -> Any:
        return self.tokenizer.encode_batch(documents)

    def ids(self, found: Any) -> list:
        ids, offsets = found
        return np.split(ids, offsets[1:-1])


class Installed:
    """`tokenizers` 0.x of the environment that runs the benchmark."""

    takes = str

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(path)

    def encode(self, documents: list) -> Any:
        return self.tokenizer.encode_batch_fast(documents, add_special_tokens=False)

    def ids(self, found: Any) -> list:
        return [encoding.ids for encoding in found]


class Tokenizers:
    takes = str

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(path)

    def encode(self, documents: list) -> Any:
        # 0.x does not know these two arguments, and so is not timed under the name of 1.0.
        return self.tokenizer.encode_batch(documents, add_special_tokens=False, padding=None, truncation=None)

    def ids(self, found: Any) -> list:
        return [encoding.ids_array for encoding in found]


class Nanotoken:
    takes = bytes

    def __init__(self, path: str) -> None:
        from nanotoken import Tokenizer

        self.tokenizer = Tokenizer(path)

    def encode(self, documents: list) -> Any:
        return self.tokenizer.encode_batch(documents, add_special_tokens=False, parallel=False)

    def ids(self, found: Any) -> list:
        return [found[row] for row in range(len(found))]


class Tokie:
    takes = str

    def __init__(self, path: str) -> None:
        from tokie import Tokenizer

        self.tokenizer = Tokenizer.from_json(path)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    def encode(self, documents: list) -> Any:
        return self.tokenizer.encode_batch(documents, add_special_tokens=False)

    def ids(self, found: Any) -> list:
        return [encoding.ids for encoding in found]


class Gigatoken:
    takes = bytes

    def __init__(self, path: str) -> None:
        from gigatoken import Tokenizer

        self.tokenizer = Tokenizer(path)

    def encode(self, documents: list) -> Any:
        return self.tokenizer.encode_batch(documents, parallel=False)

    def ids(self, found: Any) -> list:
        return [np.asarray(row) for row in found]


OURS, INSTALLED = "ours", "tokenizers 0.23"
# Names → class, and environment: None for that of the benchmark.
OTHERS = {
    OURS: (Ours, None),
    INSTALLED: (Installed, None),
    "tokenizers 1.0": (Tokenizers, "tokenizers"),
    "gigatoken": (Gigatoken, "gigatoken"),
    "nanotoken": (Nanotoken, "nanotoken"),
    "tokie": (Tokie, "tokie"),
}


class Other:
    """One library in a process of its own, which reads the files `tokenizer` and `documents` (JSON: a list of texts).

    directory: where the environments are. Raises LeftOut if that of the library cannot be made.
    """

    def __init__(self, name: str, directory: Path | None, tokenizer: str, documents: Path) -> None:
        environment = OTHERS[name][1]
        command = [sys.executable, __file__, name, tokenizer, str(documents)]
        if environment:
            assert directory, "a library with an environment needs a directory of environments"
            command = command_of(python_of(environment, directory), "other_tokenize.py", name, tokenizer, documents)
        # In a session of its own: Ctrl-C reaches the benchmark alone, which then ends this process.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def encode(self, *, from_file: bool, ids: Path | None = None) -> float:
        """Return the seconds of encoding all documents.

        from_file: with a tokenizer that is read from its file in this time; else with the one before, which has encoded
        the documents. ids: a .npz file to write. Raises LeftOut if it cannot be done.
        """
        request = {"from_file": from_file, "ids": ids and str(ids)}
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            if not select([self.process.stdout], [], [], ANSWER_S)[0]:
                self.process.kill()
                raise LeftOut(f"no answer after {ANSWER_S:.0f} s")
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise LeftOut(f"its process ended with status {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise LeftOut(short(answer["error"]))
        return answer["seconds"]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def write_documents(path: Path, documents: list[str]) -> None:
    path.write_text(json.dumps(documents), encoding="utf-8")


def read_ids(path: Path) -> list[NDArray[Any]]:
    """Return one array of ids for each document, of what a library wrote."""
    with np.load(path) as found:
        return np.split(found["ids"], np.cumsum(found["lengths"])[:-1])


def work(name: str, tokenizer: str, path: str) -> None:
    """Answer requests. The first error is answered too, and ends the process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # nobody reads the answer: the benchmark was killed
    os.sched_setaffinity(0, one_core())
    make, other = OTHERS[name][0], None
    documents = json.loads(Path(path).read_text(encoding="utf-8"))
    if make.takes is bytes:
        documents = [document.encode() for document in documents]
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["from_file"]:
                other = None  # its memory is free before the next is made
            start = time.perf_counter()
            other = make(tokenizer) if other is None else other
            found = other.encode(documents)
            answer: dict[str, Any] = {"seconds": time.perf_counter() - start}
            if request["ids"]:
                ids = [np.asarray(one, dtype=np.uint32) for one in other.ids(found)]
                np.savez(request["ids"], ids=np.concatenate(ids), lengths=[one.size for one in ids])
            found = None
        except BaseException as error:  # a panic of Rust is no Exception
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        print(json.dumps(answer), file=answers, flush=True)
        if "error" in answer:
            break


if __name__ == "__main__":
    work(*sys.argv[1:])
