"""Packed documents do not see each other; and the silent traps of transformers it is built around are still there."""

import copy

import numpy as np
import pytest
import torch
from training import learner
from transformers import BertConfig, BertForMaskedLM, ModernBertConfig, ModernBertForMaskedLM

from bertdata import Loader
from bertrain import feed

CPU = torch.device("cpu")
SIZES = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
         "intermediate_size": 48, "max_position_embeddings": 64}  # fmt: skip
LENGTHS = [17, 12, 11]  # of three documents in a row of 40


def make(kind):
    torch.manual_seed(0)
    if kind == "bert":
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertForMaskedLM(BertConfig(**SIZES, **none)).eval()
    special = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": None, "eos_token_id": None}
    return ModernBertForMaskedLM(
        ModernBertConfig(**SIZES, **special, local_attention=8, global_attn_every_n_layers=3)
    ).eval()


def row():
    torch.manual_seed(1)
    ids = torch.randint(5, 300, (1, sum(LENGTHS)))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return ids, positions


def one_by_one(model, ids):
    with torch.no_grad():
        return torch.cat([model.base_model(input_ids=part).last_hidden_state for part in ids.split(LENGTHS, 1)], 1)


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_a_row_of_documents_is_what_they_are_apart(kind):
    model, (ids, positions) = make(kind), row()
    apart = one_by_one(model, ids)
    with torch.no_grad():
        together = learner(model, isolate=True).encode(ids, position_ids=positions)
    torch.testing.assert_close(together, apart, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
@pytest.mark.parametrize("compiled", [False, True])
def test_changing_one_document_changes_no_other(kind, compiled):
    model, (ids, positions) = learner(make(kind), isolate=True), row()
    places = torch.arange(ids.shape[1])[None]
    logits = torch.compile(model.logits, backend="eager", fullgraph=True, dynamic=False) if compiled else model.logits
    with torch.no_grad():
        before = logits(input_ids=ids, masked_positions=places, position_ids=positions)
        for number, (start, length) in enumerate(zip(np.cumsum([0, *LENGTHS]), LENGTHS, strict=False)):
            changed = ids.clone()
            changed[:, start : start + length] = (ids[:, start : start + length] + 7) % 290 + 5
            after = logits(input_ids=changed, masked_positions=places, position_ids=positions)
            same = (before == after).all(-1)[0]
            assert not same[start : start + length].all(), number
            same[start : start + length] = True
            assert same.all(), number


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_batches_of_packed_rows_train_and_are_isolated(dataset, kind):
    """The loss of a packed row is that of its documents one by one; padding adds nothing."""
    batch = next(Loader(dataset, length=40, samples="packed", global_batch_size=4))
    model = learner(make(kind), isolate=True).train()
    piece = next(feed.micro_batches(batch, size=4, count=1, device=CPU))
    loss = model(**piece)["mlm"].sum
    plain, expected = make(kind), 0.0
    labels = batch.labels
    for b in range(4):
        filled = 40 if batch.attention_mask is None else int(batch.attention_mask[b].sum())
        starts = [*np.flatnonzero(batch.position_ids[b, :filled] == 0).tolist(), filled]
        for start, stop in zip(starts, starts[1:], strict=False):
            ids, wanted = (torch.from_numpy(array[b : b + 1, start:stop]) for array in (batch.input_ids, labels))
            logits = plain(input_ids=ids).logits.flatten(0, 1)
            expected += torch.nn.functional.cross_entropy(logits, wanted.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_bounds_for_the_gpu_are_those_of_the_batch(dataset):
    """What CUDA's kernel is given, computed here: of few lengths, bounds that are not needed at the end."""
    batch = next(Loader(dataset, length=40, samples="packed", global_batch_size=4))

    positions = torch.from_numpy(batch.position_ids)
    found = feed.cu_seqlens_of(positions)
    needed = batch.cu_seqlens
    assert found.dtype == torch.int32
    assert found[: needed.size].tolist() == needed.tolist()
    assert (found[needed.size :] == 160).all()
    pieces = needed.size - 1
    assert found.numel() - 1 in [1 << n for n in range(10)]
    assert pieces <= found.numel() - 1 < 2 * pieces


def test_a_piece_that_fills_up_is_one_document(dataset):
    """A rank with fewer rows than another runs a pass of nothing; its bounds fit as well."""
    batch = next(Loader(dataset, length=40, samples="packed", global_batch_size=2))
    *_, filler = feed.micro_batches(batch, size=2, count=2, device=CPU)
    assert feed.cu_seqlens_of(filler["position_ids"]).unique().tolist() == [0, 40]
    loss = learner(make("bert"), isolate=True)(**filler)["mlm"]
    assert (loss.sum.item(), loss.num_correct.item()) == (0.0, 0)


def test_isolation_needs_packed_rows():
    model, (ids, _) = learner(make("bert"), isolate=True), row()
    with pytest.raises(RuntimeError, match="without document_ids"):
        model.model(input_ids=ids)


# ------------------------------------------------------------------------------------------------ traps of transformers


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_position_ids_alone_isolate_nothing(kind):
    """If this fails transformers has learned to pack by position_ids, and isolation.py may be simpler."""
    model, (ids, positions) = make(kind), row()
    with torch.no_grad():
        leaking = model.base_model(input_ids=ids, position_ids=positions).last_hidden_state
    assert (leaking - one_by_one(model, ids)).abs().max() > 1e-4


def test_boolean_masks_are_right_for_sdpa_and_wrong_for_eager_attention():
    ids, positions = row()
    documents = (positions == 0).cumsum(1)
    mask = documents[:, None, :, None] == documents[:, None, None, :]
    errors = {}
    for attention in ("sdpa", "eager"):
        model = make("bert")
        model.set_attn_implementation(attention)
        with torch.no_grad():
            found = model.bert(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state
        errors[attention] = float((found - one_by_one(make("bert"), ids)).abs().max())
    assert errors["sdpa"] < 1e-5
    assert errors["eager"] > 1e-4


def test_old_arguments_of_modernbert_are_ignored():
    """cu_seqlens once isolated documents; now it is taken without a word and does nothing."""
    model, (ids, positions) = make("modernbert"), row()
    bounds = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
    with torch.no_grad():
        found = model.base_model(input_ids=ids, position_ids=positions, cu_seqlens=bounds, max_seqlen=17)
        plain = model.base_model(input_ids=ids, position_ids=positions)
    assert torch.equal(found.last_hidden_state, plain.last_hidden_state)


def test_setting_the_attention_of_a_model_does_not_touch_another_of_the_same_config():
    """_from_config changes the config it is given, so configs are never shared here."""
    config = make("bert").config
    one = BertForMaskedLM._from_config(copy.deepcopy(config), attn_implementation="sdpa")
    learner(one, isolate=True)
    assert one.config._attn_implementation == "bertrain_isolated"
    assert BertForMaskedLM(copy.deepcopy(config)).config._attn_implementation != "bertrain_isolated"


def test_a_module_called_past_its_wrapper_is_not_synchronised():
    """DistributedDataParallel only works through its own forward: so Learner holds encoder, heads and losses."""
    model = learner(make("bert"))
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"model"}
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in model.model.parameters())


def test_bert_ignores_the_number_of_items_in_a_batch():
    """BertForMaskedLM takes num_items_in_batch without a word and divides by its own count: losses are summed here."""
    model, (ids, _) = make("bert"), row()
    labels = torch.where(torch.rand(ids.shape) < 0.3, ids, -100)
    with torch.no_grad():
        one, other = (model(input_ids=ids, labels=labels, **more).loss for more in ({}, {"num_items_in_batch": 1000}))
    assert torch.equal(one, other)
