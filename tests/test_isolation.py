"""What a GPU gets of packed documents: bounds of each, and micro-batches of the same tensors."""

import dataclasses

import numpy as np
import pytest
import torch
from support.families import four_rows, model_of, pieces_of
from support.runs import learner
from torch.nn.functional import cross_entropy

from bertdata import Loader
from bertrain import data as data_module
from bertrain.models import encoder as encoder_module
from bertrain.models.encoder import cu_seqlens_of


@pytest.mark.parametrize("kind", ["bert", "modernbert", "esm"])
def test_the_loss_of_packed_rows_is_that_of_their_documents(configs, dataset, kind):
    """Padding is one of them, and adds nothing."""
    batch, weights = next(Loader(dataset, length=40, samples="packed")), model_of(configs[kind], dataset).eval()
    assert batch.attention_mask is not None
    lengths = np.diff(batch.cu_seqlens).tolist()
    ids, labels = (torch.from_numpy(each).flatten().split(lengths) for each in (batch.input_ids, batch.labels))
    with torch.no_grad():
        for weight in weights.parameters():
            weight.mul_(3)  # so that all attend less evenly
        logits = torch.cat([weights(input_ids=each[None]).logits[0] for each in ids])
        (piece,) = pieces_of(batch)
        loss = learner(weights, isolate=True)(**piece)["mlm"].sum
    torch.testing.assert_close(loss, cross_entropy(logits, torch.cat(labels), reduction="sum"))


def test_attention_is_dropped_in_packed_rows_too(configs, dataset):
    model = model_of(configs["bert"], dataset).train()
    _, piece = four_rows(dataset, samples="packed")
    loss = learner(model, isolate=True)(**piece)["mlm"].sum
    for layer in model.bert.encoder.layer:
        layer.attention.self.dropout.p = 0.5
    assert learner(model, isolate=True)(**piece)["mlm"].sum != loss


def test_bounds_for_the_gpu_are_those_of_the_batch(configs, dataset):
    """What CUDA's kernel is given, computed here: of few lengths, bounds that are not needed at the end.

    A rank with fewer rows than another runs a pass of nothing, which is one document.
    """
    batch = next(Loader(dataset, length=40, samples="packed", global_batch_size=4))
    bounds, needed = cu_seqlens_of(torch.from_numpy(batch.position_ids)), batch.cu_seqlens
    assert bounds.dtype == torch.int32
    longer = 1 << (needed.size - 2).bit_length()
    assert bounds.tolist() == needed.tolist() + [160] * (longer + 1 - needed.size)
    *_, filler = pieces_of(batch, size=4, count=2)
    assert cu_seqlens_of(filler["position_ids"]).unique().tolist() == [0, 40]
    loss = learner(model_of(configs["bert"], dataset), isolate=True)(**filler)["mlm"]
    assert (loss.sum.item(), loss.num_correct.item()) == (0.0, 0)
    assert Loader(dataset, length=40).read(np.arange(3)).cu_seqlens.tolist() == [0, 40, 80, 120]


def test_every_packed_micro_batch_for_a_gpu_has_the_same_tensors(configs, dataset, monkeypatch):
    """With padding or without, as each set of names would be a graph of its own. The mask changes no logits."""
    for module in (data_module, encoder_module):
        monkeypatch.setattr(module, "has_kernel", lambda device: True)
    batch = next(Loader(dataset, length=40, samples="packed", global_batch_size=4))
    full = dataclasses.replace(batch, attention_mask=None)
    pieces = [piece for one in (batch, full) for piece in pieces_of(one, size=4, count=2)]
    assert len({tuple(sorted(piece)) for piece in pieces}) == 1
    assert [bool(piece["attention_mask"].all()) for piece in pieces] == [batch.attention_mask is None, True, True, True]
    model = learner(model_of(configs["bert"], dataset).eval(), isolate=True)
    logits = [model.logits(**piece) for piece in (pieces[0], pieces[2])]
    assert torch.equal(*logits)
