"""The torch datasets, in the loops they are meant for: DataLoader, Trainer, accelerate, and the examples."""

import json
import pickle
import runpy
import sys
from functools import partial, wraps
from itertools import islice

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.state import AcceleratorState, GradientState, PartialState
from support.commands import refuses
from support.data import ROOT
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining

import bertdata
from bertdata import Loader, Masking
from bertdata.torch import BatchDataset, SampleDataset, tensors

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores, on purpose

OPTIONS = {"length": 24, "global_batch_size": 7, "seed": 3, "epochs": 1}
assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)  # of tensors, and of lists and dicts of them
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def loader_of(dataset, **options):
    return Loader(dataset, **OPTIONS | options)


def expected_of(loader, epoch=0):
    """The batches of an epoch."""
    n = loader.num_samples
    parts = (np.arange(first, min(first + 7, n)) for first in range(0, n, 7))
    return [tensors(loader.read(epoch * n + part)) for part in parts]


def resumed(dataset, state):
    restored = BatchDataset(loader_of(dataset))
    restored.load_state_dict(json.loads(json.dumps(state)))
    return restored


@pytest.mark.parametrize("samples", ["windows", "documents", "pairs"])
def test_tensors_are_what_models_take(dataset, samples):
    batch = next(loader_of(dataset, samples=samples))
    arguments, shapes = tensors(batch), dict.fromkeys(("input_ids", "attention_mask", "labels"), (7, 24))
    if samples == "pairs":
        shapes |= {"token_type_ids": (7, 24), "next_sentence_label": (7,)}
    assert {name: tuple(tensor.shape) for name, tensor in arguments.items()} == shapes
    assert {tensor.dtype for tensor in arguments.values()} == {torch.int64}
    assert_same(arguments["labels"], torch.from_numpy(batch.labels))
    config = BertConfig(vocab_size=dataset.special_tokens.vocab_size, max_position_embeddings=64, **SIZES)
    model = BertForPreTraining(config) if samples == "pairs" else BertForMaskedLM(config)
    assert model(**arguments).loss.isfinite()


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"num_workers": 2, "persistent_workers": True},  # they hear of the next epoch
        pytest.param({"num_workers": 1, "multiprocessing_context": "spawn"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_batches_and_samples_are_the_same_for_any_workers(dataset, options):
    stream, samples = BatchDataset(loader_of(dataset, samples="documents")), SampleDataset(loader_of(dataset))
    assert_same([*DataLoader(stream, batch_size=None, **options)], expected_of(stream.loader))
    batches = DataLoader(samples, batch_size=7, **options)
    for epoch in (0, 3):
        samples.set_epoch(epoch)
        assert_same([*batches], expected_of(samples.loader, epoch))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_from_every_batch(dataset, workers):
    stream, options = BatchDataset(loader_of(dataset)), {"batch_size": None, "num_workers": workers}
    expected = expected_of(stream.loader)
    for count in (1,) if workers else (0, 1, 2, len(expected) - 1, len(expected)):
        taken = iter(DataLoader(stream, **options))
        for _ in range(count):
            next(taken)
        for state in [stream.state_dict(count)] + [stream.state_dict()] * (workers == 0):
            restored = resumed(dataset, state)
            assert resumed(dataset, restored.state_dict()).state_dict() == restored.state_dict()
            assert_same([*islice(DataLoader(restored, **options), 2)], expected[count : count + 2])
            again = resumed(dataset, restored.state_dict(2))  # a state after a state
            assert_same([*DataLoader(again, **options)], expected[count + 2 :])


def test_samples_by_number(dataset):
    samples = SampleDataset(loader_of(dataset), epoch=2)
    assert len(samples) == samples.loader.num_samples
    for one, other in ((0, -len(samples)), (len(samples) - 1, -1)):
        assert_same(samples[one], samples[other])
    row = tensors(samples.loader.read(np.array([2 * len(samples) + 5])))
    assert_same(samples[5], {name: tensor[0] for name, tensor in row.items()})
    for wrong in (len(samples), -len(samples) - 1, 2**40):
        with pytest.raises(IndexError, match=f"sample {wrong} of"):
            samples.__getitems__([0, wrong])  # as DataLoader asks


def test_pickled_datasets_are_small(dataset, tmp_path, monkeypatch):
    """They are also read after a change of directory."""
    monkeypatch.chdir(dataset.path.parent)
    dataset = bertdata.open(dataset.path.name)
    monkeypatch.chdir(tmp_path)
    samples, batches = SampleDataset(loader_of(dataset, samples="documents")), BatchDataset(loader_of(dataset))
    for data, first in ((samples, lambda data: data[3]), (batches, lambda data: next(iter(data)))):
        pickled = pickle.dumps(data)
        assert len(pickled) < 4096
        assert_same(first(pickle.loads(pickled)), first(data))


@pytest.mark.parametrize(("num_processes", "skipped"), [(1, 0), (1, 2), (2, 0), (2, 2)])
@pytest.mark.parametrize("workers", [0, 1])
def test_samples_follow_the_epoch_of_the_sampler_of_accelerate(dataset, num_processes, skipped, workers):
    """It tells the dataset of no epoch where processes share the batches, or where it skips the first ones."""
    samples = SampleDataset(loader_of(dataset))
    batches = DataLoader(samples, 7, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    prepared = prepare_data_loader(batches, num_processes=num_processes, process_index=0, use_seedable_sampler=True)
    expected = {bytes(row) for batch in expected_of(samples.loader, 2) for row in batch["input_ids"].numpy()}
    resumed = skip_first_batches(prepared, skipped) if skipped else prepared
    resumed.set_epoch(2)
    assert {bytes(row) for batch in resumed for row in batch["input_ids"].numpy()} <= expected


@pytest.mark.parametrize("kind", [SampleDataset, BatchDataset])
def test_what_models_do_not_take_is_refused(dataset, kind):
    with refuses("unsupported", "masking"):
        kind(loader_of(dataset, masking=Masking(policy="uniform")))
    packed = loader_of(dataset, samples="packed")
    for read in (kind, lambda loader: tensors(next(loader))):
        with refuses("unsupported", "samples"):
            read(packed)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("name", "last"), [("trainer", "checkpoint-5"), ("accelerate_loop", "step-00000005")])
@pytest.mark.slow
def test_an_example_trains_and_goes_on_with_the_batches_that_follow(dataset, tmp_path, monkeypatch, name, last):
    seen, forward, threads, out = [], BertForMaskedLM.forward, torch.get_num_threads(), tmp_path / "out"

    @wraps(forward)  # a Trainer looks for the names of its arguments
    def remembered(self, *arguments, **named):
        seen.append(named["input_ids"].cpu().clone())
        return forward(self, *arguments, **named)

    monkeypatch.setattr(BertForMaskedLM, "forward", remembered)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for steps in ("3", "5"):
        for kind in (AcceleratorState, GradientState, PartialState):
            kind._reset_state()
        monkeypatch.setattr(sys, "argv", [name, str(dataset.path), str(out), steps])
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        (out / "checkpoint-4").mkdir(exist_ok=True)  # of a Trainer; a kill has left it unfinished
    torch.set_num_threads(threads)
    loader = Loader(dataset, length=64, global_batch_size=32)
    assert_same(seen, [tensors(next(loader))["input_ids"] for _ in range(5)])
    assert (out / last).is_dir()
    if name == "trainer":
        assert json.loads((out / last / "loader.json").read_text())["position"] == 5 * 32
