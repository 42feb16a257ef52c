"""A teacher's answers: cached to the same bytes whoever makes them, and learned from alike, cached or asked."""

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from scipy.special import rel_entr, softmax
from support.commands import refused, refuses, succeeds
from support.data import SPECIAL, assert_goes_on, assert_same, build, write_dataset
from support.disk import contents, reseal, unsealed, write
from support.families import LISTED, model_of, pieces_of
from support.limits import limits
from support.runs import QUIET, TINY, config_of, learner, learner_of, on_ranks, refused_run, steps_of, train
from transformers import AutoModelForMaskedLM

import bertdata
from bertrain.lab.distillation import answers
from bertrain.lab.distillation import objective as distil
from bertrain.lab.fingerprint import fingerprint
from bertrain.models.encoder import recompute_activations

BERT = LISTED["bert"] | {"model_type": "bert"}
TEACHER = BERT | {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 3, "hidden_dropout_prob": 0.1}
VARIANTS, UNIT = 2, 37


@pytest.fixture(scope="module")
def big(dataset, once):
    """A run directory with a teacher in it."""

    def make(folder):
        (folder / "teacher.json").write_text(json.dumps(TEACHER))
        train(dataset.path, folder / "run", **QUIET | {"model": str(folder / "teacher.json"), "steps": 20})

    return once("big", make) / "run"


def ask(dataset, big, out, *more, top_k=64):
    options = ["--model", big, "--data", dataset.path, "--out", out, "--length", 32, "--top-k", top_k]
    return ["teacher", *options, "--batch-size", 8, "--unit-samples", UNIT, *more]


@pytest.fixture(scope="module")
def caches(dataset, big, once):
    """Of all tokens and of 64 of the 82, for all masked samples of two epochs."""

    def make(folder):
        for name, top_k in (("all", 10**6), ("few", 64)):
            succeeds("bertrain", *ask(dataset, big, folder / name, "--variants", VARIANTS, top_k=top_k))

    return {name: once("caches", make) / name for name in ("all", "few")}


def loader_of(dataset, cache, **more):
    return answers.TaughtLoader(dataset, length=32, masking=bertdata.Masking(), teacher_cache=str(cache), **more)


@pytest.mark.parametrize("shuffle", ["full", "blocks"])
def test_with_variants_the_stream_comes_round_and_is_the_same_until_then(dataset, shuffle):
    plain, turning = (bertdata.Loader(dataset, length=32, shuffle=shuffle, variants=number) for number in (None, 2))
    n, positions = plain.num_samples, np.arange(3 * plain.num_samples)
    assert_same(turning.read(positions), plain.read(positions % (2 * n)))
    assert not np.array_equal(plain.read(positions[:n]).input_ids, plain.read(positions[:n] + 2 * n).input_ids)


# --------------------------------------------------------------------------------------------------------------- cache


def in_buckets(logits, ids):
    """The probabilities of some tokens of each row, and of all its others together."""
    p = softmax(logits, -1)
    others = [[np.delete(row, some).sum()] for row, some in zip(p, ids, strict=True)]
    return np.concatenate([np.take_along_axis(p, ids, -1), others], -1)


def test_a_cache_holds_the_most_probable_tokens_of_the_softmax_and_the_mass_of_the_others(dataset, big, caches):
    """And its header sums what they say, and names the teacher."""
    loader, teacher = loader_of(dataset, caches["few"]), AutoModelForMaskedLM.from_pretrained(big / "last")
    batch = loader.read(np.arange(4, 2 * loader.num_samples + 4))  # the last row of the text is short
    used = batch.targets != bertdata.IGNORE_INDEX
    with torch.no_grad():
        logits = learner(teacher).eval().logits(**feed_of(batch)).double().numpy()[used]
    answered = batch.teacher_ids, batch.teacher_logprobs, batch.teacher_tails[..., None]
    assert (batch.teacher_ids.shape[1:], batch.teacher_ids.dtype) == ((5, 64), np.uint16)
    assert not used.all()
    assert not any(array[~used].view(np.uint16).any() for array in answered)
    ids, *logs = (array[used] for array in answered)
    expected = in_buckets(logits, ids.astype(int))
    assert np.exp(np.concatenate(logs, -1).astype(float)) == pytest.approx(expected, rel=6e-3)
    p = softmax(logits, -1)
    assert np.sort(p)[:, :-65:-1] == pytest.approx(expected[:, :-1], abs=1e-6)
    header = unsealed(caches["few"] / "cache.json")
    assert header["teacher"]["sha256"] == fingerprint(teacher)
    sums = [sum(unit["counts"][name] for unit in header["units"]) for name in ("targets", "entropy", "tail_mass")]
    assert sums == pytest.approx([used.sum(), -(p * np.log(p)).sum(), expected[:, -1].sum()], rel=1e-4)


@pytest.mark.slow
def test_ranks_share_the_work_and_write_the_same_bytes(dataset, big, caches, tmp_path):
    out = tmp_path / "logits"
    shown, _ = on_ranks(3, "bertrain", ask(dataset, big, out, "--variants", VARIANTS))
    assert shown.count(str(out)) == 2  # each line is printed by one rank
    assert contents(out) == contents(caches["few"])


def test_a_cache_belongs_to_its_samples_and_its_teacher(dataset, corpus, vocab, big, caches, bert_run, tmp_path):
    """It is not continued for others, and no student of other samples learns from it."""
    before = contents(caches["few"])
    others = ["--seed 1", "--length 24", "--mlm-probability 0.2", "--masking whole_word", "--shuffle blocks"]
    for change in (*others, "--samples packed", "--top-k 8", "--variants 3", f"--model {bert_run}"):
        given = ask(dataset, big, caches["few"], "--variants", VARIANTS, *change.split())
        refused("bertrain", *given, kind="other-settings", option="out")
    build([corpus], tmp_path / "same", tokenizer=vocab)
    build([corpus], tmp_path / "other", vocab_size=60)
    known = {"teacher_cache": caches["few"], "model": TINY, "kind": "other-stream", "option": "teacher_cache"}
    for data, seed in ((dataset.path, 1), (tmp_path / "same", 0), (tmp_path / "other", 0)):
        refused_run(data, tmp_path / "run", data_seed=seed, **known)
    refused_run(tmp_path / "other", tmp_path / "run", teacher=big, kind="tokenizer-differs")
    assert contents(caches["few"]) == before
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_work_without_end_or_beyond_the_limit_is_refused(dataset, big, tmp_path, monkeypatch):
    """A cache within the limit has the masks of the recipe, or those that are given beside it."""
    arguments = ask(dataset, big, tmp_path / "logits")
    refused("bertrain", *arguments, kind="missing", option="max_samples")
    arguments += ["--max-samples", 100, "--recipe", "tiny"]
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=500))
        refused("bertrain", *arguments, kind="missing", option="yes")
    with limits(teacher_bytes=1000, teacher_units=2):
        refused("bertrain", *arguments, kind="missing", option="yes")
        said = succeeds("bertrain", *arguments, "--yes").stdout
        succeeds("bertrain", *arguments, "--yes", "--mlm-probability", 0.15, "--out", tmp_path / "other")
    headers = [unsealed(tmp_path / name / "cache.json") for name in ("logits", "other")]
    assert [header["stream"]["masking"]["probability"] for header in headers] == [0.3, 0.15]
    assert headers[0]["unit_samples"] == 50  # of at most two units
    size = sum(path.stat().st_size for path in (tmp_path / "logits").glob("*.npy"))
    assert f"100 samples of 32 tokens, 10 masked tokens each, 64 of 82 predictions kept\n{size:,} bytes; 0 of 2" in said


def test_damage_is_found_and_named(caches, tmp_path):
    assert "sound" in succeeds("bertrain", "teacher", "--verify", caches["few"]).output
    out = shutil.copytree(caches["few"], tmp_path / "logits")
    np.load(out / "unit-00001.ids.npy", mmap_mode="r+")[7] = 65535
    (out / "unit-00002.json").unlink()
    with open(out / "unit-00003.tails.npy", "ab") as file:
        file.write(b"\0")
    sentence = refused("bertrain", "teacher", "--verify", out, kind="damaged")
    assert all(name in sentence for name in ("unit-00001.ids.npy", "unit-00002.json", "unit-00003.tails.npy"))
    for position in (UNIT, 3 * UNIT):
        with refuses("damaged"):
            answers.TeacherCache(out).read(np.array([position]), 83)
    for name, value in [*product(("logprobs", "tails"), (np.nan, np.inf, -np.inf, 0.01, -np.nan)), ("ids", 83)]:
        array = np.load(out / f"unit-00000.{name}.npy", mmap_mode="r+")
        kept, array[7] = array[7], value
        with refuses("damaged"):
            answers.TeacherCache(out).read(np.arange(UNIT), 83)
        array[7] = kept
    header = unsealed(out / "cache.json")
    changes = [{"slots": "3"}, {"units": header["units"][1:]}, {"stream": None}]
    changes += [{"vocab_size": 63}, {"vocab_size": (1 << 24) + 1}]
    for wrong in (*changes, *({"stream": {"variants": variants}} for variants in (0, "2", True, 1 << 32))):
        reseal(out / "cache.json", header | wrong)
        with refuses("damaged"):
            answers.TeacherCache(out)
    (out / "cache.json").unlink()
    with refuses("not-a-dataset"):
        answers.TeacherCache(out)


def test_ids_beyond_16_bits_are_kept(dataset, tmp_path):
    special, tokenizer = replace(SPECIAL, vocab_size=70_001), (dataset.path / "tokenizer.json").read_text()
    more = {"special": special, "dtype": "<u4", "tokenizer": tokenizer}
    shards = write_dataset(tmp_path / "shards", [([*range(60, 160)], [100], None)], **more)
    model = model_of(TINY, SimpleNamespace(special_tokens=special))
    torch.nn.init.constant_(model.get_output_embeddings().bias[70_000], 9.0)
    model.save_pretrained(tmp_path / "big")
    given = ask(SimpleNamespace(path=shards), tmp_path / "big", tmp_path / "logits", "--variants", 1, top_k=2)
    succeeds("bertrain", *given)
    succeeds("bertrain", "teacher", "--verify", tmp_path / "logits")
    found = answers.TeacherCache(tmp_path / "logits").read(np.arange(2), 70_001)
    assert found.ids.dtype == np.uint32
    assert found.ids[:, 0, 0].tolist() == [70_000] * 2


def test_a_cache_without_a_rule_of_masks_is_of_rule_1(dataset, big, caches, tmp_path):
    """Version 0.1.0 wrote caches so, and a run on one has the masks of rule 1."""
    cache = shutil.copytree(caches["few"], tmp_path / "cache")
    header = unsealed(cache / "cache.json")
    header["stream"]["masking"] |= {"random_from": "ordinary"}
    del header["stream"]["masking"]["rule"]
    reseal(cache / "cache.json", header)
    succeeds("bertrain", *ask(dataset, big, cache, "--variants", VARIANTS))
    train(dataset.path, tmp_path / "run", **QUIET, teacher_cache=str(cache), steps=2)
    assert '"rule": 1' in (tmp_path / "run" / "log.jsonl").read_text()


def test_a_cache_that_ends_before_the_run_or_its_variants_is_refused_and_a_complete_one_has_no_end(
    dataset, big, caches, tmp_path
):
    size, few = VARIANTS * loader_of(dataset, caches["few"]).num_samples, tmp_path / "logits"
    succeeds("bertrain", *ask(dataset, big, few, "--variants", VARIANTS, "--max-samples", 20, top_k=4))
    for steps, rows in ((4, 6), (1, size + 5)):
        how = {"kind": "not-stored", "option": "teacher_cache", "given": min(size, steps * rows)}
        options = QUIET | {"steps": steps, "global_batch_size": rows, "micro_batch_size": 64, "teacher_cache": few}
        refused_run(dataset.path, tmp_path / "more", **options, **how)
        assert not (tmp_path / "more" / "log.jsonl").exists()  # before its first step
    for cache, options in ((few, {"steps": 3}), (caches["few"], {"steps": size // 64 + 1, "global_batch_size": 64})):
        train(dataset.path, tmp_path / f"run-{cache.name}", **QUIET, teacher_cache=str(cache), **options)


# --------------------------------------------------------------------------------------------------------------- losses


@given(
    st.integers(1, 4),
    st.integers(2, 12),
    st.integers(1, 12),
    st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    st.integers(0, 2**32),
    st.sampled_from([1.0, 5.0, 20.0]),
)
def test_the_divergence_is_that_of_k_buckets_and_one_for_all_others(rows, size, k, temperature, seed, spread):
    """Also where the others together have less than 1 − Σ could be in float32."""
    student, teacher = np.random.default_rng(seed).normal(size=(2, rows, size)) * spread
    k, order = min(k, size), np.argsort(-teacher, -1)
    for ids, is_cached in ((order[:, :k], True), (order, False)):
        q, p = (in_buckets(logits, ids)[:, :size] ** (1 / temperature) for logits in (student, teacher))
        expected = rel_entr(p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)).sum(-1)
        x, logs = (torch.from_numpy(each).float() for each in (student, np.log(softmax(teacher, -1))))
        tails = torch.from_numpy(in_buckets(teacher, ids)[:, -1]).log().float()
        kept = (logs.gather(-1, torch.from_numpy(ids)), temperature, torch.from_numpy(ids), tails)
        found = distil.divergence(x, *kept) if is_cached else distil.divergence(x, logs, temperature)
        assert found.numpy() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_cached_and_asked_give_the_same_losses(dataset, big, bert_run, caches, tmp_path):
    """Padding of the student's vocabulary is compared with nothing, and the loss of the text is logged apart."""
    padded = {"vocab_size": dataset.special_tokens.vocab_size + 46}
    model = write(tmp_path / "padded.json", json.dumps(json.loads(Path(TINY).read_bytes()) | padded))
    options = QUIET | {"model": str(model), "steps": 8, "lr": 1e-2}
    plain = train(dataset.path, tmp_path / "plain", **options)
    options |= {"distil": "logits", "temperature": 2.0}
    asked = train(dataset.path, tmp_path / "asked", teacher=str(big), **options)
    assert "distil_loss" not in plain[0]
    assert [asked[step]["loss"] == plain[step]["loss"] for step in (0, 1)] == [True, False]
    assert asked[7]["distil_loss"] < 0.9 * asked[0]["distil_loss"]
    for name, tolerance in (("all", 1e-3), ("few", 0.15)):
        log = train(dataset.path, tmp_path / name, teacher_cache=str(caches[name]), **options)
        for ours, theirs in zip(steps_of(log), steps_of(asked), strict=True):
            assert ours["distil_loss"] == pytest.approx(theirs["distil_loss"], rel=tolerance)
            assert ours["agreement"] == pytest.approx(theirs["agreement"], abs=0.1)
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=tolerance / 10)
    other = options | {"steps": 9, "teacher": str(bert_run)}
    refused_run(dataset.path, tmp_path / "asked", **other, kind="other-settings", option="teacher")


# ---------------------------------------------------------------------------------------- relations and hidden states


@pytest.fixture(scope="module")
def pupil(dataset, big, configs):
    """pupil(name or path of a model): a student's module, and a batch of which a row is padded."""

    def made(kind="bert", **options):
        more = {"teacher": str(big), "model": configs.get(kind, kind), "length": 32} | options
        config = config_of(**more)
        module = learner_of(config, model_of(config.model, dataset), dataset)
        samples, number = ("packed", 60) if config.isolate_documents else ("documents", 6)
        return module, bertdata.Loader(dataset, length=32, samples=samples).read(np.arange(number))

    return made


def feed_of(batch):
    return pieces_of(batch)[0]


def taught(module, batch):
    """The losses of a batch, and what the module was given."""
    piece = module.prepare(feed_of(batch))
    return {name: loss.sum for name, loss in module(**piece).items()}, piece


def apart(batch):
    """The ids [1, T] of each document of a batch, and how many tokens its row has."""
    for row, ids in enumerate(batch.input_ids):
        length = len(ids) if batch.attention_mask is None else batch.attention_mask[row].sum()
        begins = [] if batch.position_ids is None else np.flatnonzero(batch.position_ids[row, :length] == 0)[1:]
        for part in np.split(ids[:length], begins):
            yield torch.from_numpy(part[None]), length


def projected(net, ids, layer):
    """Queries, keys and values [T, width] of a layer of a BERT."""
    states = net.bert(input_ids=ids, output_hidden_states=True).hidden_states[layer]
    part = net.bert.encoder.layer[layer].attention.self
    return [linear(states)[0] for linear in (part.query, part.key, part.value)]


def scores(queries, keys, heads):
    """Scores of attention [heads, T, T] of [T, width] each."""
    q, k = (x.unflatten(-1, (heads, -1)).transpose(0, 1) for x in (queries, keys))
    return q @ k.transpose(1, 2) / q.shape[-1] ** 0.5


@pytest.mark.parametrize("isolate", [False, True])
def test_relations_are_those_of_the_last_layers_inside_of_documents(big, pupil, isolate):
    module, batch = pupil(isolate_documents=isolate)
    assert (batch.position_ids is not None) == isolate
    found, piece = taught(module, batch)
    assert all(piece[name].shape == (*batch.input_ids.shape, 48) for name in distil.PROJECTIONS)
    *_, filler = pieces_of(batch, count=2)  # rows without targets
    for loss in module(**module.prepare(filler)).values():
        assert (loss.sum.item(), loss.num_correct.item()) == (0, 0)
    student, teacher, expected = module.model, AutoModelForMaskedLM.from_pretrained(big / "last").eval(), 0.0
    student.set_attn_implementation("sdpa")  # each document is computed alone
    for ids, length in apart(batch):
        for own, others in zip(projected(student, ids, 1), projected(teacher, ids, 3), strict=True):
            q, p = (scores(x, x, 2).double().log_softmax(-1) for x in (own, others))
            expected += (p.exp() * (p - q)).sum().item() / (2 * 3 * length)
    assert found["distil"].item() == pytest.approx(expected, rel=1e-4)


def test_hidden_states_and_attention_are_mapped_as_they_should(big, pupil, tmp_path):
    """By a projection that is trained, and kept in checkpoints as the teacher is not."""
    values = BERT | {"num_attention_heads": 3, "hidden_size": 24}
    (tmp_path / "three.json").write_text(json.dumps(values))
    module, batch = pupil(str(tmp_path / "three.json"), distil="hidden")
    assert module.objectives["distil"].layer_pairs == [(-1, -1), (0, 1), (1, 3)]
    names = {f"objectives.distil.projection.{name}" for name in ("weight", "bias")}
    assert {*module.state_dict()} == {*names, *(f"model.{name}" for name in module.model.state_dict())}
    found, piece = taught(module.train(), batch)
    sum(found.values()).backward()
    assert not piece["teacher_hidden"].requires_grad
    assert module.objectives["distil"].projection.weight.grad.abs().sum() > 0
    own, others, expected = module.model.eval(), AutoModelForMaskedLM.from_pretrained(big / "last").eval(), 0.0
    for ids, _ in apart(batch):
        states = [net.bert(input_ids=ids, output_hidden_states=True).hidden_states for net in (own, others)]
        for mine, theirs in ((0, 0), (1, 2), (2, 4)):
            mapped = module.objectives["distil"].projection(states[0][mine])
            expected += (mapped - states[1][theirs]).square().mean().item() / 3
        for mine, theirs in ((0, 1), (1, 3)):
            q, p = (scores(*projected(net, ids, layer)[:2], 3) for net, layer in ((own, mine), (others, theirs)))
            expected += (q - p).square().mean().item() / 2
    assert found["distil"].item() == pytest.approx(expected, rel=1e-4)


def test_heads_that_share_a_key_are_compared_with_it():
    queries, keys = torch.randn(5, 24), torch.randn(5, 3, 4)  # six heads of 4; two share a key
    found = distil.attention_scores(queries[None], keys.flatten(1)[None], 6)
    torch.testing.assert_close(found[0], scores(queries, keys.repeat_interleave(2, 1).flatten(1), 6))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "method"), [("bert", "hidden"), ("modernbert", "relations"), ("bert", "logits")])
def test_students_compile_to_one_graph_and_recompute_activations(pupil, kind, method):
    options = {"distil": method} | ({"distil_layers": "last"} if method == "hidden" else {})
    module, batch = pupil(kind, **options)
    found, piece = taught(module, batch)
    sum(found.values()).backward()
    plain = {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}
    module.zero_grad()
    recompute_activations(module.model)
    sum(loss.sum for loss in module.train()(**piece).values()).backward()
    torch.testing.assert_close({name: module.get_parameter(name).grad for name in plain}, plain)
    module, batch = pupil(kind, **options)
    module.compile(backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close({name: loss.sum for name, loss in module(**piece).items()}, found)


def test_a_loader_with_a_cache_pickles_small_and_comes_back(dataset, caches):
    options = {"global_batch_size": 50, "epochs": 1}
    assert assert_goes_on(lambda: loader_of(dataset, caches["few"], **options))[0].teacher_logprobs is not None
