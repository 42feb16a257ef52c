"""Sub-networks: what they have of the model, how they learn, what is written of them, and the search among them."""

import copy
import json
import math
import re
import shlex
import shutil
from collections import Counter
from functools import partial
from itertools import accumulate
from unittest.mock import patch

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread
from support import commands
from support.data import SPECIAL
from support.families import LISTED, four_rows, model_of
from support.runs import config_of, last_checkpoint, learner, learner_of, refused_run, run_of, train
from transformers import AutoConfig, AutoTokenizer

from bertrain import checkpoint
from bertrain.lab.elastic import search
from bertrain.lab.elastic import space as elastic
from bertrain.lab.elastic.training import Elastic
from bertrain.models.encoder import Encoder

WHOLE = elastic.Sizes(3, 32, 4, 48)
SHAPE = {"num_attention_heads": 4, "num_hidden_layers": 3}
SPACE = "layers=1:3,width=16:32:8,heads=2:4,feed_forward=16:48:16"
SMALLER = {
    "bert": [elastic.Sizes(1, 16, 2, 16), elastic.Sizes(2, 24, 4, 48), elastic.Sizes(3, 16, 4, 32), WHOLE],
    "modernbert": [elastic.Sizes(1, 16, 2, 16), elastic.Sizes(2, 24, 3, 48), WHOLE],
}
RUN = {"elastic": SPACE, "steps": 6, "micro_batch_size": 3, "save_every": 3}


@pytest.fixture(scope="module")
def configs(once):
    def make(folder):
        for name in SMALLER:
            (folder / f"{name}.json").write_text(json.dumps({"model_type": name} | LISTED[name] | SHAPE))

    return {name: str(once("configs", make) / f"{name}.json") for name in SMALLER}


@pytest.fixture(scope="module")
def trained(dataset, once, configs):
    """A run of a bert with sub-networks, of six steps. Tests must not change it."""
    return once("run", lambda folder: train(dataset.path, folder / "run", model=configs["bert"], **RUN)) / "run"


def complete(configs, kind):
    """A model in which no tensor is zeros or ones."""
    model = model_of(configs[kind])
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


RUNS = (commands.succeeds, commands.refused, commands.json_of)
succeeds, refused, json_of = (partial(run, "bertrain") for run in RUNS)


# ------------------------------------------------------------------------------------------------------------- slicing


def places_of(model, sizes):
    """Name → where the numbers of a sub-network's parameters are in those of the model, each of which is flattened."""
    counted = copy.deepcopy(model)
    for parameter in counted.parameters():
        parameter.data = torch.arange(parameter.numel(), dtype=torch.float32).view_as(parameter)
    return {name: parameter.long() for name, parameter in elastic.cut(counted, sizes).named_parameters()}


@pytest.mark.parametrize(("kind", "isolate"), [("bert", False), ("modernbert", True)])
def test_gradients_are_the_means_of_those_of_sub_networks_alone(configs, dataset, kind, isolate):
    model, chosen, alone = complete(configs, kind), SMALLER[kind][:2], []
    own = dict(model.named_parameters())
    _, piece = four_rows(dataset, 40, samples="packed" if isolate else "documents")
    made = Elastic(learner(model, isolate=isolate), "layers=3")
    expected = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
    for sizes in SMALLER[kind]:
        small, places = elastic.cut(model, sizes), places_of(model, sizes)
        assert elastic.sizes_of(small.config) == sizes
        found = learner(small, isolate=isolate)(**piece)["mlm"]
        found.sum.backward()
        made.use([sizes])
        torch.testing.assert_close(made(**piece)["mlm"].sum, found.sum, rtol=1e-6, atol=1e-5)
        for name, parameter in small.named_parameters():
            assert torch.equal(parameter, own[name].flatten()[places[name]]), name
            assert parameter.untyped_storage().data_ptr() != own[name].untyped_storage().data_ptr()
            if sizes in chosen:
                expected[name].view(-1)[places[name]] += parameter.grad / 2
        alone += [[found.sum.item(), found.num_correct.item()]] * (sizes in chosen)
    made.use(chosen)
    loss = made(**piece)["mlm"]
    loss.sum.backward()
    assert [loss.sum.item(), loss.num_correct.item()] == pytest.approx(np.mean(alone, 0))
    for name, parameter in own.items():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    later = [parameter for name, parameter in own.items() if re.search(r"layers?\.2\.", name)]
    assert later
    assert all(parameter.grad is None for parameter in later)


@pytest.mark.parametrize(
    ("kind", "name", "group", "taken"),
    [
        ("bert", "bert.encoder.layer.0.attention.self.query", 8, 4),  # of heads that are half as wide
        ("bert", "bert.encoder.layer.0.attention.output.dense", 8, 4),  # the columns that multiply them
        ("modernbert", "model.layers.0.attn.Wqkv", 32, 16),
        ("modernbert", "model.layers.0.mlp.Wi", 48, 16),
    ],
)
def test_a_sub_network_has_the_first_rows_of_each_head_and_of_each_matrix(configs, kind, name, group, taken):
    """So that sub-networks of all sizes share what they learn."""
    model = complete(configs, kind)
    small = elastic.cut(model, elastic.Sizes(1, 16, 4 if kind == "bert" else 2, 16))
    whole, part = (each.state_dict()[f"{name}.weight"] for each in (model, small))
    if name.endswith("attention.output.dense"):
        whole, part = whole.T, part.T
    kept = [row for row in range(len(whole)) if row % group < taken]
    assert torch.equal(part, whole[kept, :16])


# --------------------------------------------------------------------------------------------------------------- space


def test_a_space_has_all_sizes_that_fit_and_picks_each_as_often(configs):
    space = elastic.Space(SPACE, complete(configs, "bert").config)
    pairs = [(16, 2), (16, 4), (24, 3), (24, 4), (32, 4)]
    expected = {elastic.Sizes(n, *pair, inner) for n in (1, 2, 3) for pair in pairs for inner in (16, 32, 48)}
    assert len(space) == 45
    assert {space[number] for number in range(45)} == expected
    assert elastic.Sizes(1, 24, 2, 16) not in space
    counts = Counter(space.pick(7, step, index) for step in range(900) for index in (1, 0))
    assert set(counts) == expected
    assert max(abs(count - 40) for count in counts.values()) < 5 * math.sqrt(40)
    assert [space.pick(7, step, 0) for step in range(20)] != [space.pick(8, step, 0) for step in range(20)]
    modern = elastic.Space("width=16:32:8,heads=2:4", complete(configs, "modernbert").config)
    assert [modern[number] for number in range(len(modern))] == [elastic.Sizes(3, w, w // 8, 48) for w in (16, 24, 32)]


# ------------------------------------------------------------------------------------------------------------ training


def test_each_step_trains_sub_networks_of_its_own(configs, dataset, tmp_path):
    options = {"data": str(dataset.path), "out": str(tmp_path), "model": configs["bert"], "length": 32, "seed": 7}
    trainer, (_, piece) = run_of(config_of(**options, elastic=SPACE, sub_networks=3)).trainer, four_rows(dataset)
    for step in (0, 5):
        trainer.methods[0].begin_step(step)
        loss = trainer.learner(**piece)["mlm"].sum
        trainer.learner.use([trainer.learner.space.pick(7, step, index) for index in range(3)])
        assert trainer.learner(**piece)["mlm"].sum == loss


def test_a_run_goes_on_only_with_the_sub_networks_that_it_trained(dataset, tmp_path, trained, configs):
    out, options = shutil.copytree(trained, tmp_path / "run"), RUN | {"model": configs["bert"], "elastic": ""}
    refused_run(dataset.path, out, **options, kind="other-settings", option="elastic", says=SPACE)


@pytest.mark.parametrize(("method", "heads"), [("relations", 2), ("logits", 2), ("hidden", 2), ("hidden", 4)])
def test_a_teacher_teaches_a_sub_network_what_it_teaches_a_model_of_its_own(dataset, trained, configs, method, heads):
    sizes, options = elastic.Sizes(2, 16, heads, 32), {"length": 32, "teacher": str(trained)}
    options |= {"distil": method} | ({"distil_layers": "last"} if method == "hidden" else {})
    model, found = complete(configs, "bert"), []
    inside = learner_of(config_of(**options, elastic=SPACE), model, dataset)
    inside.use([sizes])
    outside = learner_of(config_of(**options), elastic.cut(model, sizes), dataset)
    distil = (inside.objectives["distil"], outside.objectives["distil"])
    if method == "hidden":
        with torch.no_grad():
            distil[1].projection.weight.copy_(distil[0].projection.weight[:, :16])
            distil[1].projection.bias.copy_(distil[0].projection.bias)
    for made in (inside, outside):
        result = made(**made.prepare(four_rows(dataset, 40)[1]))
        sum(loss.sum for loss in result.values()).backward()
        found.append([result[name].sum.item() for name in ("mlm", "distil")])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    if method == "hidden":
        gradients = [objective.projection.weight.grad for objective in distil]
        torch.testing.assert_close(gradients[0][:, :16], gradients[1], rtol=1e-4, atol=1e-5)


def test_extract_writes_a_checkpoint_that_loads_and_learns(dataset, trained, tmp_path):
    small = tmp_path / "small"
    sizes = ["--layers", 2, "--width", 24, "--heads", 3, "--feed-forward", 32, "--out", small]
    said = f"{small}: 2 layers, width 24, 3 heads, feed-forward 32, "
    assert succeeds("extract", "--checkpoint", trained, *sizes).output.startswith(said)
    odd = ["--width", 8, "--heads", 1, "--out", tmp_path / "odd"]
    assert f"with --elastic {SPACE}, so" in succeeds("extract", "--checkpoint", trained, *odd).stderr
    assert elastic.sizes_of(AutoConfig.from_pretrained(small)) == (2, 24, 3, 32)
    assert AutoTokenizer.from_pretrained(small)("the stone")["input_ids"][0] == SPECIAL.cls
    assert checkpoint.find(small) == small
    assert " `step-00000006`" in (small / "README.md").read_text()
    log = train(dataset.path, tmp_path / "on", init=str(small), steps=1, eval_every=0)
    evaluated = json_of("evaluate", "--checkpoint", small, "--data", dataset.path, "--length", 32)
    assert log[0]["loss"] == pytest.approx(evaluated["loss"], abs=0.5)


# -------------------------------------------------------------------------------------------------------------- search


def latency(sizes):
    return sizes.layers * (1 + 3 * sizes.width / 32 + sizes.feed_forward / 24)


def loss(sizes):
    return 5 - sizes.layers / 3 - 1.5 * math.sqrt(sizes.width / 32) - sizes.feed_forward / 96 + sizes.heads / 80


def searched(space, method, seed, *, trials=24, limit=9.0):
    options = search.SearchOptions(method=method, seed=seed, trials=trials)
    return search.search(space, latency, loss, options, limit)


def test_searches_are_functions_of_their_seed_and_evolution_finds_better_ones(configs):
    config = complete(configs, "bert").config
    space = elastic.Space("layers=1:3,width=8:32:4,heads=1:4,feed_forward=4:48:4", config)
    best, tried = {}, {}
    for method in search.METHODS:
        found = [searched(space, method, seed) for seed in range(6)]
        assert all(len(each) == 24 and max(map(latency, each)) <= 9 for each in found)
        assert list(searched(space, method, 5, trials=32))[:24] == list(found[5])  # the same trials first
        best[method] = np.mean([min(each.values()) for each in found])
        tried[method] = [list(each) for each in found]
    assert best["evolution"] < best["random"]
    assert [each[:10] for each in tried["evolution"]] == [each[:10] for each in tried["random"]]
    assert [each[10] for each in tried["evolution"]] != [each[10] for each in tried["random"]]
    few = elastic.Space("layers=1:3", config)
    assert len(searched(few, "evolution", 0, limit=18.0)) == 3  # that of the largest
    assert len(searched(few, "random", 0, limit=0.0)) == 0


def test_the_latency_is_the_median_of_15_passes_after_3(configs):
    model = complete(configs, "bert")
    durations = [100.0] * 3 + [number / 1e3 for number in np.random.default_rng(0).permutation(15)]
    clock = accumulate(step for duration in durations for step in (0.5, duration))
    with patch("time.perf_counter", lambda: next(clock)):
        measured = search.cost(Encoder(model), rows=2, length=8)
    assert measured == {"parameters": model.num_parameters(), "latency_ms": pytest.approx(7.0)}


def test_a_search_is_kept_and_continued_and_its_best_is_what_extract_writes(dataset, trained, tmp_path, limit):
    limit(searched_repeats=3)
    out = tmp_path / "search"
    common = ["search", "--checkpoint", trained, "--data", dataset.path, "--latency", "10s", "--max-samples", 8]
    with patch.object(Figure, "savefig", autospec=True, side_effect=Figure.savefig) as saved:
        one = succeeds(*common, "--trials", 11, "--out", out)
    done = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
    known = {tuple(entry[name] for name in elastic.Sizes._fields): entry for entry in done}  # the last line of each
    tried = [entry for entry in known.values() if "loss" in entry]
    best, *others = sorted(tried, key=lambda entry: entry["loss"])
    counts = f"{last_checkpoint(trained)}: 11 of 45 sub-networks tried (evolution)"
    lines = [f"{counts}, latency at most 10000 ms for 1 × 32 tokens, threads: {torch.get_num_threads()}"]
    for entry in (best, *others[:9]):
        sizes = ", ".join(f"{name} {entry[name]:,}" for name in (*elastic.Sizes._fields, "parameters"))
        numbers = f"loss {entry['loss']:.4f}, accuracy {entry['accuracy']:.2%}, {entry['latency_ms']:.2f} ms"
        lines.append(f"{numbers}: {sizes}")
    lines.append(f"trials.jsonl and search.png are in {out}; the best as a checkpoint:")
    assert one.stdout.splitlines()[:-1] == lines
    (axis,) = saved.call_args.args[0].axes
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["trials", "best", "limit"]
    assert axis.get_xlabel() + axis.get_ylabel() == "latency (ms)validation loss (nats a token)"
    assert imread(out / "search.png").shape == (500, 700, 4)
    succeeds(*shlex.split(one.stdout.splitlines()[-1])[1:-1], tmp_path / "small")
    options = ["--data", dataset.path, "--length", 32, "--max-samples", 8]
    evaluated = json_of("evaluate", "--checkpoint", tmp_path / "small", *options)
    assert evaluated["loss"] == pytest.approx(best["loss"], abs=1e-6)
    for damage in (b"\xff\n", b'{"layers": 3, "wid'):  # the line at which power or process failed
        with open(out / "trials.jsonl", "ab") as file:
            file.write(damage)
        again = json_of(*common, "--trials", 11, "--out", out)
        lines = (out / "trials.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == list(known.values())  # no time is measured again
    facts = {"checkpoint": str(last_checkpoint(trained)), "method": "evolution", "seed": 0, "limit_ms": 10_000.0}
    facts |= {"threads": torch.get_num_threads(), "space": 45, "rows": 1, "length": 32}
    assert again == facts | {"best": best, "trials": tried}
    more = json_of(*common, "--trials", 13, "--out", out)
    assert (more["trials"][:11], len(more["trials"])) == (tried, 13)
    refused(*common, "--out", out, "--batch-size", 2, kind="other-settings", option="out", says="batch_size 1 → 2")
    shutil.rmtree(last_checkpoint(shutil.copytree(trained, tmp_path / "before", symlinks=True)))
    before = ["search", "--checkpoint", tmp_path / "before", *common[3:], "--out", out]
    refused(*before, kind="other-settings", option="out", says="weights")
    refused(*common, "--out", out, "--latency", "0.000001ms", kind="out-of-range", option="latency", given=1e-6)
