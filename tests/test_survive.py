"""Damage to a dataset, and short runs of soak.py and fuzz.py in tools/."""

import json
import random
import shutil
from contextlib import suppress
from itertools import product

import numpy as np
import pytest
from support.commands import python, refuses
from support.data import ROOT, built, faults_of, make_text

import bertdata
from bertdata import BertdataError, Loader, Masking

TOOLS = ROOT / "tools"
READS = [*product(("windows", "documents", "packed", "pairs"), ("exact", "whole_word"))]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["batches", "--minutes", "0.1"], ["build", "--gigabytes", "0.1"]])
def test_memory_stays_below_its_bound(arguments):
    assert json.loads(python(TOOLS / "soak.py", *arguments, timeout=900))["what"] == arguments[0]


def read(path, samples, policy):
    """Reads samples of a kind, or ends in one of our errors."""
    with suppress(BertdataError):
        dataset = bertdata.open(path)
        loader = Loader(dataset, length=16, samples=samples, masking=Masking(policy=policy))
        batch = loader.read(np.arange(min(loader.num_samples, 300)))
        assert 0 <= batch.input_ids.min() <= batch.input_ids.max() < dataset.special_tokens.vocab_size


def test_every_flip_of_some_bytes_is_detected(tmp_path, vocab, cache, request):
    """And every cut, of all arrays and the origins; --every 1 takes all bytes. `make bounds` checks all indices too."""
    every, draw = request.config.getoption("--every"), random.Random(0)
    options = {"words": "support.data:in_pairs", "sentences": "line", "shard_size": 1500, "validation": 0.3}
    path = built(tmp_path, make_text(4), tokenizer=vocab, **options).path
    for file in sorted(each for each in path.rglob("*") if each.is_file()):
        whole, name = file.read_bytes(), file.name.split(".")[0]
        is_array = file.suffix == ".npy" and file.parent == path
        flips = []
        for at in {0, len(whole) - 2, *range(draw.randrange(every), len(whole), every)}:
            flips.append(bytearray(whole))
            flips[-1][at] ^= 1 << draw.randrange(8)
        cuts = [whole[:size] for size in range(0, len(whole), every * (1 if is_array else 7))]
        for changed in [*flips, *cuts, whole + b"x", None]:
            file.unlink() if changed is None else file.write_bytes(changed)
            assert any(name in fault for fault in faults_of(path)), (file, changed and len(changed))
            if is_array and (changed is None or len(changed) != len(whole)):
                with refuses("damaged", says=str(file)):
                    bertdata.open(path)
            elif is_array:
                shutil.rmtree(cache, ignore_errors=True)
                read(path, *draw.choice(READS))
        file.write_bytes(whole)
    assert faults_of(path) == []


@pytest.mark.slow
def test_no_changed_file_of_others_is_a_traceback(tmp_path):
    output = python(TOOLS / "fuzz.py", "--count", 1000, "--seed", 1, "--keep", tmp_path, timeout=900)
    counts = {line[:16].strip(): json.loads(line[16:]) for line in output.splitlines()}
    assert (counts["all"]["inputs"], counts["all"]["faults"]) == (1000, 0)
    unused = {kind for kind, each in counts.items() if not each["used"]}
    assert unused <= {"megatron.idx"}  # one change of a hundred leaves its numbers consistent
    assert not any(tmp_path.iterdir())
