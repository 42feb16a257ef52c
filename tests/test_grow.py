"""Progressive growth and --lr-scale: what comes from where, what is frozen, and that runs go on to the bit."""

import json
import re

import pytest
import torch
from support.disk import write
from support.families import LISTED, model_of
from support.runs import changing, config_of, entries, learner, train
from transformers import AutoModelForMaskedLM

from bertrain import checkpoint
from bertrain.lab import growth as grow
from bertrain.optim import optimizers

UPPER = r"layers?\.[23]\.|head|decoder|final_norm|^cls\."  # the last two of four layers, and what is above them


@pytest.fixture(params=["bert", "modernbert"])
def config(request, tmp_path):
    """A configuration of four layers; those of ModernBERT attend to all and to few tokens in turn."""
    values = LISTED[request.param] | {"model_type": request.param, "num_hidden_layers": 4}
    return str(write(tmp_path / request.param, json.dumps(values)))


def state(out, step):
    """Weights and moments of a checkpoint by name: {name: (weight, moments or None)}."""
    path = out / f"step-{step:08d}"
    module = learner(AutoModelForMaskedLM.from_pretrained(path))
    optimizer = optimizers.build(module, config_of())
    checkpoint.read_optimizer(path, optimizer, module)
    return {
        name.removeprefix("model."): (weight.detach(), dict(optimizer.state.get(weight, {})))
        for name, weight in module.named_parameters()
    }


@pytest.mark.parametrize("config", ["modernbert"], indirect=True)
def test_a_run_grows_and_checkpoints_have_the_layers_of_their_stage(dataset, tmp_path, config):
    options = {"model": config, "optimizer": "muon", "steps": 10, "eval_every": 0, "save_every": 5}
    options |= {"phase": changing(0.3, 0.6, layers=[1, 2, None]), "lr_scale": [r"layers\.3\.=0.5"]}
    train(dataset.path, tmp_path / "run", grow_by="fresh", **options)
    paths = (tmp_path / "run").glob("step-*")
    configs = {int(path.name[5:]): AutoModelForMaskedLM.from_pretrained(path).config for path in paths}
    assert {step: config.num_hidden_layers for step, config in configs.items()} == {3: 1, 5: 2, 6: 2, 10: 4}
    assert configs[6].layer_types == ["full_attention", "sliding_attention"]
    assert configs[10].layer_types == ["full_attention", "sliding_attention"] * 2
    growths = [entry for entry in entries(tmp_path / "run") if "change" in entry]
    assert [(entry["step"], entry["change"]) for entry in growths] == [(3, {"layers": [1, 2]}), (6, {"layers": [2, 4]})]
    for entry in growths:
        assert entry["loss_before"] > 0 < entry["loss_after"] != entry["loss_before"]
    resolved = json.loads((tmp_path / "run" / "run.json").read_bytes())["resolved"]
    assert resolved["parameters"] == growths[1]["parameters"] > growths[0]["parameters"]
    assert resolved["lr_scale"][0]["tensors"] == 6  # of a layer that comes later


def small(config, layers, *, seed=0):
    """A Learner of `layers` layers with its optimizer, after one step on numbers."""
    module = learner(model_of(config, seed=seed, configure=lambda made: grow.shorten(made, layers)))
    made = optimizers.build(module, config_of())
    torch.manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizers.set_learning_rate(made, 0.01)
    made.step()
    return module, made


@pytest.mark.parametrize("stack", [True, False])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (3, 4), (2, 2)])
def test_each_tensor_comes_from_where_the_rule_says(config, stack, before, after):
    one, old = small(config, before)
    two, _ = small(config, after, seed=1)
    new = optimizers.build(two, config_of())
    initial = {name: weight.detach().clone() for name, weight in two.named_parameters()}
    grow.carry(one, two, old, new, stack=stack)
    prefix = "model.model.layers." if "modernbert" in config else "model.bert.encoder.layer."
    have = {name: (weight, old.state[weight]) for name, weight in one.named_parameters()}
    for name, weight in two.named_parameters():
        layer = int(name.removeprefix(prefix).split(".")[0]) if name.startswith(prefix) else None
        source = name if not stack or layer is None else name.replace(f"{prefix}{layer}.", f"{prefix}{layer % before}.")
        if source not in have:
            assert torch.equal(weight, initial[name])
            assert weight not in new.state
            continue
        value, moments = have[source]
        assert torch.equal(weight, value)
        assert new.state[weight].keys() == moments.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for kind, value in moments.items():
            assert torch.equal(new.state[weight][kind], value)
            assert new.state[weight][kind].data_ptr() != value.data_ptr()


def test_a_frozen_trunk_stands_still_to_the_bit_and_moves_once_it_is_trained(dataset, tmp_path, config):
    """Its moments wait, and go on from where they were."""
    phases = changing(0.25, 0.625, layers=[2, None, None], trains=["", UPPER, ""])
    train(dataset.path, tmp_path / "run", model=config, phase=phases, grow_by="fresh", steps=8, eval_every=0)
    old, parked, trained = (state(tmp_path / "run", step) for step in (2, 5, 8))
    assert {int(moments["step"]) for name, (_, moments) in parked.items() if name not in old} == {3}
    for name, (weight, moments) in old.items():
        is_frozen = not re.search(UPPER, name)
        assert torch.equal(weight, parked[name][0]) == is_frozen
        assert not torch.equal(weight, trained[name][0])
        assert all(torch.equal(value, parked[name][1][kind]) for kind, value in moments.items()) == is_frozen
        assert trained[name][1]["step"] == moments["step"] + (3 if is_frozen else 6)


@pytest.mark.parametrize("optimizer", optimizers.OPTIMIZERS)
def test_rates_are_scaled_by_the_last_pattern_that_matches(config, optimizer):
    factors = {"embeddings": 0.1, "Wqkv|query": 0.5, r"layers?\.3\.": 0}
    module, rates = learner(model_of(config)), []
    for scales in ([], [f"{pattern}={factor}" for pattern, factor in factors.items()]):
        made = optimizers.build(module, config_of(optimizer=optimizer, lr_scale=scales))
        optimizers.set_learning_rate(made, 1.0)
        rates.append({parameter: group["lr"] for group in made.param_groups for parameter in group["params"]})
    assert rates[0].keys() == rates[1].keys()
    for name, parameter in module.named_parameters():
        matching = [factor for pattern, factor in factors.items() if re.search(pattern, name)]
        factor = matching[-1] if matching else 1
        assert rates[1][parameter] == pytest.approx(factor * rates[0][parameter])
        assert parameter.requires_grad == (factor > 0)
