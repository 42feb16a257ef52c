"""What the tests of the path on GPUs share: models of real sizes without numbers, and attention of GPUs on a CPU."""

import contextlib
import dataclasses
import functools
import traceback

import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import CONFIG_MAPPING, AutoModelForMaskedLM

from bertdata import Loader
from bertrain import data as data_module
from bertrain.config import Config
from bertrain.data import micro_batches
from bertrain.methods import methods_of
from bertrain.models import encoder as encoder_module
from bertrain.models.families import PRESETS, preset
from bertrain.ranks import World
from bertrain.trainer import Trainer
from support.data import SPECIAL
from support.runs import FORKS

GPU = torch.device("cuda", 0)
MODERNBERT_LARGE = {"num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 2624}
DEBERTA = {
    "vocab_size": 128100,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 256,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
ESM = {
    "vocab_size": 33,
    "num_hidden_layers": 30,
    "hidden_size": 640,
    "num_attention_heads": 20,
    "pad_token_id": 1,
    "intermediate_size": 2560,
    "max_position_embeddings": 1026,
    "position_embedding_type": "rotary",
    "token_dropout": True,
    "mask_token_id": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
XLM_ROBERTA = {
    "vocab_size": 250002,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
OTHERS = {
    "modernbert-large": ("modernbert", MODERNBERT_LARGE),
    "xlm-roberta-base": ("xlm-roberta", XLM_ROBERTA),
    "deberta-v3-base": ("deberta-v2", DEBERTA),
    "esm-2": ("esm", ESM),
}
LENGTHS = {
    "bert-base": 512,
    "bert-large": 512,
    "modernbert-base": 1024,
    "modernbert-large": 2048,
    "xlm-roberta-base": 512,
    "deberta-v3-base": 512,
    "esm-2": 1024,
}
"""The models, in their published sizes, and the length of their rows, which is no other size of theirs."""
ROWS = 64  # of a micro-batch
VOCAB_SIZE = 30522


def config_of(name):
    """The configuration of a model in its published size, for no dataset."""
    if name in PRESETS:
        return preset(name, dataclasses.replace(SPECIAL, vocab_size=VOCAB_SIZE), length=LENGTHS[name])
    family, values = OTHERS[name]
    return CONFIG_MAPPING[family](**values)


@contextlib.contextmanager
def fakes(monkeypatch, device):
    """Tensors made in it have a shape, a dtype and a device, and no numbers. The device may be a GPU that is not there.

    A CPU is taken for a GPU where the trainer chooses by it.
    """
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *arguments, **options: True)
    for module in (data_module, encoder_module):
        monkeypatch.setattr(module, "has_kernel", lambda device: True)
    monkeypatch.setattr(torch.nn.Module, "to", moved)
    with FakeTensorMode(), Indexing() if device == GPU else contextlib.nullcontext():
        yield


def moved(module, device):
    """Gives a module of fake tensors others on a device, as torch cannot move them."""
    made = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.device != device:
                    kind = torch.nn.Parameter if isinstance(tensor, torch.nn.Parameter) else lambda other: other
                    tensors[name] = made.setdefault(id(tensor), kind(torch.empty_like(tensor, device=device)))
    return module


INSTEAD = {
    torch.Tensor.contiguous: lambda tensor: tensor.clone(memory_format=torch.contiguous_format),
    torch.Tensor.__invert__: torch.bitwise_not,
}


class Indexing(TorchFunctionMode):
    """Does for fake tensors on a GPU what torch does not do for them without one, as indexing.

    A mask of numbers as an index is an error, as for other fake tensors.
    """

    def __torch_function__(self, function, types, arguments=(), options=None):
        is_there = bool(arguments) and isinstance(arguments[0], torch.Tensor) and arguments[0].device == GPU
        if is_there and function in INSTEAD:
            return INSTEAD[function](*arguments)
        if not is_there or function not in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            return function(*arguments, **(options or {}))
        whole, *others = arguments
        assert all(part.device == GPU for part in tree_leaves(others) if isinstance(part, torch.Tensor))
        part = function(*tree_map_only(torch.Tensor, lambda one: torch.empty(one.shape, dtype=one.dtype), arguments))
        return None if part is None else torch.empty(part.shape, dtype=whole.dtype, device=GPU)


def training_of(name, dataset, device, **options):
    """A model in its published size in training, in bf16, of fake tensors on a device."""
    config = Config.make(
        data=str(dataset.path), out="none", length=LENGTHS[name], precision="bf16", compile="off", **options
    )
    with torch.device("meta"):  # whose weights get no first values
        weights = AutoModelForMaskedLM.from_config(config_of(name))
    return Trainer(config, dataset, World(0, 1, device), methods_of(config), None, weights)


def micro_batch(name, dataset, device, *, packed=False, rows=ROWS):
    """A micro-batch as `feed` gives it to a GPU, as fake tensors on a device."""
    loader = Loader(dataset, length=LENGTHS[name], global_batch_size=rows, samples="packed" if packed else "windows")
    with _disable_current_modes():
        (piece,) = micro_batches(next(loader), size=rows, count=1, device=torch.device("cpu"))
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for name, tensor in piece.items()}


class Squares(TorchDispatchMode):
    """Lists the operations that give a tensor of [..., T, T]."""

    def __init__(self, length):
        super().__init__()
        self.length, self.found = length, []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        given = function(*arguments, **(options or {}))
        for tensor in given if isinstance(given, tuple | list) else (given,):
            if isinstance(tensor, torch.Tensor) and tensor.shape[-2:] == (self.length, self.length):
                self.found.append(function.overloadpacket.__name__)
        return given


# ----------------------------------------------------------------------------------------------- attention of GPUs


def _weights(query, key, scale, window):
    """[n, heads, D] of one document → probabilities [heads, n, n]."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    places = torch.arange(query.shape[0])
    ahead = places[None, :] - places[:, None]
    left, right = (len(places) if side < 0 else side for side in window or (-1, -1))
    return scores.masked_fill((ahead < -left) | (ahead > right), -torch.inf).softmax(-1)


def _check(query, key, value, bounds, longest):
    """What the kernel of GPUs demands of its arguments."""
    assert query.dtype == key.dtype == value.dtype != torch.float32
    assert bounds.dtype == torch.int32
    assert (bounds[0], bounds[-1]) == (0, query.shape[0])
    assert 0 <= bounds.diff().min() <= bounds.diff().max() <= longest


def _documents(bounds):
    places = [int(place) for place in bounds]
    return [slice(start, stop) for start, stop in zip(places, places[1:], strict=False) if stop > start]


def _wide(*tensors):
    return [tensor if tensor.dtype == torch.float64 else tensor.float() for tensor in tensors]


def forward(query, key, value, bounds, _, longest, __, is_causal, scale, window, *others):
    """torch_attn::_varlen_attn, one document after another. Counts its calls."""
    counters["dry"]["calls"] += 1
    _check(query, key, value, bounds, longest)
    out, lse = torch.empty_like(query), torch.zeros(query.shape[1], query.shape[0])
    for own in _documents(bounds):
        q, k, v = _wide(query[own], key[own], value[own])
        out[own] = torch.einsum("hqk,khd->qhd", _weights(q, k, scale, window), v).to(out.dtype)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


def backward(grad, query, key, value, out, lse, bounds, _, longest, __, is_causal, state, scale, window):
    """torch_attn::_varlen_attn_backward."""
    _check(query, key, value, bounds, longest)
    grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    for own in _documents(bounds):
        d, q, k, v = _wide(grad[own], query[own], key[own], value[own])
        p = _weights(q, k, scale, window)
        dp = torch.einsum("qhd,khd->hqk", d, v)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * factor
        parts = (
            torch.einsum("hqk,khd->qhd", ds, k),
            torch.einsum("hqk,qhd->khd", ds, q),
            torch.einsum("hqk,qhd->khd", p, d),
        )
        for whole, part in zip(grads, parts, strict=True):
            whole[own] = part.to(whole.dtype)
    return tuple(grads)


@functools.cache
def give_cpus_the_kernel():
    """torch's attention for sequences of unequal length runs on CPUs too, from now on in this process."""
    varlen._varlen_attn.register_kernel("cpu", forward)
    varlen._varlen_attn_backward.register_kernel("cpu", backward)


# ------------------------------------------------------------------------------------------------ a process of its own


def apart(function, *arguments, **options):
    """What a function returns in a process of its own, as one that has compiled is not safe to fork."""

    def run():
        counters.clear()
        try:
            there.send((function(*arguments, **options), None))
        except BaseException:
            there.send((None, traceback.format_exc()))

    here, there = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=run, daemon=True)
    process.start()
    there.close()
    found, error = here.recv() if here.poll(300) else (None, "it did not end")
    process.kill()
    process.join()
    assert error is None, error
    return found
