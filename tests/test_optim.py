import io
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import optim as reference
from support.families import LISTED, fast
from transformers import AutoConfig

from bertrain.models.families import auto_class
from bertrain.optim import adam, muon, optimizers


@pytest.mark.parametrize("seed", range(3))
def test_a_step_of_muon_is_that_of_each_matrix_and_that_of_adamw_for_others(seed):
    torch.manual_seed(seed)
    shapes = [(24, 8, 3), (8, 8, 1), (8, 12, 1), (16, 6, 2), (12, 8, 1), (1, 4, 1)]  # rows, columns, matrices in it
    weights = {torch.nn.Parameter(torch.randn(rows, columns)): parts for rows, columns, parts in shapes}
    bias = torch.nn.Parameter(torch.randn(5))
    plain = torch.nn.Parameter(bias.detach().clone())
    options = {"weight_decay": 0.1, "betas": (0.9, 0.98), "eps": 1e-6, "dtype": torch.float32}
    made = muon.Muon(weights.items(), [{"params": [bias]}], momentum=0.9, rate_scale=3.0, **options)
    adamw = torch.optim.AdamW([plain], lr=0.02, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01)

    def matrices(tensors):
        pairs = zip(tensors, weights.values(), strict=True)
        return [matrix for tensor, parts in pairs for matrix in tensor.detach().clone().chunk(parts)]

    expected = [(matrix.double(), torch.zeros_like(matrix)) for matrix in matrices(weights)]
    for _ in range(3):
        for parameter in (*weights, bias):
            parameter.grad = torch.randn_like(parameter)
        plain.grad = bias.grad.clone()
        expected = [
            reference.muon(matrix, gradient, momentum, rate=0.06, decay=0.1, mean=0.9)
            for (matrix, momentum), gradient in zip(expected, matrices(each.grad for each in weights), strict=True)
        ]
        optimizers.set_learning_rate(made, 0.02)
        made.step()
        adamw.step()
    torch.testing.assert_close(matrices(weights), [matrix.float() for matrix, _ in expected], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bias, plain)


PARTS = {"modernbert": {1, 2, 3}, "phi3": {1, 2}, "squeezebert": set()}  # the layers of the last are convolutions


@pytest.mark.parametrize("name", fast(LISTED, "squeezebert"))
def test_muon_takes_the_matrices_of_layers(name):
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    config = AutoConfig.for_model(name, vocab_size=50, **LISTED[name] | ids)
    model = auto_class(config).from_config(config)
    matrices = muon.hidden_matrices(model)
    assert {parts for _, parts in matrices} == PARTS.get(name, {1})
    assert all(parameter.ndim == 2 and parameter.shape[0] % parts == 0 for parameter, parts in matrices)
    names = {parameter: path for path, parameter in model.named_parameters()}
    for path in (names[parameter] for parameter, _ in matrices):
        assert re.search(r"\.\d+\.", path)  # in the layers, not beside them
        assert not re.search("word_embeddings|head|predictions", path)


SIZED = {adam.StableAdamW: reference.stable, adam.Lamb: reference.lamb}
SHAPES = [(3, 4), (5,), (), (1, 2), (2, 2, 2)]
BETAS = st.sampled_from([0.0, 0.5, 0.9, 0.98, 0.999])


def reloaded(optimizer, groups, options):
    """A new optimizer for the same parameters, with the state of another, as a checkpoint holds it."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    made = type(optimizer)([dict(group) for group in groups], **options)
    made.load_state_dict(torch.load(file, weights_only=True))
    return made


@pytest.mark.parametrize("kind", SIZED)
@given(
    seed=st.integers(0, 2**32),
    decays=st.tuples(st.sampled_from([0.0, 0.01, 0.5]), st.sampled_from([0.0, 0.1])),
    betas=st.tuples(BETAS, BETAS),
    eps=st.sampled_from([1e-8, 1e-6, 1e-2]),
    sizes=st.lists(
        st.lists(st.sampled_from([None, 0.0, 1e-4, 1.0, 1e3]), min_size=len(SHAPES), max_size=len(SHAPES)),
        min_size=1,
        max_size=8,
    ),
    zeros=st.booleans(),
    loaded_at=st.integers(0, 8),
)
def test_steps_are_those_of_the_reference(kind, seed, decays, betas, eps, sizes, zeros, loaded_at):
    """sizes: of the gradients of each tensor in each step, None for no gradient; a tensor may begin with zeros."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator).double()) for shape in SHAPES]
    if zeros:
        weights[0].data.zero_()
    groups = [{"params": weights[::2], "weight_decay": decays[0]}]
    groups += [{"params": weights[1::2], "weight_decay": decays[1], "rate_scale": 0.5}]
    options = {"betas": betas, "eps": eps}
    made = kind([dict(group) for group in groups], **options)
    expected = [(weight.flatten().tolist(), *[[0.0] * weight.numel()] * 2) for weight in weights]
    numbers = [0] * len(weights)
    for step, row in enumerate(sizes):
        if step == loaded_at:
            made = reloaded(made, groups, options)
        rate = 0.01 * (step + 1)
        for number, (weight, size) in enumerate(zip(weights, row, strict=True)):
            weight.grad = None if size is None else size * torch.randn(weight.shape, generator=generator).double()
            if size is not None:
                numbers[number] += 1
                one = {"number": numbers[number], "rate": rate * (1.0, 0.5)[number % 2], "decay": decays[number % 2]}
                expected[number] = SIZED[kind](
                    expected[number][0], weight.grad.flatten().tolist(), *expected[number][1:], **one, **options
                )
        optimizers.set_learning_rate(made, rate)
        made.step()
    for number, (weight, (numbers_in, *_)) in enumerate(zip(weights, expected, strict=True)):
        assert weight.flatten().tolist() == pytest.approx(numbers_in, rel=1e-9, abs=1e-11)
        assert made.state[weight].get("step", 0) == numbers[number]
