"""bertrain: a lean data-parallel loop that trains BERT-style encoders on bertdata's batches.

torchrun --nproc-per-node 2 -m bertrain.pretrain --data shards/ --out run/
bertrain evaluate --checkpoint run/ --data shards/

Where torch or transformers is not installed, the import of any module of this package is an ImportError that says what
to install, and a command prints that sentence and nothing else. `bertrain --help` needs neither. Where `bertdata` is
another project's package (the package index has one of that name), the import of this package is such an ImportError.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import bertdata

if "Loader" not in getattr(bertdata, "__all__", ()):
    _place = getattr(bertdata, "__file__", None) or [*bertdata.__path__][0]  # a directory without __init__.py
    _sentence = (
        f"Python imports bertdata from {_place}, which is not the bertdata that bertrain was installed with; "
        "remove it (pip uninstall bertdata, if pip installed it), then install bertrain again"
    )
    _command = sys.orig_argv[1:3]  # of `python …/bin/bertrain` or `python -m bertrain.pretrain`
    if any(Path(word.removeprefix("-m")).name.partition(".")[0] == "bertrain" for word in _command):
        sys.exit(f"error: {_sentence}")
    raise ImportError(_sentence)

from bertdata.errors import install  # noqa: E402  # another bertdata has none


class MissingLibraries(ImportError):
    """torch or transformers is not installed."""


class _Refuse:
    """Comes before the finders of modules, so that `import bertrain.x` fails before x imports what is not there."""

    def __init__(self, missing: list[str]) -> None:
        verb = "are" if len(missing) > 1 else "is"
        self._sentence = f"training needs {' and '.join(missing)}, which {verb} not installed; {install('train')}"

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if not name.startswith("bertrain.") or name == "bertrain.__main__":
            return
        if sys.argv[:1] == ["-m"] and {name, f"-m{name}"} & {*sys.orig_argv}:  # python -m bertrain.x
            sys.exit(f"Error: {self._sentence}")
        raise MissingLibraries(self._sentence)


if _missing := [name for name in ("torch", "transformers") if sys.modules.get(name) is None and not find_spec(name)]:
    sys.meta_path.insert(0, _Refuse(_missing))
