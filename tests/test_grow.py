"""Progressive growth and --lr-scale: what comes from where, what is frozen, and that runs go on to the bit."""

import json

import pytest
import torch
from support.data import SPECIAL
from support.families import SMALL
from support.runs import QUIET, changing, entries, learner, refused_run, train, train_twice
from transformers import AutoModelForMaskedLM

from bertrain import checkpoint
from bertrain.config import Config
from bertrain.lab import growth as grow
from bertrain.models.load import load_model, new_model
from bertrain.optim import optimizers

GROW = {"phase": changing(0.3, 0.6, layers=[1, 2, None]), "steps": 10, "eval_every": 0, "grow_by": "fresh"}
UPPER = r"layers?\.{}\.|head|decoder|final_norm|^cls\."  # what is above the layers that it names, and these


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """name → a configuration of four layers; those of ModernBERT attend to all and to few tokens in turn."""
    folder = tmp_path_factory.mktemp("model")
    for name in ("bert", "modernbert"):
        (folder / name).write_text(json.dumps(SMALL[name] | {"model_type": name, "num_hidden_layers": 4}))
    return {name: str(folder / name) for name in ("bert", "modernbert")}


@pytest.fixture(params=["bert", "modernbert"])
def config(request, files):
    return files[request.param]


def state(out, step):
    """Weights and moments of a checkpoint by name: {name: (weight, moments or None)}."""
    path = out / f"step-{step:08d}"
    module = learner(load_model(path))
    of_run = json.loads((out / "run.json").read_bytes())["config"]
    options = {name: of_run[name] for name in ("optimizer", "lr_scale")}
    optimizer = optimizers.build(module, Config.make(data="x", out="y", **options))
    checkpoint.read_optimizer(path, optimizer, module)
    return {
        name.removeprefix("model."): (weight.detach(), dict(optimizer.state.get(weight, {})))
        for name, weight in module.named_parameters()
    }


def layer_of(name, prefix):
    return int(name.removeprefix(prefix).split(".")[0]) if name.startswith(prefix) else None


def grown(before, after, prefix, number, *, stack):
    """What a slow and obvious growth makes of `state`: {name: (weight, moments)}, without what has no source."""
    sources = {}
    for name in after:
        source, layer = name, layer_of(name, prefix)
        if layer is not None and layer >= number:
            source = f"{prefix}{layer % number}{name[len(f'{prefix}{layer}') :]}" if stack else None
        if source in before:
            sources[name] = before[source]
    return sources


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_a_run_grows_and_checkpoints_have_the_layers_of_their_stage(dataset, tmp_path, files, name):
    optimizer = {"bert": "adamw", "modernbert": "muon"}[name]
    options = GROW | {"save_every": 5, "model": files[name], "optimizer": optimizer}
    train_twice(dataset.path, tmp_path / "run", 3, **options)  # stopped where it grows, it has the growth once
    paths = (tmp_path / "run").glob("step-*")
    configs = {int(path.name[5:]): AutoModelForMaskedLM.from_pretrained(path).config for path in paths}
    assert {step: config.num_hidden_layers for step, config in configs.items()} == {3: 1, 5: 2, 6: 2, 10: 4}
    if name == "modernbert":
        assert configs[6].layer_types == ["full_attention", "sliding_attention"]
        assert configs[10].layer_types == ["full_attention", "sliding_attention"] * 2
    growths = [entry for entry in entries(tmp_path / "run") if "change" in entry]
    assert [(entry["step"], entry["change"]) for entry in growths] == [(3, {"layers": [1, 2]}), (6, {"layers": [2, 4]})]
    for entry in growths:
        assert entry["loss_before"] > 0 < entry["loss_after"] != entry["loss_before"]
    resolved = json.loads((tmp_path / "run" / "run.json").read_bytes())["resolved"]
    assert resolved["parameters"] == growths[1]["parameters"] > growths[0]["parameters"]


def small(config, layers, optimizer="adamw", *, seed=0, **more):
    """A Learner of `layers` layers with its optimizer, after one step on numbers."""
    weights, _ = new_model(config, SPECIAL, length=32, seed=seed, configure=lambda made: grow.shorten(made, layers))
    module = learner(weights)
    options = Config.make(data="x", out="y", optimizer=optimizer, **more)
    made = optimizers.build(module, options)
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
    new = optimizers.build(two, Config.make(data="x", out="y"))
    initial = {name: weight.detach().clone() for name, weight in two.named_parameters()}
    grow.carry(one, two, old, new, stack=stack)
    prefix = "model.model.layers." if "modernbert" in config else "model.bert.encoder.layer."
    have = {name: (weight, old.state[weight]) for name, weight in one.named_parameters()}
    expected = grown(have, initial, prefix, before, stack=stack)
    assert len(expected) > 10
    for name, weight in two.named_parameters():
        if name not in expected:
            assert torch.equal(weight, initial[name])
            assert weight not in new.state
            continue
        source, moments = expected[name]
        assert torch.equal(weight, source)
        assert new.state[weight].keys() == moments.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for kind, value in moments.items():
            assert torch.equal(new.state[weight][kind], value)
            assert new.state[weight][kind].data_ptr() != value.data_ptr()
    without = {name for name in initial if name not in expected}
    if not stack:
        assert {layer_of(name, prefix) for name in without} == set(range(before, after)) or before == after
    else:  # the first layer of a ModernBERT has no norm before its attention
        modern = "modernbert" in config
        assert without == ({f"{prefix}{n}.attn_norm.weight" for n in range(before, after, before)} if modern else set())


@pytest.mark.slow
def test_a_frozen_trunk_stands_still_to_the_bit_and_moves_once_it_is_trained(dataset, tmp_path, config):
    trains = ["", UPPER.format(1), "", UPPER.format("[23]")]
    phases = changing(0.2, 0.5, 0.7, layers=[1, 2, 2, None], trains=trains)
    train(dataset.path, tmp_path / "run", model=config, phase=phases, steps=10, eval_every=0)
    prefix = "model.layers." if "modernbert" in config else "bert.encoder.layer."
    states = {step: state(tmp_path / "run", step) for step in (2, 3, 5, 6, 7, 8, 10)}

    def moved(before, after):
        old, new = states[before], states[after]
        names = [name for name in new if name in old and not torch.equal(old[name][0], new[name][0])]
        layers = {layer_of(name, prefix) for name in names} - {None}
        return layers, any("embeddings" in n for n in names), any("head" in n or "cls" in n for n in names)

    assert moved(2, 5) == (set(), False, True)  # layer 1 is not in the first of them
    assert moved(3, 5) == ({1}, False, True)
    assert moved(5, 7) == ({0, 1}, True, True)  # the second 2 trains all layers
    assert moved(7, 10) == (set(), False, True)
    assert moved(8, 10) == ({2, 3}, False, True)
    parked = [name for name in states[2] if layer_of(name, prefix) == 0]
    for name in parked:  # moments wait, and go on from where they were
        assert all(torch.equal(value, states[5][name][1][kind]) for kind, value in states[2][name][1].items())
        assert states[7][name][1]["step"] == states[2][name][1]["step"] + 2


def test_what_the_model_cannot_follow_is_refused_before_the_first_step(dataset, tmp_path, configs):
    growth = {"phase": changing(0.5, layers=[1, None])}
    for name, more, kind, option, given in (
        ("bert", {"phase": changing(0.5, layers=[1, 1])}, "out-of-range", "layers", [1, 1]),
        ("bert", {"phase": changing(0.3, 0.6, layers=[2, 1, None])}, "out-of-range", "layers", [2, 1, 2]),
        ("bert", {"grow_by": "fresh"}, "needs-option", "grow_by", "fresh"),
        ("bert", {"phase": changing(0.5, layers=[3, None])}, "out-of-range", "layers", 3),
        ("bert", {"phase": changing(0.3, 0.6, layers=[1, 5, None])}, "out-of-range", "layers", 5),
        (
            "bert",
            {"phase": changing(0.3, 0.6, layers=[1, 1, None], trains=["", r"layer\.1\.", ""])},
            "no-match",
            "trains",
            repr(r"layer\.1\."),
        ),
        *((name, growth, "unsupported", "layers", None) for name in ("albert", "esm", "xlm")),
        ("bert", {"phase": changing(0.5, trains=["", "embedings"])}, "no-match", "trains", "'embedings'"),
        ("bert", {"rope_base": 1e5}, "unsupported", "rope_base", 1e5),
        ("bert", {"lr_scale": ["embedings=0.1"]}, "no-match", "lr_scale", "embedings=0.1"),
        ("bert", {"lr_scale": [".=0"]}, "nothing-to-train", "lr_scale", (".=0",)),
        ("electra", {"elastic": "layers=1:2"}, "unsupported", None, "electra"),
        ("modernbert", {"objective": "mlm+nsp"}, "unsupported", "objective", "nsp"),
        ("bert", {"objective": "mlm+spam"}, "unknown", "objective", "spam"),
        ("bert", {"objective": "mlm+nsp", "isolate_documents": True}, "conflict", "objective", "mlm+nsp"),
    ):
        options = {"model": configs[name], "steps": 4, "kind": kind, "option": option, "given": given} | more
        refused_run(dataset.path, tmp_path / "run", **options)
        assert not (tmp_path / "run").exists()


def test_a_pattern_may_match_layers_that_come_later(dataset, tmp_path):
    options = {"steps": 2, "phase": changing(0.5, layers=[1, None]), "lr_scale": [r"layer\.1\.=0.5"]}
    train(dataset.path, tmp_path / "run", **QUIET | options)
    (row,) = json.loads((tmp_path / "run" / "run.json").read_bytes())["resolved"]["lr_scale"]
    assert row["tensors"] == 16


@pytest.mark.parametrize("optimizer", optimizers.OPTIMIZERS)
def test_rates_are_scaled_by_the_last_pattern_that_matches(config, optimizer):
    scales = ["embeddings=0.1", r"Wqkv|query=0.5", r"layers?\.3\.=0"]
    weights, _ = new_model(config, SPECIAL, length=32, seed=0)
    module = learner(weights)
    plain = optimizers.build(learner(weights), Config.make(data="x", out="y", optimizer=optimizer))
    made = optimizers.build(module, Config.make(data="x", out="y", optimizer=optimizer, lr_scale=scales))
    rates = []
    for one in (plain, made):
        optimizers.set_learning_rate(one, 1.0)
        rates.append({parameter: group["lr"] for group in one.param_groups for parameter in group["params"]})
    assert rates[0].keys() == rates[1].keys()
    for name, parameter in module.named_parameters():
        factor = 0.1 if "embeddings" in name else 0.5 if "Wqkv" in name or "query" in name else 1.0
        factor = 0.0 if ".layers.3." in name or ".layer.3." in name else factor
        assert rates[1][parameter] == pytest.approx(factor * rates[0][parameter])
        assert parameter.requires_grad == (factor > 0)


@pytest.mark.parametrize("optimizer", optimizers.OPTIMIZERS)
def test_scaled_and_frozen_runs_resume_to_the_bit_and_refuse_other_scales(
    dataset, configs, tmp_path, optimizer, capsys
):
    scales = ["embeddings=0", "Wqkv=0.5", "norm=2"]
    options = {"steps": 4, "optimizer": optimizer, "lr_scale": scales, "eval_every": 0, "model": configs["modernbert"]}
    train_twice(dataset.path, tmp_path / "run", 2, **options)
    one, two = (state(tmp_path / "run", step) for step in (1, 4))
    for name, (weight, moments) in two.items():
        assert torch.equal(weight, one[name][0]) == ("embeddings" in name and "norm" not in name)
        assert bool(moments) == (not torch.equal(weight, one[name][0]))
    table = json.loads((tmp_path / "run" / "run.json").read_bytes())["resolved"]["lr_scale"]
    assert [(row["pattern"], row["factor"]) for row in table] == [("embeddings", 0.0), ("Wqkv", 0.5), ("norm", 2.0)]
    frozen = one["model.embeddings.tok_embeddings.weight"][0].numel()
    said = capsys.readouterr().out
    assert f"{frozen:,}" in said
    assert "note:" not in said
    for other in (["Wqkv=0.5"], []):
        given = options | {"lr_scale": other}
        refused_run(dataset.path, tmp_path / "run", **given, kind="other-settings", option="lr_scale")
