"""Every family of models learns from the logits that transformers gives for it, and every command takes it."""

import json

import pytest
import torch
from support.commands import json_of, refuses, succeeds, tuning
from support.data import ROOT, write_labelled
from support.disk import write
from support.families import DECODERS, EVERY, LISTED, SIZES, VARIANTS, fast, four_rows, hidden_one_by_one, packed_rows
from support.families import model_of as built
from support.runs import CPU, config_of, learner, learner_of, train, train_twice
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, BertConfig, BertForMaskedLM

import bertdata
from bertrain.lab.distillation.taps import EMBEDDINGS, Taps, projections_of, readable
from bertrain.models.encoder import WHOLE_ROWS, mask_of_padding, recompute_activations
from bertrain.models.families import FAMILIES, layers_of
from bertrain.models.load import check_runs, load_model, start_from
from bertrain.trainer import resolve_precision


@pytest.fixture(scope="module")
def dataset(roberta_dataset):
    return roberta_dataset


METHODS = {"attention": "logits, relations, hidden", "hidden": "logits, hidden", None: "logits"}
"""What can be read of a model → the values of --distil."""


def test_the_page_of_models_has_every_family_with_its_facts():
    text = (ROOT / "docs" / "models.md").read_text()
    page = text.split("## The table of families")[1].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    assert {name: facts for names, *facts in rows for name in names.split(", ")} == {
        name: [
            "after padding" if family.positions_after_padding else "0",
            family.isolation or "no",
            METHODS[readable(name)],
        ]
        for name, family in FAMILIES.items()
    }


@pytest.mark.parametrize("samples", ["documents", "windows"])
@pytest.mark.parametrize("name", fast(EVERY | VARIANTS, "roberta", "albert"))
def test_loss_and_gradients_are_those_of_transformers(configs, dataset, name, samples):
    """And the same to the bit if activations are computed again in the backward pass, or that is refused."""
    batch, piece = four_rows(dataset, 40, samples=samples)
    assert (batch.attention_mask is None) == (samples == "windows")
    weights = built(configs[name], dataset).train()
    module = learner(weights)
    buffers = {path: buffer.clone() for path, buffer in weights.named_buffers()}
    loss, num_correct = module(**piece)["mlm"]
    ours = loss / (batch.labels != bertdata.IGNORE_INDEX).sum()
    ours.backward()
    gradients = {path: parameter.grad for path, parameter in weights.named_parameters()}
    # Ranks wait for the gradient of each parameter that is trained, if the learner does not tell them otherwise.
    is_complete = all(gradients[path] is not None for path, one in weights.named_parameters() if one.requires_grad)
    assert is_complete or module.leaves_unused
    # Nor are buffers copied between ranks, if the family is in the table.
    assert module.is_dense or all(torch.equal(buffer, buffers[path]) for path, buffer in weights.named_buffers())
    weights.zero_grad()
    labels = torch.from_numpy(batch.labels)
    theirs = weights(input_ids=piece["input_ids"], attention_mask=piece.get("attention_mask")).logits
    expected = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), labels.flatten())
    expected.backward()
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert num_correct == (theirs.argmax(-1) == labels).sum()
    for path, parameter in weights.named_parameters():
        torch.testing.assert_close(gradients[path], parameter.grad, rtol=1e-5, atol=1e-5, msg=path)
    if name.split()[0] in ("albert", "mpnet", "squeezebert", "flaubert", "xlm", "ibert"):
        with refuses("unsupported", "gradient_checkpointing"):
            recompute_activations(weights)
        return
    recompute_activations(weights)
    passes = []
    inner = next(module for module in layers_of(weights)[0].modules() if isinstance(module, torch.nn.Linear))
    inner.register_forward_hook(lambda *_: passes.append(1))
    again = learner(weights)(**piece)["mlm"].sum
    assert torch.equal(again, loss)
    before = len(passes)
    again.backward()
    assert len(passes) == 2 * before


@pytest.mark.slow
@pytest.mark.parametrize("name", LISTED)
def test_a_step_of_every_family_is_one_graph(configs, dataset, name):
    """As --compile on asks; with --gradient-checkpointing too."""
    torch.compiler.reset()
    weights = built(configs[name], dataset)
    if name == "bert":
        recompute_activations(weights)
    plain = learner(weights).train()
    _, piece = four_rows(dataset, 40, samples="documents")
    expected = plain(**piece)["mlm"]
    loss = torch.compile(plain, backend="eager", fullgraph=True, dynamic=False)(**piece)["mlm"]
    torch.testing.assert_close(loss.sum, expected.sum)
    assert torch.equal(loss.num_correct, expected.num_correct)
    loss.sum.backward()


@pytest.mark.parametrize("name", [name for name in LISTED if FAMILIES[name].isolation == "kernel"])
@pytest.mark.parametrize("samples", ["windows", "documents"])
@torch.no_grad()
def test_a_model_without_masks_computes_what_it_does_with_them(configs, dataset, name, samples):
    """Rows with padding keep theirs."""
    weights = built(configs[name], dataset).eval()
    _, piece = four_rows(dataset, 40, samples=samples)
    rows = {key: piece[key] for key in ("input_ids", "attention_mask") if key in piece}
    assert ("attention_mask" in rows) == (samples == "documents")
    expected = weights(**rows).logits
    weights.set_attn_implementation(WHOLE_ROWS)
    with torch.device("meta"):  # as above
        logits = weights(**rows).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    causal = {"mask_function": lambda batch, head, query, key: query >= key, "allow_is_causal_skip": False}
    mask = mask_of_padding(use_vmap=True, batch_size=1, q_length=3, kv_length=3, **causal)  # that a model adds to
    assert mask[0, 0].equal(torch.ones(3, 3).tril().bool())


@pytest.mark.parametrize("name", fast(EVERY, "deberta", "fnet"))
def test_bf16_is_close_or_refused(configs, dataset, name):
    isolate, loss = name in FAMILIES and FAMILIES[name].isolation is not None, {}
    _, piece = four_rows(dataset, 40, samples="packed" if isolate else "documents")
    for precision in ("fp32", "bf16"):
        config = config_of(precision=precision, length=32, isolate_documents=isolate)
        weights = built(configs[name], dataset)
        if precision == "bf16" and name in FAMILIES and not FAMILIES[name].half:
            with refuses("unsupported", "precision"):
                resolve_precision(config, CPU, weights)
            return
        module = learner_of(config, weights, dataset, resolve_precision(config, CPU, weights))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss[precision] = module(**piece)["mlm"].sum
        loss[precision].backward()
    assert loss["bf16"].item() == pytest.approx(loss["fp32"].item(), rel=0.02)
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("name", fast(LISTED))
def test_an_encoder_without_heads_is_a_start_and_half_an_encoder_is_none(configs, dataset, tmp_path, name, capfd):
    encoder = AutoModel.from_config(built(configs[name], dataset).config)
    encoder.save_pretrained(tmp_path)
    weights, warnings = start_from(str(tmp_path), dataset, length=32)
    assert weights.config.model_type == name
    assert warnings or name == "gemma3_text"  # whose only head is the embeddings
    assert capfd.readouterr().err == ""  # transformers would print a table
    state = encoder.state_dict()
    embeddings = next(number for number, value in state.items() if value.shape[0] == encoder.config.vocab_size)
    encoder.save_pretrained(tmp_path, state_dict={k: v for k, v in state.items() if k != embeddings})
    with refuses("weights-missing", "init", says=embeddings):
        start_from(str(tmp_path), dataset, length=32)
    with refuses("weights-missing"):
        load_model(tmp_path)


ISOLATED = [name for name in LISTED | VARIANTS if FAMILIES[name.split()[0]].isolation]


@pytest.mark.parametrize("name", fast(ISOLATED, "roberta", "mpnet", "esm", "esm with positions", *DECODERS))
def test_packed_documents_are_what_they_are_apart(configs, dataset, name):
    weights, (ids, positions) = built(configs[name], dataset).eval(), packed_rows()
    apart = hidden_one_by_one(weights, ids)
    with torch.no_grad():
        leaking = weights.base_model(input_ids=ids).last_hidden_state
        with torch.device("meta"):  # where a tensor would be that is not put on the device of the rows
            together = learner(weights, isolate=True).encode(ids, position_ids=positions)
    torch.testing.assert_close(together, apart, rtol=0, atol=2e-6)
    assert (leaking - apart).abs().max() > 1e-4


@pytest.mark.parametrize("name", fast(name for name in EVERY if name not in FAMILIES or not FAMILIES[name].isolation))
def test_what_cannot_keep_documents_apart_is_refused(configs, dataset, name):
    with refuses("unsupported", "isolate_documents"):
        learner(built(configs[name], dataset), isolate=True)


@pytest.mark.parametrize("name", fast([name for name in LISTED if readable(name)], "albert"))
def test_what_is_tapped_are_hidden_states_and_linear_maps_of_what_comes_before(configs, dataset, name):
    weights = built(configs[name], dataset).eval()
    shares = len({id(layer) for layer in layers_of(weights)}) == 1
    numbers = [1] if shares else [EMBEDDINGS, 0]
    taps = Taps(weights, numbers, hidden=True)
    ids, _ = packed_rows()
    given, maps = {}, projections_of(layers_of(weights)[0]) if readable(name) == "attention" else []
    for module in maps:
        module.register_forward_pre_hook(lambda module, inputs: given.update({module: inputs[0]}))
    with torch.no_grad():
        states = weights.base_model(input_ids=ids, output_hidden_states=True).hidden_states
    for number in numbers:
        torch.testing.assert_close(taps.hidden[number], states[number + 1])
    assert len(layers_of(weights)) == 2
    if readable(name) == "attention":
        found = torch.cat(taps.projections(numbers[-1]), -1)
        torch.testing.assert_close(found, torch.cat([module(given[module]) for module in maps], -1))
        assert found.shape[:2] == (2, 32)


@pytest.mark.parametrize("name", fast(EVERY, among=["modernbert", "xlm", "longformer"]))
def test_a_family_teaches_and_learns_by_each_method_or_is_refused(configs, dataset, tmp_path, name):
    can = METHODS[readable(built(configs[name], dataset).config.model_type)]
    _, piece = four_rows(dataset, 40, samples="documents")
    for model, taught_by in ((name, "bert"), ("bert", name)):
        built(configs[taught_by], dataset, seed=1).save_pretrained(tmp_path / taught_by)
        options = {"length": 32, "teacher": str(tmp_path / taught_by)}
        for method in ("relations", "hidden", "logits"):
            layers = {"distil_layers": "last"} if method == "hidden" else {}
            config = config_of(**options, model=configs[model], distil=method, **layers)
            weights = built(configs[model], dataset)
            if method not in can:
                with refuses("unsupported", "distil", given=method):
                    learner_of(config, weights, dataset)
                continue
            module = learner_of(config, weights, dataset)
            loss = module(**module.prepare(piece))["distil"].sum
            loss.backward()
            assert 0 < loss.item() < 1e4


class OwnConfig(BertConfig):
    model_type = "one-of-our-own"


class OwnForMaskedLM(BertForMaskedLM):
    config_class = OwnConfig


def test_a_model_of_ones_own_trains_and_resumes(dataset, tmp_path):
    """Its classes are registered, and its family is in no table."""
    AutoConfig.register("one-of-our-own", OwnConfig)
    AutoModelForMaskedLM.register(OwnConfig, OwnForMaskedLM)
    path = write(tmp_path / "own.json", json.dumps(SIZES | {"model_type": "one-of-our-own"}))
    train_twice(dataset.path, tmp_path / "run", 1, model=str(path), steps=2, eval_every=0)


def test_a_model_is_tried_with_rows_of_the_run_and_a_slow_one_gets_a_warning(configs, dataset, tmp_path):
    """A Nyströmformer with landmarks supports only one length."""
    assert len(check_runs(built(configs["longformer"], dataset), length=32)) == 1
    values = LISTED["nystromformer"] | {"model_type": "nystromformer", "num_landmarks": 4, "segment_means_seq_len": 80}
    weights = built(str(write(tmp_path / "landmarks.json", json.dumps(values))), dataset)
    assert check_runs(weights, length=80) == []
    with refuses("model-unreadable", given="nystromformer"):
        check_runs(weights, length=72)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_command_takes_every_family(configs, dataset, tmp_path, name):
    run, data = tmp_path / "run", ("--data", dataset.path)
    train(dataset.path, run, model=configs[name], steps=1, eval_every=0)
    limits = ("--length", 32, "--steps", 1, "--global-batch-size", 4)
    succeeds("bertrain", "doctor", *data, "--out", tmp_path / "x", "--model", configs[name], *limits)
    assert json_of("bertrain", "evaluate", *data, "--checkpoint", run, "--show", 1)["loss"] > 0
    limits = ("--length", 32, "--max-samples", 8, "--batch-size", 8, "--top-k", 4)
    succeeds("bertrain", "teacher", *data, "--model", run, "--out", tmp_path / "logits", *limits)
    options = {"init": str(run), "teacher_cache": str(tmp_path / "logits"), "steps": 1, "eval_every": 0}
    taught = train(dataset.path, tmp_path / "taught", **options)
    assert taught[0]["distil_loss"] == pytest.approx(0, abs=1e-3)  # it begins as its teacher is
    succeeds("bertrain", "finetune", *tuning(run, write_labelled(tmp_path / "train.tsv"), tmp_path / "tuned"))


def test_a_loaded_roformer_does_not_train_its_sines(configs, dataset, tmp_path):
    built(configs["roformer"], dataset).save_pretrained(tmp_path)
    assert not load_model(tmp_path).roformer.encoder.embed_positions.weight.requires_grad
