"""Progressive growth and --lr-scale: what comes from where, what is frozen, and that runs go on to the bit."""

import json
import shutil

import pytest
import torch
from conftest import SPECIAL
from training import entries, flags, learner, losses, on_ranks, train
from transformers import AutoModelForMaskedLM

from bertdata.errors import UsageError
from bertrain import optim
from bertrain.config import Config
from bertrain.models import build, grow
from bertrain.runtime import checkpoint

SIZES = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "max_position_embeddings": 80}
BERT = SIZES | {"model_type": "bert", "num_hidden_layers": 4, "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0}  # fmt: skip
MODERN = SIZES | {"model_type": "modernbert", "num_hidden_layers": 4, "global_attn_every_n_layers": 2,
                  "local_attention": 8}  # fmt: skip
GROW = {"grow": "1,2,4", "grow_at": "0.3,0.6", "steps": 10, "eval_every": 0}


@pytest.fixture(scope="module", params=["bert", "modernbert"])
def config(request, tmp_path_factory):
    """A configuration of four layers; those of ModernBERT attend to all and to few places in turn."""
    path = tmp_path_factory.mktemp("model") / f"{request.param}.json"
    path.write_text(json.dumps({"bert": BERT, "modernbert": MODERN}[request.param]))
    return str(path)


def state(out, step):
    """Weights and moments of a checkpoint by name: {name: (weight, moments or None)}."""
    path = out / f"step-{step:08d}"
    module = learner(build.load(path))
    optimizer = optim.build(module, Config(data="x", out="y", **options_of(out)))
    checkpoint.read_optimizer(path, optimizer, module)
    return {name.removeprefix("model."): (weight.detach(), dict(optimizer.state.get(weight, {})))
            for name, weight in module.named_parameters()}  # fmt: skip


def options_of(out):
    run = json.loads((out / "run.json").read_bytes())["config"]
    return {name: run[name] for name in ("optimizer", "lr_scale")}


def layer_of(name, prefix):
    return int(name.removeprefix(prefix).split(".")[0]) if name.startswith(prefix) else None


def grown(before, after, prefix, number, *, stack=True):
    """What a slow and obvious growth makes of `state`: {name: (weight, moments)}, without what has no source."""
    found = {}
    for name in after:
        source, layer = name, layer_of(name, prefix)
        if layer is not None and layer >= number:
            source = f"{prefix}{layer % number}{name[len(f'{prefix}{layer}') :]}" if stack else None
        if source in before:
            found[name] = before[source]
    return found


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_layers_and_moments_are_copies_and_checkpoints_have_the_layers_of_their_stage(
    dataset, tmp_path, config, optimizer, capsys
):
    log = train(dataset.path, tmp_path / "run", model=config, optimizer=optimizer, **GROW)
    depths = {step: AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / f"step-{step:08d}").config
              for step in range(1, 11)}  # fmt: skip
    assert [depths[step].num_hidden_layers for step in depths] == [1] * 3 + [2] * 3 + [4] * 4
    if "modernbert" in config:
        assert depths[6].layer_types == ["full_attention", "sliding_attention"]
        assert depths[10].layer_types == ["full_attention", "sliding_attention"] * 2
    growths = [entry for entry in log if "layers" in entry]
    assert [(entry["step"], entry["layers_before"], entry["layers"]) for entry in growths] == [(3, 1, 2), (6, 2, 4)]
    for entry in growths:
        assert entry["loss_before"] > 0 < entry["loss_after"] != entry["loss_before"]
    resolved = json.loads((tmp_path / "run" / "run.json").read_bytes())["resolved"]
    assert resolved["parameters"] == growths[1]["parameters"] > growths[0]["parameters"]
    said = capsys.readouterr().out
    assert "begins with 1 layers, has 2 after step 3, 4 after step 6" in said
    assert "step 6: the model grows from 2 to 4 layers" in said
    assert f"loss {growths[1]['loss_before']:.4f} before and {growths[1]['loss_after']:.4f} after" in said


def small(config, layers, optimizer="adamw", **more):
    """A Learner of `layers` layers with its optimizer, after one step on numbers."""
    weights, _ = build.build(config, SPECIAL, length=32, seed=layers, layers=layers)
    module = learner(weights)
    options = Config(data="x", out="y", optimizer=optimizer, **more)
    made = optim.build(module, options)
    torch.manual_seed(layers)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optim.set_learning_rate(made, 0.01)
    made.step()
    return module, made


@pytest.mark.parametrize("stack", [True, False])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (3, 4), (2, 2)])
def test_each_tensor_comes_from_where_the_rule_says(config, stack, before, after):
    one, old = small(config, before)
    two, _ = small(config, after)
    new = optim.build(two, Config(data="x", out="y"))
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
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"freeze_trunk": True, "grow_by": "fresh"},
        {"optimizer": "muon"},
        {"average": 0.3, "long_length": 48, "long_share": 0.5, "mlm_probability": "0.3:0.15@0.6"},
    ],
)
def test_a_run_resumes_inside_any_stage_to_the_bit(dataset, tmp_path, config, more):
    whole = train(dataset.path, tmp_path / "whole", model=config, **GROW | more)
    last = state(tmp_path / "whole", 10)
    for step in (2, 3, 5, 8):
        out = tmp_path / f"from-{step}"
        shutil.copytree(tmp_path / "whole", out)
        for later in range(step + 1, 11):
            shutil.rmtree(out / f"step-{later:08d}")
        again = train(dataset.path, out, model=config, **GROW | more)
        assert losses(again) == losses(whole)
        assert [e for e in again if "layers" in e] == [e for e in whole if "layers" in e]
        for name, (weight, moments) in state(out, 10).items():
            assert torch.equal(weight, last[name][0])
            assert all(torch.equal(value, last[name][1][kind]) for kind, value in moments.items())


@pytest.mark.slow
def test_a_frozen_trunk_stands_still_to_the_bit_and_moves_once_it_is_trained(dataset, tmp_path, config):
    options = {"grow": "1,2,2,4", "grow_at": "0.2,0.5,0.7", "steps": 10, "eval_every": 0, "freeze_trunk": True}
    train(dataset.path, tmp_path / "run", model=config, **options)
    prefix = "model.layers." if "modernbert" in config else "bert.encoder.layer."
    at = {step: state(tmp_path / "run", step) for step in (2, 3, 5, 6, 7, 8, 10)}

    def moved(before, after):
        names = [name for name in at[after] if name in at[before] and not torch.equal(at[before][name][0],
                                                                                      at[after][name][0])]  # fmt: skip
        layers = {layer_of(name, prefix) for name in names}
        return (
            layers - {None},
            any("embeddings" in name for name in names),
            any("head" in n or "cls" in n for n in names),
        )

    assert moved(2, 5) == (set(), False, True)  # layer 1 is not in the first of them
    assert moved(3, 5) == ({1}, False, True)
    assert moved(5, 7) == ({0, 1}, True, True)  # the second 2 trains all layers
    assert moved(7, 10) == (set(), False, True)
    assert moved(8, 10) == ({2, 3}, False, True)
    parked = [name for name in at[2] if layer_of(name, prefix) == 0]
    for name in parked:  # moments wait, and go on from where they were
        assert all(torch.equal(value, at[5][name][1][kind]) for kind, value in at[2][name][1].items())
        assert at[7][name][1]["step"] == at[2][name][1]["step"] + 2


@pytest.mark.dist
def test_growth_does_not_depend_on_ranks(dataset, tmp_path, config):
    options = GROW | {"model": config, "optimizer": "muon"}
    alone = train(dataset.path, tmp_path / "one", **options)
    arguments = flags(dataset.path, tmp_path / "two", **options)
    code, _, said = on_ranks(2, "bertrain.pretrain", arguments)
    assert code == 0, said
    together = entries(tmp_path / "two")
    for one, two in zip(alone, together, strict=True):
        for name in ("step", "loss", "loss_before", "loss_after", "validation_loss", "layers"):
            assert (name in one) == (name in two)
            assert name not in one or one[name] == pytest.approx(two[name], rel=1e-4)


def test_with_a_budget_the_time_decides_when_to_grow(dataset, tmp_path):
    log = train(dataset.path, tmp_path / "run", budget="1.5s", grow="1,2", grow_at="0.5", eval_every=0, save_every=1000)
    (growth,) = [entry for entry in log if "layers" in entry]
    before = max(entry["trained_s"] for entry in log if entry["step"] <= growth["step"] and "trained_s" in entry)
    assert before >= 0.75
    assert {path.name for path in (tmp_path / "run").glob("step-*")} == {
        f"step-{step:08d}" for step in (growth["step"], log[-1]["step"])
    }


def test_a_run_whose_time_is_up_before_a_growth_says_so(dataset, tmp_path, capsys):
    log = train(dataset.path, tmp_path / "run", budget="0.001s", grow="1,2", grow_at="0.5", eval_every=0)
    assert not [entry for entry in log if "layers" in entry]
    assert "the time was up before the model grew from 1 to 2 layers" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's own compiler
def test_a_compiled_run_grows_and_its_compiling_is_counted(dataset, tmp_path):
    options = {"steps": 6, "grow": "1,2", "grow_at": "0.5", "eval_every": 0}
    plain = train(dataset.path, tmp_path / "plain", **options)
    made = train(dataset.path, tmp_path / "made", compile="on", **options)
    for one, two in zip(plain, made, strict=True):
        assert ("loss" in one) == ("loss" in two)
        assert "loss" not in one or one["loss"] == pytest.approx(two["loss"], rel=1e-4)
    seconds = {entry["step"]: entry["compiled_s"] for entry in made if "compiled_s" in entry}
    assert seconds[4] > seconds[3]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"grow": "3"}, "--grow is 3; give numbers of layers that do not fall, such as 3,6,12"),
        ({"grow": "4,2", "grow_at": "0.5"}, "--grow is 4,2; give numbers of layers that do not fall"),
        ({"grow": "1,2"}, "--grow-at is missing; --grow 1,2 needs 1 rising shares of the run between 0 and 1"),
        ({"grow": "1,2,4", "grow_at": "0.5,0.2"}, "--grow-at is 0.5,0.2; --grow 1,2,4 needs 2 rising shares"),
        ({"grow_at": "0.5"}, "--grow-at 0.5 needs --grow"),
        ({"grow": "1,2", "grow_at": "0.9", "average": 0.2}, "--average 0.2 takes in weights from before the last"),
        ({"grow": "1,2", "grow_at": "0.5", "init": "x"}, "--grow and --init were given"),
        ({"grow": "1,2", "grow_at": "0.5", "teacher": "x"}, "--distil relations compares layers by their number"),
        ({"lr_scale": ["embeddings"]}, "--lr-scale embeddings is not a regular expression, = and a number"),
        ({"lr_scale": ["(=1"]}, r"--lr-scale \(=1 is not a regular expression, = and a number"),
        ({"lr_scale": ["a=-1"]}, "--lr-scale a=-1 needs a pattern, = and a factor of 0 or more"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_in_one_sentence(given, sentence):
    with pytest.raises(UsageError, match=sentence):
        Config(data="x", out="y", **given)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"grow": "1,3", "grow_at": "0.5"}, "--grow 1,3 ends with 3 layers, and --model has 2; end with 2"),
        ({"grow": "3,6", "grow_at": "0.5"}, "--grow asks for 3 layers, and --model has 2; end with 2"),
        ({"lr_scale": ["embedings=0.1"]}, "--lr-scale embedings=0.1 matches none of the "),
        ({"lr_scale": [".=0"]}, "--lr-scale .=0 freezes all parameters; leave some to train"),
    ],
)  # fmt: skip
def test_what_the_model_cannot_follow_is_refused_before_the_first_step(dataset, tmp_path, given, sentence, capsys):
    with pytest.raises(SystemExit):
        train(dataset.path, tmp_path / "run", steps=4, **given)
    assert sentence in capsys.readouterr().err


def test_a_pattern_may_match_layers_that_come_later(dataset, tmp_path, capsys):
    train(dataset.path, tmp_path / "run", steps=4, grow="1,2", grow_at="0.5", lr_scale=[r"layers\.1\.=0.5"])
    said = capsys.readouterr().out
    assert r"--lr-scale layers\.1\.=0.5: 0 tensors, 0 parameters" in said
    assert r"--lr-scale layers\.1\.=0.5: 6 tensors" in said


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_rates_are_scaled_by_the_last_pattern_that_matches(config, optimizer):
    scales = ["embeddings=0.1", r"Wqkv|query=0.5", r"layers?\.3\.=0"]
    weights, _ = build.build(config, SPECIAL, length=32, seed=0)
    module = learner(weights)
    plain = optim.build(learner(weights), Config(data="x", out="y", optimizer=optimizer))
    made = optim.build(module, Config(data="x", out="y", optimizer=optimizer, lr_scale=scales))
    rates = []
    for one in (plain, made):
        optim.set_learning_rate(one, 1.0)
        rates.append({parameter: group["lr"] for group in one.param_groups for parameter in group["params"]})
    assert rates[0].keys() == rates[1].keys()
    for name, parameter in module.named_parameters():
        factor = 0.1 if "embeddings" in name else 0.5 if "Wqkv" in name or "query" in name else 1.0
        factor = 0.0 if ".layers.3." in name or ".layer.3." in name else factor
        assert rates[1][parameter] == pytest.approx(factor * rates[0][parameter])
        assert parameter.requires_grad == (factor > 0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_scaled_and_frozen_runs_resume_to_the_bit_and_refuse_other_scales(dataset, tmp_path, optimizer, capsys):
    options = {"steps": 4, "optimizer": optimizer, "lr_scale": ["embeddings=0", "Wqkv=0.5", "norm=2"], "eval_every": 0}
    whole = train(dataset.path, tmp_path / "run", **options)
    one, two = (state(tmp_path / "run", step) for step in (1, 4))
    for name, (weight, moments) in two.items():
        assert torch.equal(weight, one[name][0]) == ("embeddings" in name and "norm" not in name)
        assert bool(moments) == (not torch.equal(weight, one[name][0]))
    table = json.loads((tmp_path / "run" / "run.json").read_bytes())["resolved"]["lr_scale"]
    assert [(row["pattern"], row["factor"]) for row in table] == [("embeddings", 0.0), ("Wqkv", 0.5), ("norm", 2.0)]
    frozen = one["model.embeddings.tok_embeddings.weight"][0].numel()
    assert f"--lr-scale embeddings=0: 1 tensors, {frozen:,} parameters are frozen" in capsys.readouterr().out
    for step in (3, 4):
        shutil.rmtree(tmp_path / "run" / f"step-{step:08d}")
    assert losses(train(dataset.path, tmp_path / "run", **options)) == losses(whole)
    assert "note:" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        train(dataset.path, tmp_path / "run", **options | {"lr_scale": ["Wqkv=0.5"]})
    said = capsys.readouterr().err
    assert "was trained with --lr-scale embeddings=0 Wqkv=0.5 norm=2, and --lr-scale Wqkv=0.5 was given" in said
    with pytest.raises(SystemExit):
        train(dataset.path, tmp_path / "run", **options | {"lr_scale": []})
    assert "and none was given" in capsys.readouterr().err
