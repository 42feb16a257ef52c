"""A small configuration of each family of models, without dropout, and of some that are in no table; rows for them."""

import numpy as np
import pytest
import torch

import bertdata
from bertrain import methods, optim
from bertrain.data import micro_batches
from bertrain.lab.distillation.taps import READABLE
from bertrain.models.families import FAMILIES, PRESETS
from bertrain.models.load import new_model
from bertrain.objectives import OBJECTIVES
from support.data import SPECIAL

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 80,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 80}
XLM = {"emb_dim": 32, "n_layers": 2, "n_heads": 2} | DROPOUT
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
DEBERTA_2 = {"position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True}
NARROW = "electra", "albert", "roformer", "mobilebert", "convbert"  # with embeddings of fewer features
WINDOW = {"sliding_window": 3, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
DECODER = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
LISTED = dict.fromkeys(FAMILIES, SIZES) | dict.fromkeys(NARROW, SIZES | {"embedding_size": 16})
LISTED |= {name: DECODER for name, family in FAMILIES.items() if family.decoder}
LISTED |= {
    "gemma3_text": DECODER | WINDOW | {"final_logit_softcapping": 30.0},
    "mistral": DECODER | {"sliding_window": 3},
    "modernbert": SIZES | {"local_attention": 8, "global_attn_every_n_layers": 2},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48} | DROPOUT,
    "eurobert": SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2},
    "ultrabert": SIZES | {"num_key_value_heads": 2, "sliding_window": 3},
    "esm": SIZES | {"position_embedding_type": "rotary", "token_dropout": True, "emb_layer_norm_before": False},
    "rembert": SIZES | {"input_embedding_size": 16, "output_embedding_size": 24},
    "deberta": SIZES | DEBERTA,
    "deberta-v2": SIZES | DEBERTA | DEBERTA_2 | {"position_biased_input": False, "type_vocab_size": 0},
    "mobilebert": LISTED["mobilebert"] | {"intra_bottleneck_size": 16},
    "nystromformer": SIZES | {"conv_kernel_size": 1},
    "squeezebert": SIZES | {"embedding_size": 32, "q_groups": 2, "k_groups": 2, "v_groups": 2},
    "flaubert": XLM,
    "xlm": XLM,
}
DECODERS = [name for name, family in FAMILIES.items() if family.decoder]
VARIANTS = {  # what a configuration can change in how a family predicts; the name of the family comes first
    "bert untied": SIZES | {"tie_word_embeddings": False},
    "roberta untied": SIZES | {"tie_word_embeddings": False},
    "electra as wide": SIZES | {"embedding_size": 32},
    "albert in two groups": SIZES | {"embedding_size": 16, "num_hidden_groups": 2},
    "deberta-v2 with a new head": SIZES | DEBERTA | {"legacy": False},
    "deberta-v2 with a convolution": SIZES | DEBERTA | {"conv_kernel_size": 3, "conv_act": "gelu"},
    "esm with positions": SIZES | {"position_embedding_type": "absolute", "token_dropout": False},
    "distilbert with sines": LISTED["distilbert"] | {"sinusoidal_pos_embds": True},
    "eurobert with as many keys": SIZES | {"num_key_value_heads": 2},
    "mobilebert without trigrams": LISTED["mobilebert"] | {"trigram_input": False},
    "modernbert with biases": SIZES | {"attention_bias": True, "mlp_bias": True, "decoder_bias": False},
    "deberta with one kind": SIZES | {"relative_attention": True, "pos_att_type": ["c2p"]},
    "llama tied": DECODER | {"tie_word_embeddings": True},
    "qwen2 with a window": DECODER | WINDOW,
    "qwen3 with a window": DECODER | WINDOW,
    "phi3 with a window": DECODER | {"sliding_window": 3},
    "gemma3_text without is_causal": LISTED["gemma3_text"] | {"use_bidirectional_attention": True, "sliding_window": 6},
    "deberta-v2 in base size": SIZES | DEBERTA | {"max_position_embeddings": 512, "position_buckets": 24},
}
EVERY = LISTED | {
    "longformer": SIZES | {"attention_window": 8},
    "luke": SIZES | {"entity_vocab_size": 10, "entity_emb_size": 8},
    "ibert": SIZES,
    "roc_bert": SIZES | {"shape_vocab_size": 9, "pronunciation_vocab_size": 9},
    "layoutlm": SIZES,
    "big_bird": SIZES | {"attention_type": "original_full"},
}
LONGFORMER = {"model_type": "longformer"} | EVERY["longformer"]
FAST = ["bert", "modernbert", "deberta-v2", "xlm", "longformer"]
"""So different that they stand for all where time is short; the last is in no table."""
LENGTHS = [13, 11, 8]  # of three documents in a row of 32
TABLES = (OBJECTIVES, optim.OPTIMIZERS, optim.SCHEDULES, FAMILIES, PRESETS, READABLE, methods.METHODS)
"""Where a program adds entries of its own."""


def fast(names, *more, among=FAST):
    """Parameters of a test: those of `names` that are not among the fast ones, or `more`, are slow."""
    return [name if name in (*among, *more) else pytest.param(name, marks=pytest.mark.slow) for name in names]


def model_of(config, dataset=None, **options):
    """The model of a configuration file, with random weights, for rows of 32 tokens of a dataset, or of SPECIAL."""
    special = SPECIAL if dataset is None else dataset.special_tokens
    return new_model(config, special, **{"length": 32, "seed": 0} | options)[0]


def pieces_of(batch, *, size=1 << 20, count=1, device="cpu", flat=False):
    """The micro-batches of a batch on a device; all rows are in the first unless a size is given."""
    return [*micro_batches(batch, size=size, count=count, device=torch.device(device), flat=flat)]


def four_rows(dataset, first=0, *, device="cpu", **options):
    """A batch of four rows of 32 tokens, and it as a micro-batch on a device. options: of the Loader."""
    batch = bertdata.Loader(dataset, length=32, **options).read(np.arange(first, first + 4))
    return batch, pieces_of(batch, device=device)[0]


def packed_rows():
    """Two rows of three documents each, with no, few or many masks: ids and positions, int64 [2, 32]."""
    ids = torch.randint(5, 80, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    ids[0, [14, 20, 24, 25, 26, 27, 28]] = ids[1, :4] = SPECIAL.mask
    return ids, torch.cat([torch.arange(n) for n in LENGTHS]).expand(2, -1)


@torch.no_grad()
def hidden_one_by_one(weights, ids):
    """The hidden states of packed rows, each document computed alone."""
    return torch.cat([weights.base_model(input_ids=part).last_hidden_state for part in ids.split(LENGTHS, 1)], 1)


def assert_isolated(encode, ids):
    """Of packed rows, of which `encode` makes vectors: a document that is another changes its own, to the bit."""
    before = encode(ids)
    for end, length in zip(np.cumsum(LENGTHS), LENGTHS, strict=True):
        its_own = slice(end - length, end)
        changed = ids.clone()
        changed[:, its_own] = (ids[:, its_own] + 7) % 70 + 5
        same = (before == encode(changed)).all(-1)
        assert not same[:, its_own].any()
        same[:, its_own] = True
        assert same.all()
