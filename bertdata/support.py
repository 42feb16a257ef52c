"""Names of bertdata for bertrain, in addition to the public ones (docs/extending.md). They may change with bertrain.

The names below TYPE_CHECKING are looked up in their modules on first use, because help must not load numpy.
"""
# ruff: noqa: F401, I001  (bertrain imports them; one statement a line)

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bertdata.choices import MASKING_POLICIES, MOST_ROWS, SHUFFLES, MaskingPolicy
from bertdata.cli import OneSentence, nearest, one_sentence
from bertdata.cli import main as bertdata_main
from bertdata.errors import BuildError, DatasetError, InputError, TokenizerError, UsageError
from bertdata.errors import counted, install, is_out_of_memory
from bertdata.files import TEMPORARY, Stage, fsync_directory, locked, make_directory, naming, write_file, write_page
from bertdata.options import helps
from bertdata.urls import require_local_output

if TYPE_CHECKING:
    from bertdata.format.arrays import HEADER_BYTES, ArrayWriter, array_file, array_path, digest, open_array
    from bertdata.format.origins import Origins
    from bertdata.format.records import FORMAT_VERSION, read_record, sealed_record, write_record
    from bertdata.format.verify import array_faults, verify
    from bertdata.look.page import assemble_page
    from bertdata.read.words import continuing
    from bertdata.sources.inputs import Input, local
    from bertdata.sources.streams import opened
    from bertdata.sources.tables import TABLE_KINDS
    from bertdata.tokenize.spelling import Spelling, spelled
    from bertdata.tokenize.tokenizer import ROLE_SPELLINGS, TOKENIZER, TOKENIZER_CONFIG, LoadedTokenizer
    from bertdata.tokenize.tokenizer import give_same_ids, lacks_template

_LATER = "format.arrays format.records format.origins format.verify look.page read.words sources.inputs "
_LATER += "sources.streams sources.tables tokenize.tokenizer tokenize.spelling"


def __getattr__(name: str) -> Any:
    for home in () if name.startswith("_") else _LATER.split():  # Python looks for __path__
        if hasattr(module := import_module(f"bertdata.{home}"), name):
            return getattr(module, name)
    raise AttributeError(f"module 'bertdata.support' has no attribute {name!r}")


def load_tokenizer(path: str) -> LoadedTokenizer:
    """Load the tokenizer of a directory, a file or a name of the hub. Raises UsageError or TokenizerError."""
    from bertdata.tokenize.load import load

    return load(path)
