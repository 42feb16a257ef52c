"""Packed documents do not see each other; and transformers alone would let them."""

import dataclasses

import numpy as np
import pytest
import torch
from support.families import hidden_one_by_one, model_of, packed_rows
from support.runs import CPU, learner

from bertdata import Loader
from bertrain import data as data_module
from bertrain.data import micro_batches
from bertrain.models import encoder as encoder_module
from bertrain.models.encoder import cu_seqlens_of

BERT, ESM = (pytest.mark.parametrize("kind", kinds) for kinds in (["bert"], ["esm", "esm with positions"]))


@pytest.fixture
def model(kind, configs, dataset):
    """A model without dropout."""
    return model_of(configs[kind], dataset).eval()


@ESM
@pytest.mark.parametrize("token_dropout", [False, True])
def test_token_dropout_is_that_of_each_document(model, token_dropout):
    """Documents with no, few and many masks. Over the whole row, as in transformers, it would be another."""
    model.base_model.embeddings.token_dropout = token_dropout
    ids, positions = packed_rows()
    ids[0, [14, 20, 24, 25, 26, 27, 28]] = ids[1, :4] = model.config.mask_token_id
    apart = hidden_one_by_one(model, ids)
    with torch.no_grad():
        together = learner(model, isolate=True).encode(ids, position_ids=positions)
        model.base_model.embeddings.token_dropout = False
        without = learner(model, isolate=True).encode(ids, position_ids=positions)
    torch.testing.assert_close(together, apart, rtol=0, atol=2e-6)
    assert ((without - apart).abs().max() > 1e-2) == token_dropout


@BERT
def test_bounds_for_the_gpu_are_those_of_the_batch(model, dataset):
    """What CUDA's kernel is given, computed here: of few lengths, bounds that are not needed at the end.

    A rank with fewer rows than another runs a pass of nothing, which is one document.
    """
    batch = next(Loader(dataset, length=40, samples="packed", global_batch_size=4))
    bounds, needed = cu_seqlens_of(torch.from_numpy(batch.position_ids)), batch.cu_seqlens
    assert bounds.dtype == torch.int32
    assert bounds[: needed.size].tolist() == needed.tolist()
    assert (bounds[needed.size :] == 160).all()
    pieces = needed.size - 1
    assert bounds.numel() - 1 in [1 << n for n in range(10)]
    assert pieces <= bounds.numel() - 1 < 2 * pieces
    *_, filler = micro_batches(batch, size=4, count=2, device=CPU)
    assert cu_seqlens_of(filler["position_ids"]).unique().tolist() == [0, 40]
    loss = learner(model, isolate=True)(**filler)["mlm"]
    assert (loss.sum.item(), loss.num_correct.item()) == (0.0, 0)
    assert Loader(dataset, length=40).read(np.arange(3)).cu_seqlens.tolist() == [0, 40, 80, 120]


@BERT
def test_every_packed_micro_batch_for_a_gpu_has_the_same_tensors(model, dataset, monkeypatch):
    """With padding or without, as each set of names would be a graph of its own. The mask changes no logits."""
    for module in (data_module, encoder_module):
        monkeypatch.setattr(module, "has_kernel", lambda device: True)
    batch = next(Loader(dataset, length=40, samples="packed", global_batch_size=4))
    full = dataclasses.replace(batch, attention_mask=None)
    pieces = [piece for one in (batch, full) for piece in micro_batches(one, size=4, count=2, device=CPU)]
    assert len({tuple(sorted(piece)) for piece in pieces}) == 1
    assert [bool(piece["attention_mask"].all()) for piece in pieces] == [batch.attention_mask is None, True, True, True]
    logits = [learner(model, isolate=True).logits(**piece) for piece in (pieces[0], pieces[2])]
    assert torch.equal(*logits)
