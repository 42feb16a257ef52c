"""A teacher's answers: cached to the same bytes whoever makes them, and learned from alike, cached or asked."""

import json
import shutil
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from support import runs
from support.commands import invoke, refused, refuses, succeeds
from support.data import assert_goes_on, assert_same, build
from support.disk import contents, flip
from support.families import SMALL as FAMILIES_HERE
from support.families import model_of
from support.runs import QUIET, TINY, flags, learner, learner_of, losses, on_ranks, refused_run, train

import bertdata
from bertdata.format.records import read_record, write_record
from bertrain import checkpoint
from bertrain.commands import doctor
from bertrain.config import Config
from bertrain.data import micro_batches
from bertrain.lab.distillation import answers, teacher
from bertrain.lab.distillation import objective as distil
from bertrain.lab.distillation.objective import divergence
from bertrain.lab.fingerprint import fingerprint
from bertrain.models.encoder import recompute_activations
from bertrain.models.load import load_model
from bertrain.pretrain import main as pretrain_main

BERT = FAMILIES_HERE["bert"] | {"model_type": "bert"}
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
    return [str(item) for item in [*options, "--batch-size", 8, "--unit-samples", UNIT, *more]]


@pytest.fixture(scope="module")
def caches(dataset, big, once):
    """Of all tokens and of 64 of the 82, for all masked samples of two epochs."""

    def make(folder):
        for name, top_k in (("all", dataset.special_tokens.vocab_size), ("few", 64)):
            succeeds(teacher.main, *ask(dataset, big, folder / name, "--variants", VARIANTS, top_k=top_k))

    return {name: once("caches", make) / name for name in ("all", "few")}


def loader_of(dataset, cache=None, **more):
    if cache:
        return answers.TaughtLoader(dataset, length=32, masking=bertdata.Masking(), teacher_cache=str(cache), **more)
    return bertdata.Loader(dataset, length=32, variants=VARIANTS, **more)


# ------------------------------------------------------------------------------------------------------------ variants


@pytest.mark.parametrize("shuffle", ["full", "blocks"])
def test_with_variants_the_stream_comes_round_and_is_the_same_until_then(dataset, shuffle):
    options = {"length": 32, "shuffle": shuffle, "global_batch_size": 50}
    plain, turning = bertdata.Loader(dataset, **options), bertdata.Loader(dataset, variants=2, **options)
    n = plain.num_samples
    for _ in range(3 * n // 50):
        start, batch = turning.position, next(turning)
        again = plain.read(np.arange(start, start + 50) % (2 * n))
        assert_same(batch, again)
    assert not np.array_equal(plain.read(np.arange(20)).input_ids, plain.read(np.arange(20) + 2 * n).input_ids)


# --------------------------------------------------------------------------------------------------------------- cache


def test_a_cache_holds_the_most_probable_tokens_of_the_softmax_and_the_mass_of_the_others(dataset, big, caches):
    loader = loader_of(dataset, caches["few"])
    weights = learner(load_model(checkpoint.find(big))).eval()
    short = int(loader.read(np.arange(loader.num_samples)).sample_ids.argmax())  # the last row of the text
    positions = np.array([0, 1, 35, 36, 37, 38, short, 2 * loader.num_samples + 4, 2 * loader.num_samples - 1])
    batch = loader.read(positions)
    masks = None if batch.attention_mask is None else torch.from_numpy(batch.attention_mask)
    with torch.no_grad():
        ids, positions = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.masked_positions)
        logits = weights.logits(input_ids=ids, masked_positions=positions, attention_mask=masks)
    truth = logits.double().softmax(-1).numpy()
    used = batch.targets != bertdata.IGNORE_INDEX
    assert batch.teacher_ids.shape == (9, 5, 64)
    assert batch.teacher_ids.dtype == np.uint16
    for row, slot in zip(*np.nonzero(used), strict=True):
        ids = batch.teacher_ids[row, slot]
        kept = truth[row, slot][ids]
        assert np.allclose(np.exp(batch.teacher_logprobs[row, slot].astype(float)), kept, rtol=6e-3)
        assert kept.min() >= np.delete(truth[row, slot], ids).max() - 1e-6
        assert np.exp(float(batch.teacher_tails[row, slot])) == pytest.approx(1 - kept.sum(), rel=6e-3)
    assert not used.all()
    for array in (batch.teacher_ids, batch.teacher_logprobs, batch.teacher_tails):
        assert not array[~used].view(np.uint16).any()
    pieces = list(micro_batches(batch, size=8, count=3, device=runs.CPU))
    assert pieces[2]["teacher_ids"].shape == (1, 5, 64)


def test_the_bytes_are_planned_and_the_header_names_the_teacher_and_sums_what_it_says(dataset, big, caches, tmp_path):
    done = succeeds(teacher.main, *ask(dataset, big, tmp_path / "logits", "--max-samples", 100, top_k=8))
    files = [path.stat().st_size for path in (tmp_path / "logits").glob("*.npy")]
    assert len(files) == 9
    assert f"{sum(files):,} bytes" in done.output
    header = answers.read_header(caches["few"])
    assert header["teacher"]["sha256"] == fingerprint(load_model(checkpoint.find(big)))
    sums = [sum(unit["counts"][name] for unit in header["units"]) for name in ("targets", "entropy", "tail_mass")]
    loader = loader_of(dataset, caches["all"])
    batch = loader.read(np.arange(2 * loader.num_samples))
    used = batch.targets != bertdata.IGNORE_INDEX
    assert sums[0] == used.sum()
    logprobs = batch.teacher_logprobs[used].astype(float)
    assert sums[1] / sums[0] == pytest.approx(-(np.exp(logprobs) * logprobs).sum(-1).mean(), rel=1e-2)
    assert sums[2] / sums[0] == pytest.approx(np.exp(logprobs[:, 64:]).sum(-1).mean(), rel=1e-2)


def test_a_cache_has_the_masks_of_a_recipe_whose_rows_are_all_alike(dataset, big, tmp_path):
    for number, (more, share) in enumerate((([], 0.3), (["--mlm-probability", 0.15], 0.15))):
        out = tmp_path / str(number)
        succeeds(teacher.main, *ask(dataset, big, out, "--max-samples", 40), "--recipe", "tiny", *more)
        stream = answers.read_header(out)["stream"]
        assert (stream["masking"]["probability"], stream["length"]) == (share, 32)
    options = ask(dataset, big, tmp_path / "other", "--max-samples", 40)
    for name, kind in (("modernbert-base", "conflict"), ("huge", "unknown")):
        refused(teacher.main, *options, "--recipe", name, kind=kind, option="recipe")


@pytest.mark.slow
def test_ranks_share_the_work_and_write_the_same_bytes(dataset, big, caches, tmp_path):
    out = tmp_path / "logits"
    shown, _ = on_ranks(3, "bertrain", ["teacher", *ask(dataset, big, out, "--variants", VARIANTS)])
    assert shown.count(str(out)) == 2  # each line is printed by one rank
    assert contents(out) == contents(caches["few"])


def test_a_cache_belongs_to_its_samples_and_its_teacher(dataset, big, caches, bert_run, tmp_path):
    """It is not continued for others, and no student of other samples learns from it."""
    before, known = contents(caches["few"]), {"teacher_cache": caches["few"], "option": "teacher_cache"}
    digests = [fingerprint(load_model(checkpoint.find(run))) for run in (big, bert_run)]
    for name, value, named in (
        ("seed", 1, "seed 0 → 1"),
        ("length", 24, "length 32 → 24"),
        ("mlm_probability", 0.2, "probability 0.15 → 0.2"),
        ("masking", "whole_word", "policy exact → whole_word"),
        ("shuffle", "blocks", "shuffle full → blocks"),
        ("isolate_documents", True, "samples windows → packed"),
        ("top_k", 8, "top_k 64 → 8"),
        ("variants", 3, "variants 2 → 3"),
        ("model", bert_run, f"sha256 {digests[0]} → {digests[1]}"),
    ):
        if name not in ("top_k", "variants", "model"):
            change = {"data_seed" if name == "seed" else name: value}
            refused_run(dataset.path, tmp_path / "run", steps=2, **known, **change, kind="other-stream", says=named)
        change = ["--samples", "packed"] if value is True else [f"--{name.replace('_', '-')}", value]
        given = ask(dataset, big, caches["few"], "--variants", VARIANTS, *change)
        refused(teacher.main, *given, kind="other-settings", option="out", says=named)
    assert contents(caches["few"]) == before
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_work_without_end_or_beyond_the_limit_is_refused(dataset, big, tmp_path, monkeypatch):
    arguments, few = ask(dataset, big, tmp_path / "logits"), ["--max-samples", 10]
    for more, kind, option in (
        ([], "missing", "max_samples"),
        ([*few, "--length", 600], "too-long", "length"),
        ([*few, "--mlm-probability", 0.001], "too-short-to-mask", "mlm_probability"),
    ):
        refused(teacher.main, *arguments, *more, kind=kind, option=option)
        assert not any((tmp_path / "logits").glob("*"))
    refused(teacher.main, *arguments, *few, "--out", dataset.path, kind="out-exists", option="out")
    free = lambda path: SimpleNamespace(free=500)  # noqa: E731
    for owner, name, value, says in ((teacher, "LIMIT_BYTES", 1000, "bytes"), (shutil, "disk_usage", free, "500")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            refused(teacher.main, *arguments, *few, kind="missing", option="yes", says=says)
            succeeds(teacher.main, *arguments, *few, "--yes")
        shutil.rmtree(tmp_path / "logits")
    monkeypatch.setattr(teacher, "MOST_UNITS", 2)
    succeeds(teacher.main, *arguments, "--max-samples", 100, "--unit-samples", 49, "--top-k", 10**6)
    header = answers.read_header(tmp_path / "logits")
    assert (header["unit_samples"], header["top_k"]) == (50, dataset.special_tokens.vocab_size)


def test_damage_is_found_and_named(caches, tmp_path):
    assert "sound" in succeeds(teacher.main, "--verify", caches["few"]).output
    out = shutil.copytree(caches["few"], tmp_path / "logits")
    flip(out / "unit-00001.ids.npy", 500)
    np.load(out / "unit-00001.ids.npy", mmap_mode="r+")[7] = 65535
    (out / "unit-00002.json").unlink()
    with open(out / "unit-00003.tails.npy", "ab") as file:
        file.write(b"\0")
    refusal = refused(teacher.main, "--verify", out, kind="damaged")
    for name in ("unit-00001.ids.npy", "unit-00002.json", "unit-00003.tails.npy"):
        assert name in refusal.sentence
    for position in (UNIT, 3 * UNIT):
        with refuses("damaged"):
            answers.TeacherCache(out).read(np.array([position]), 83)
    for value in (np.nan, np.inf, -np.inf, 0.01, -np.nan):
        for name in ("logprobs", "tails"):
            for each in ("logprobs", "tails"):
                shutil.copy(caches["few"] / f"unit-00000.{each}.npy", out)
            np.load(out / f"unit-00000.{name}.npy", mmap_mode="r+")[7] = value
            with refuses("damaged"):
                answers.TeacherCache(out).read(np.arange(UNIT), 83)
    header = read_record(out / "cache.json")
    changes = [{"top_k": 10**6}, {"slots": "3"}, {"units": header["units"][1:]}, {"stream": None}, {"stream": [1]}]
    changes += [{"stream": {"variants": variants}} for variants in (0, "2", 1.0, True, 1 << 70)]
    for wrong in changes:
        write_record(out / "cache.json", header | wrong)
        with refuses("damaged"):
            answers.TeacherCache(out)
    (out / "cache.json").unlink()
    with refuses("not-a-dataset"):
        answers.TeacherCache(out)


HEADER = {"format": answers.FORMAT, "format_version": 1, "teacher": {"sha256": ""}, "tokenizer": "", "stream": {}}
HEADER |= {"epoch_samples": 5, "epoch_tokens": 50, "samples": 5, "slots": 1, "vocab_size": 70_001, "top_k": 2}
HEADER |= {"id_dtype": "<u4", "unit_samples": 3, "batch_samples": 3}


def wide(out):
    """A cache of five rows of one slot, of a vocabulary beyond 65,536."""
    out.mkdir()
    for number in answers.begin(out, HEADER):
        first, stop = answers.rows_of(HEADER, number)
        rows = stop - first
        repeated = (np.tile(array, (rows, 1, 1)) for array in (np.uint32([70_000, 3]), np.float16([-0.5, -1.5])))
        found = answers.Answers(*repeated, np.full((rows, 1), -1.8, np.float16))
        sums = {"samples": rows, "targets": rows, "entropy": 1.0, "tail_mass": 0.1}
        answers.write_unit(out, HEADER, number, [(found, sums)])
    answers.publish(out, HEADER)


def test_ids_beyond_16_bits_are_kept(tmp_path):
    wide(tmp_path / "logits")
    succeeds(teacher.main, "--verify", tmp_path / "logits")
    found = answers.TeacherCache(tmp_path / "logits").read(np.arange(5), 70_001)
    assert found.ids.dtype == np.uint32
    assert found.ids[:, 0].tolist() == [[70_000, 3]] * 5


def test_a_cache_without_a_rule_of_masks_is_of_rule_1(dataset, big, caches, tmp_path):
    """Version 0.1.0 wrote caches so, and a run on one has the masks of rule 1."""
    cache = tmp_path / "cache"
    shutil.copytree(caches["few"], cache)
    header = read_record(cache / "cache.json")
    header["stream"]["masking"] |= {"random_from": "ordinary"}
    del header["stream"]["masking"]["rule"]
    write_record(cache / "cache.json", header)
    assert loader_of(dataset, cache).masking == bertdata.Masking(rule=1)
    succeeds(teacher.main, *ask(dataset, big, cache, "--variants", VARIANTS))
    options = QUIET | {"teacher_cache": str(cache), "steps": 2, "isolate_documents": False}
    train(dataset.path, tmp_path / "run", **options)
    assert '"rule": 1' in (tmp_path / "run" / "log.jsonl").read_text()


# ------------------------------------------------------------------------------------------------------------- refusals


def test_another_dataset_or_tokenizer_is_refused(dataset, corpus, vocab, big, caches, tmp_path):
    build([corpus], tmp_path / "same", tokenizer=vocab)
    build([corpus], tmp_path / "other", vocab_size=60)
    known = {"kind": "other-stream", "option": "teacher_cache"}
    for name, named in (("same", "dataset_id "), ("other", "tokenizer ")):
        refused_run(tmp_path / name, tmp_path / "run", teacher_cache=caches["few"], model=TINY, **known, says=named)
    given = ["--data", tmp_path / "same", "--out", tmp_path / "run", "--length", 32, "--teacher-cache", caches["few"]]
    assert bertdata.open(tmp_path / "same").dataset_id in invoke(doctor.main, *given).output
    refused_run(tmp_path / "other", tmp_path / "run", teacher=big, kind="tokenizer-differs")


@pytest.mark.parametrize("command", [pretrain_main, pytest.param(doctor.main, marks=pytest.mark.slow)])
def test_a_cache_that_ends_before_the_run_or_its_variants_is_refused_and_a_complete_one_has_no_end(
    dataset, big, caches, tmp_path, command
):
    """A run of more than a round of the variants, whose last sample is one of the first of a round."""
    size, few = VARIANTS * loader_of(dataset).num_samples, tmp_path / "logits"
    succeeds(teacher.main, *ask(dataset, big, few, "--variants", VARIANTS, "--max-samples", 20, top_k=4))
    for steps, rows, is_refused in ((3, 6, False), (4, 6, True), (1, size + 5, True)):
        given = flags(dataset.path, tmp_path / f"run{steps}{rows}", steps=steps, global_batch_size=rows, **QUIET)
        done = invoke(command, *given, "--micro-batch-size", 64, "--teacher-cache", few)
        assert done.exit_code == (is_refused and (2 if command is pretrain_main else 1)), done.output
        assert not is_refused or f"{min(size, steps * rows):,}" in done.output
    more = ["--steps", size // 8 + 5, "--global-batch-size", 8, "--teacher-cache", caches["few"], "--eval-every", 0]
    succeeds(command, *flags(dataset.path, tmp_path / "run"), *more)


def test_a_run_does_not_change_its_teacher(dataset, big, bert_run, tmp_path):
    options = QUIET | {"distil": "logits"}
    train(dataset.path, tmp_path / "run", steps=1, teacher=str(big), **options)
    known = {"kind": "other-settings", "option": "teacher"}
    refused_run(dataset.path, tmp_path / "run", steps=2, teacher=str(bert_run), **options, **known)


# --------------------------------------------------------------------------------------------------------------- losses


def plainly(logits, logprobs, temperature, ids, tails):
    """The divergence with a bucket for the others, in float64, bucket by bucket."""
    found = []
    for row in range(len(logits)):
        q = np.exp(logits[row] - logits[row].max())
        q /= q.sum()
        others = [token for token in range(q.size) if token not in ids[row]]
        p = np.exp(np.append(logprobs[row], tails[row]) if others else logprobs[row])
        q = np.append(q[ids[row]], q[others].sum()) if others else q[ids[row]]
        p, q = (x ** (1 / temperature) / (x ** (1 / temperature)).sum() for x in (p, q))
        found.append(sum(a * np.log(a / b) for a, b in zip(p, q, strict=True) if a > 0))
    return np.array(found)


@given(
    st.integers(1, 4),
    st.integers(2, 12),
    st.integers(1, 12),
    st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    st.integers(0, 2**32),
    st.sampled_from([1.0, 5.0, 20.0]),
)
def test_the_divergence_is_that_of_k_buckets_and_one_for_all_others(rows, size, k, temperature, seed, spread):
    k, chance = min(k, size), np.random.default_rng(seed)
    logits, others = chance.normal(size=(2, rows, size)) * spread
    p = np.exp(others - others.max(-1, keepdims=True))
    logp = np.log(p / p.sum(-1, keepdims=True))
    ids = np.argsort(-logp, -1)[:, :k]
    kept = np.take_along_axis(logp, ids, -1)
    rest = np.array([np.delete(np.exp(row), some).sum() for row, some in zip(logp, ids, strict=True)])
    tails = np.log(np.maximum(rest, 1e-300))
    x = torch.tensor(logits)
    found = divergence(x, torch.tensor(kept), temperature, torch.tensor(ids), torch.tensor(tails))
    assert found.numpy() == pytest.approx(plainly(logits, kept, temperature, ids, tails), rel=1e-6, abs=1e-9)
    complete = divergence(x, torch.tensor(logp), temperature)
    if k == size:
        assert found.numpy() == pytest.approx(complete.numpy(), rel=1e-6, abs=1e-9)
    elif temperature == 1:
        assert (found <= complete + 1e-9).all()


def test_the_mass_of_all_others_may_be_tiny():
    certain = torch.tensor([[60.0, 0.0, 0.0]], requires_grad=True)  # 1 − Σ would be 0 in float32
    found = divergence(certain, torch.tensor([[-0.1]]), 1.0, torch.tensor([[0]]), torch.tensor([-2.35]))
    found.sum().backward()
    assert found.item() == pytest.approx(plainly(certain.detach().numpy(), [[-0.1]], 1.0, [[0]], [-2.35])[0], rel=5e-3)
    assert certain.grad[0, 0] > 0.05


def test_cached_and_asked_give_the_same_losses(dataset, big, caches, tmp_path):
    options = QUIET | {"steps": 4, "distil": "logits", "temperature": 2.0}
    asked = train(dataset.path, tmp_path / "asked", teacher=str(big), **options)
    for name, tolerance in (("all", 1e-3), ("few", 0.15)):
        log = train(dataset.path, tmp_path / name, teacher_cache=str(caches[name]), **options)
        for ours, theirs in zip(log, asked, strict=True):
            if "distil_loss" in ours:
                assert ours["distil_loss"] == pytest.approx(theirs["distil_loss"], rel=tolerance)
                assert ours["agreement"] == pytest.approx(theirs["agreement"], abs=0.1)
                assert ours["loss"] == pytest.approx(theirs["loss"], rel=tolerance / 10)


def test_the_padding_of_a_students_vocabulary_is_compared_with_nothing(dataset, pupil, caches):
    """So that cached and asked agree for it too."""
    weights = model_of(TINY, dataset)
    weights.resize_token_embeddings(dataset.special_tokens.vocab_size + 46, mean_resizing=False)
    torch.nn.init.constant_(weights.get_output_embeddings().bias[dataset.special_tokens.vocab_size :], 5.0)
    found = []
    for more in ({"teacher_cache": str(caches["all"]), "teacher": ""}, {"distil": "logits"}):
        module, _ = pupil(weights=weights, **more)
        loader = loader_of(dataset, more.get("teacher_cache"))
        found.append(taught(module.eval(), loader.read(np.arange(6)))[0]["distil"].item())
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_the_loss_of_the_text_is_logged_apart(dataset, caches, tmp_path):
    options = QUIET | {"steps": 3, "lr": 1e-2, "eval_every": 3}
    plain = train(dataset.path, tmp_path / "plain", **options)
    silent = train(dataset.path, tmp_path / "silent", teacher_cache=str(caches["few"]), alpha=0.0, **options)
    options |= {"teacher_cache": str(caches["few"]), "steps": 20, "eval_every": 0}
    taught = train(dataset.path, tmp_path / "taught", alpha=1.0, **options)
    assert losses(silent) == losses(plain)  # to the bit: a teacher without a share changes nothing
    assert taught[0]["loss"] == plain[0]["loss"]
    assert taught[1]["loss"] != plain[1]["loss"]
    assert "distil_loss" not in plain[0]
    distil_losses = [entry["distil_loss"] for entry in taught if "lr" in entry]
    assert distil_losses[-1] < 0.6 * distil_losses[0]


# ---------------------------------------------------------------------------------------- relations and hidden states


@pytest.fixture(scope="module")
def pupil(dataset, big, configs):
    """pupil(name or path of a model): a student's module, and a batch of which a row is padded."""

    def made(kind="bert", *, weights=None, **options):
        more = {"teacher": str(big), "model": configs.get(kind, kind), "length": 32} | options
        config = Config.make(data=str(dataset.path), out="nowhere", **more)
        weights = weights or model_of(config.model, dataset)
        module = learner_of(config, weights, dataset)
        samples, number = ("packed", 60) if config.isolate_documents else ("documents", 6)
        return module, bertdata.Loader(dataset, length=32, samples=samples).read(np.arange(number))

    return made


def feed_of(batch):
    return next(micro_batches(batch, size=len(batch.targets), count=1, device=runs.CPU))


def taught(module, batch):
    """The losses of a batch, and what the module was given."""
    piece = module.prepare(feed_of(batch))
    return {name: loss.sum for name, loss in module(**piece).items()}, piece


def one_by_one(batch):
    """The ids of each row, without padding."""
    lengths = batch.attention_mask.sum(1).tolist()
    return [torch.from_numpy(ids[None, :length]) for ids, length in zip(batch.input_ids, lengths, strict=True)]


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_relations_are_those_of_the_last_layers(big, pupil, kind):
    module, batch = pupil(kind)
    found, piece = taught(module, batch)
    assert all(piece[name].shape == (6, 32, 48) for name in distil.PROJECTIONS)
    weights, teaching, expected = module.model, load_model(checkpoint.find(big)).eval(), 0.0
    for ids in one_by_one(batch):
        vectors = []
        for net in (weights, teaching):
            states = net.base_model(input_ids=ids, output_hidden_states=True).hidden_states[-2][0]
            if net.config.model_type == "bert":
                part = net.bert.encoder.layer[-1].attention.self
                vectors.append([part.query(states), part.key(states), part.value(states)])
            else:
                part = net.model.layers[-1]
                vectors.append(part.attn.Wqkv(part.attn_norm(states)).chunk(3, -1))
        for own, others in zip(*vectors, strict=True):
            for head in range(2):
                q, p = ((x[:, head * x.shape[1] // 2 : (head + 1) * x.shape[1] // 2]).double() for x in (own, others))
                p, q = ((x @ x.T / x.shape[1] ** 0.5).softmax(-1) for x in (p, q))
                expected += (p * (p / q).log()).sum(-1).mean().item() / 6
    assert found["distil"].item() == pytest.approx(expected, rel=1e-4)


def test_hidden_states_and_attention_are_mapped_as_they_should(big, pupil, tmp_path):
    values = BERT | {"num_attention_heads": 3, "hidden_size": 24}
    (tmp_path / "three.json").write_text(json.dumps(values))
    module, batch = pupil(str(tmp_path / "three.json"), distil="hidden")
    assert module.objectives["distil"].layer_pairs == [(-1, -1), (0, 1), (1, 3)]
    found, _ = taught(module, batch)
    own, others, expected = module.model.eval(), load_model(checkpoint.find(big)).eval(), 0.0
    for ids in one_by_one(batch):
        states = [net.bert(input_ids=ids, output_hidden_states=True).hidden_states for net in (own, others)]
        for mine, theirs in ((0, 0), (1, 2), (2, 4)):
            mapped = module.objectives["distil"].projection(states[0][mine])
            expected += (mapped - states[1][theirs]).square().mean().item() / 3
        for mine, theirs in ((0, 1), (1, 3)):
            scores = []
            for net, layer, hidden in ((own, mine, states[0]), (others, theirs, states[1])):
                part = net.bert.encoder.layer[layer].attention.self
                q, k = (f(hidden[layer])[0].unflatten(-1, (3, -1)).transpose(0, 1) for f in (part.query, part.key))
                scores.append(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5)
            expected += (scores[0] - scores[1]).square().mean().item() / 2
    assert found["distil"].item() == pytest.approx(expected, rel=1e-4)


def test_heads_that_share_a_key_are_compared_with_it():
    queries, keys = torch.randn(2, 5, 24), torch.randn(2, 5, 12)  # six heads of 4; two share a key
    found = distil.attention_scores(queries, keys, 6)
    for head in range(6):
        q, k = queries[..., 4 * head : 4 * head + 4], keys[..., 4 * (head // 2) : 4 * (head // 2) + 4]
        torch.testing.assert_close(found[:, head], q @ k.transpose(1, 2) / 2)


def test_relations_stay_in_their_document(pupil):
    module, batch = pupil(isolate_documents=True)
    assert taught(module, batch)[0]["distil"] > 0
    row = int(((batch.position_ids == 0).sum(1) > 1).argmax())
    second = int(np.flatnonzero(batch.position_ids[row] == 0)[1])
    ids, positions = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.position_ids)
    seen, _ = distil.visible({"input_ids": ids, "position_ids": positions}, isolate=True)
    assert seen[row, 0, 0].nonzero().flatten().tolist() == list(range(second))


def test_a_teacher_is_no_part_of_its_student(pupil):
    module, batch = pupil(distil="hidden")
    names = {f"objectives.distil.projection.{name}" for name in ("weight", "bias")}
    assert checkpoint.objective_tensors(module).keys() == names
    assert {*module.state_dict()} == {*names, *(f"model.{name}" for name in module.model.state_dict())}
    found, piece = taught(module.train(), batch)
    sum(found.values()).backward()
    assert not piece["teacher_hidden"].requires_grad
    assert module.objectives["distil"].projection.weight.grad.abs().sum() > 0
    again = taught(module, batch)[1]  # in eval mode: no dropout
    assert torch.equal(again["teacher_hidden"], piece["teacher_hidden"])


def test_rows_without_targets_teach_nothing(pupil):
    module, batch = pupil()
    *_, filler = micro_batches(batch, size=6, count=2, device=runs.CPU)
    for loss in module(**module.prepare(filler)).values():
        assert (loss.sum.item(), loss.num_correct.item()) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "method"), [("bert", "hidden"), ("modernbert", "relations"), ("bert", "logits")])
def test_students_compile_to_one_graph_and_recompute_activations(pupil, kind, method):
    options = {"distil": method} | ({"distil_layers": "last"} if method == "hidden" else {})
    module, batch = pupil(kind, **options)
    found, piece = taught(module, batch)
    sum(found.values()).backward()
    plain = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    recompute_activations(module.model)
    sum(loss.sum for loss in module.train()(**piece).values()).backward()
    for ours, theirs in zip(module.parameters(), plain, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours.grad, theirs)
    module, batch = pupil(kind, **options)
    module.compile(backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close({name: loss.sum for name, loss in module(**piece).items()}, found)
    with torch.no_grad():
        module.eval().logits(**piece)  # an evaluation, between two steps
    module.train()
    with torch._dynamo.config.patch(error_on_recompile=True):
        module(**piece)


def test_teachers_that_do_not_fit_are_refused(pupil, tmp_path):
    (tmp_path / "deep.json").write_text(json.dumps(BERT | {"num_hidden_layers": 6}))
    with refuses("unsupported", "distil_layers"):
        pupil(str(tmp_path / "deep.json"), distil="hidden")
    with refuses("too-long", "length"):
        pupil("modernbert", length=600)
    with refuses("not-a-run", "teacher"):
        pupil(teacher=str(tmp_path))


def test_a_loader_with_a_cache_pickles_small_and_comes_back(dataset, caches):
    options = {"global_batch_size": 50, "epochs": 1}
    assert assert_goes_on(lambda: loader_of(dataset, caches["few"], **options))[0].teacher_logprobs is not None
