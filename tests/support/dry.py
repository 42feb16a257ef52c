"""What the tests of the path on GPUs share: models of real sizes without numbers, and attention of GPUs on a CPU."""

import contextlib
import functools
from dataclasses import replace
from itertools import pairwise

import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from bertdata import Loader
from bertrain import data as data_module
from bertrain.methods import methods_of
from bertrain.models import encoder as encoder_module
from bertrain.trainer import Trainer
from support.families import model_of, pieces_of
from support.runs import ALONE, FORKS, config_of

GPU = torch.device("cuda", 0)
LENGTH_OF = {
    "bert-base": 512,
    "bert-large": 512,
    "modernbert-base": 1024,
    **dict.fromkeys(("xlm-roberta", "deberta-v2", "esm"), 72),
}
"""Models (presets, or small ones of a family) and their row lengths, which differ from all their other sizes."""
ROWS = 64  # of a micro-batch


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


def training_of(name, configs, dataset, device, **options):
    """A model in training mode, in bf16, of fake tensors on a device. configs: files of models without a preset."""
    options |= {"model": configs.get(name, name), "length": LENGTH_OF[name], "precision": "bf16", "compile": "off"}
    config = config_of(**options)
    with torch.device("meta"):  # whose weights get no first values
        weights = model_of(config.model, dataset, length=config.length)
    return Trainer(config, dataset, replace(ALONE, device=device), methods_of(config), None, weights)


def micro_batch(name, dataset, device, *, packed=False):
    """A micro-batch as `feed` gives it to a GPU, as fake tensors on a device."""
    loader = Loader(dataset, length=LENGTH_OF[name], global_batch_size=ROWS, samples="packed" if packed else "windows")
    with _disable_current_modes():
        (piece,) = pieces_of(next(loader))
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


def attended(query, key, value, bounds, longest, scale, window):
    """Attention of documents, one after another, of [tokens, heads, features], as the kernel of GPUs demands them."""
    assert query.dtype == key.dtype == value.dtype != torch.float32
    assert bounds.dtype == torch.int32
    assert (bounds[0], bounds[-1]) == (0, query.shape[0])
    assert 0 <= bounds.diff().min() <= bounds.diff().max() <= longest
    exact, parts = torch.promote_types(query.dtype, torch.float32), []
    for start, stop in pairwise(map(int, bounds)):
        q, k, v = (each[start:stop].to(exact) for each in (query, key, value))
        places = torch.arange(stop - start)
        ahead = places[None, :] - places[:, None]
        left, right = (len(places) if side < 0 else side for side in window or (-1, -1))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        p = scores.masked_fill((ahead < -left) | (ahead > right), -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", p, v).to(query.dtype))
    return torch.cat(parts)


def forward(query, key, value, bounds, _, longest, __, is_causal, scale, window, *others):
    """torch_attn::_varlen_attn. Counts its calls."""
    counters["dry"]["calls"] += 1
    out = attended(query, key, value, bounds, longest, scale, window)
    return out, torch.zeros(query.shape[1], query.shape[0]), torch.zeros(2, dtype=torch.uint64)


def backward(grad, query, key, value, out, lse, bounds, _, longest, __, is_causal, state, scale, window):
    """torch_attn::_varlen_attn_backward."""
    again = functools.partial(attended, bounds=bounds, longest=longest, scale=scale, window=window)
    return torch.func.vjp(again, query, key, value)[1](grad)


@functools.cache
def give_cpus_the_kernel():
    """torch's attention for sequences of unequal length runs on CPUs too, from now on in this process."""
    varlen._varlen_attn.register_kernel("cpu", forward)
    varlen._varlen_attn_backward.register_kernel("cpu", backward)


def apart(function, *arguments, **options):
    """What a function returns in a process of its own, as one that has compiled is not safe to fork."""
    with FORKS.Pool(1, counters.clear) as pool:
        return pool.apply_async(function, arguments, options).get(300)
