"""Every family of models learns what transformers' own loss would teach it, and every command takes it."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.attention.varlen
import transformers
from click.testing import CliRunner
from families import SMALL, UNLISTED, VARIANTS
from tokenizers import AddedToken
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import RobertaProcessing
from tokenizers.trainers import BpeTrainer
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from training import entries, learner, losses, on_ranks, train
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

import bertdata
from bertdata.errors import UsageError
from bertdata.write import build
from bertrain import assemble, doctor, evaluate, feed, finetune, teacher
from bertrain.config import Config
from bertrain.models import build as models
from bertrain.models.families import FAMILIES, family_of, layers_of
from bertrain.models.taps import EMBEDDINGS, Taps
from bertrain.runtime.dist import World
from bertrain.runtime.rates import Operations

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
EVERY = SMALL | UNLISTED
UNLIKE = ["bert", "roberta", "albert", "deberta-v2", "longformer"]  # so different that they stand for all where time is
MOST = [name if name in UNLIKE else pytest.param(name, marks=pytest.mark.slow) for name in EVERY]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, corpus, vocab):
    """The corpus with RoBERTa's special ids: all are others than BERT's, and MPNet knows no other padding id."""
    place = tmp_path_factory.mktemp("families")
    words = Path(vocab).read_text().splitlines()[5:]
    (place / "vocab.txt").write_text("\n".join(["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]", *words]) + "\n")
    build([corpus], place / "shards", tokenizer=str(place / "vocab.txt"), validation=0.2)
    return bertdata.open(place / "shards")


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """A configuration file of every family, by its name, and of variants of some."""
    place = tmp_path_factory.mktemp("configs")
    for name, values in (EVERY | VARIANTS).items():
        (place / f"{name}.json").write_text(json.dumps({"model_type": name.split()[0]} | values))
    return {name: str(place / f"{name}.json") for name in EVERY | VARIANTS}


def built(configs, name, dataset, *, seed=0):
    return models.build(configs[name], dataset.special_tokens, length=32, seed=seed)[0]


def test_every_family_has_a_small_configuration_here():
    assert list(SMALL) == list(FAMILIES)


def test_the_page_of_models_has_every_family_with_its_facts():
    page = (Path(__file__).parent.parent / "docs" / "models.md").read_text().split("## The table of families")[1]
    rows = [line.split(" | ")[:4] for line in page.splitlines() if line.startswith("| ") and "model_type" not in line]
    assert {name.removeprefix("| "): facts for name, *facts in rows} == {
        name: [
            "after the padding id" if family.positions_after_padding else "0",
            family.isolation or "no",
            {"attention": "logits, relations, hidden", "hidden": "logits, hidden", None: "logits"}[family.taps],
        ]
        for name, family in FAMILIES.items()
    }


# --------------------------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize(
    ("name", "samples"),
    [*((name, "documents") for name in EVERY | VARIANTS), *((name, "windows") for name in UNLIKE),
     *(pytest.param(name, "windows", marks=pytest.mark.slow) for name in EVERY if name not in UNLIKE)],
)  # fmt: skip
def test_loss_and_gradients_are_those_of_transformers(configs, dataset, name, samples):
    batch = bertdata.Loader(dataset, length=32, samples=samples).read(np.arange(40, 44))
    assert (batch.attention_mask is None) == (samples == "windows")
    weights = built(configs, name, dataset).train()
    piece = next(feed.micro_batches(batch, size=4, count=1, device=CPU))
    ours = learner(weights)(**piece)["mlm"].sum / feed.num_targets(batch)
    ours.backward()
    gradients = {name: parameter.grad for name, parameter in weights.named_parameters()}
    weights.zero_grad()
    mask = {} if batch.attention_mask is None else {"attention_mask": piece["attention_mask"]}
    theirs = weights(input_ids=piece["input_ids"], labels=torch.from_numpy(batch.labels), **mask).loss
    theirs.backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for name, parameter in weights.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", ["bert", "electra"])
def test_a_copy_of_a_learner_predicts_with_its_own_head(configs, dataset, name):
    one = learner(built(configs, name, dataset)).eval()
    other = copy.deepcopy(one)
    piece = next(
        feed.micro_batches(bertdata.Loader(dataset, length=32).read(np.arange(4)), size=4, count=1, device=CPU)
    )
    with torch.no_grad():
        before = one.logits(**piece)
        for parameter in other.parameters():
            parameter.add_(0.1)
        assert torch.equal(one.logits(**piece), before)
        assert not torch.equal(other.logits(**piece), before)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_step_of_every_family_is_one_graph(configs, dataset, name):
    """As --compile on asks."""
    torch.compiler.reset()
    plain = learner(built(configs, name, dataset)).train()
    batch = bertdata.Loader(dataset, length=32, samples="documents").read(np.arange(40, 44))
    piece = next(feed.micro_batches(batch, size=4, count=1, device=CPU))
    expected = plain(**piece)["mlm"].sum
    found = torch.compile(plain, backend="eager", fullgraph=True, dynamic=False)(**piece)["mlm"].sum
    torch.testing.assert_close(found, expected)
    found.backward()


@pytest.mark.parametrize("name", MOST)
def test_a_checkpoint_is_one_of_transformers_and_a_run_resumes_to_the_same_bits(configs, dataset, tmp_path, name):
    whole = train(dataset.path, tmp_path / "run", model=configs[name], steps=3, eval_every=0)
    last = tmp_path / "run" / "step-00000003"
    plain = AutoModelForMaskedLM.from_pretrained(last).eval()
    ours = learner(models.load(last)).eval()
    batch = bertdata.Loader(dataset, length=32).read(np.arange(4))
    piece = next(feed.micro_batches(batch, size=4, count=1, device=CPU))
    with torch.no_grad():
        theirs = plain(input_ids=piece["input_ids"]).logits
        rows = torch.arange(4)[:, None]
        torch.testing.assert_close(ours.logits(**piece), theirs[rows, piece["masked_positions"]], rtol=1e-5, atol=1e-5)
    weights = (last / "model.safetensors").read_bytes()
    shutil.rmtree(last)
    again = train(dataset.path, tmp_path / "run", model=configs[name], steps=3, eval_every=0)
    assert losses(again) == losses(whole)
    assert (last / "model.safetensors").read_bytes() == weights


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(configs, dataset, tmp_path):
    """All families in one launch; parts of an encoder that get no gradient stop no rank."""
    places = {ranks: tmp_path / str(ranks) for ranks in (1, 2)}
    for ranks, place in places.items():
        code, _, err = on_ranks(ranks, "families", [dataset.path, place, *(configs[name] for name in EVERY)])
        assert code == 0, err
    for name in EVERY:
        one, two = ([entry["loss"] for entry in entries(place / name) if "loss" in entry] for place in places.values())
        assert len(one) == 2
        assert two == pytest.approx(one, rel=1e-5), name


@pytest.mark.parametrize("name", MOST)
def test_bf16_is_close_or_refused(configs, dataset, tmp_path, name):
    loss = {}
    for precision in ("fp32", "bf16"):
        config = Config(data=str(dataset.path), out="nowhere", precision=precision, length=32)
        weights = built(configs, name, dataset)
        if (name, precision) == ("deberta", "bf16"):
            with pytest.raises(UsageError, match="deberta computes in fp32 alone; give --precision fp32"):
                assemble.precision(config, CPU, weights)
            return
        assert assemble.precision(config, CPU, weights) == precision
        isolate = name in FAMILIES and FAMILIES[name].isolation is not None
        module = assemble.learner(replace(config, isolate_documents=isolate), weights, dataset, ALONE, precision)
        samples = "packed" if isolate else "documents"
        batch = bertdata.Loader(dataset, length=32, samples=samples).read(np.arange(40, 44))
        with assemble.autocast(CPU, precision)():
            loss[precision] = module(**next(feed.micro_batches(batch, size=4, count=1, device=CPU)))["mlm"].sum
        loss[precision].backward()
    assert loss["bf16"].item() == pytest.approx(loss["fp32"].item(), rel=0.02)
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in module.parameters())


def test_a_teacher_that_computes_in_fp32_alone_teaches_one_that_does_not(configs, dataset, tmp_path):
    built(configs, "deberta", dataset, seed=1).save_pretrained(tmp_path)
    config = Config(data=str(dataset.path), out="x", model=configs["bert"], length=32, teacher=str(tmp_path),
                    distil="logits", precision="bf16")  # fmt: skip
    module = assemble.learner(config, built(configs, "bert", dataset), dataset, ALONE, "bf16")
    piece = next(
        feed.micro_batches(bertdata.Loader(dataset, length=32).read(np.arange(4)), size=4, count=1, device=CPU)
    )
    with assemble.autocast(CPU, "bf16")():
        assert 0 < module(**module.prepare(piece))["distil"].sum < 1e4


@pytest.mark.parametrize("name", MOST)
def test_activations_are_computed_again_or_it_is_said_that_they_cannot(configs, dataset, name):
    weights = built(configs, name, dataset).train()
    batch = bertdata.Loader(dataset, length=32).read(np.arange(4))
    piece = next(feed.micro_batches(batch, size=4, count=1, device=CPU))
    plain = learner(copy.deepcopy(weights))(**piece)["mlm"].sum
    if name in ("albert", "mpnet", "squeezebert", "flaubert", "xlm", "ibert"):
        with pytest.raises(UsageError, match=f"of {name} again; leave --gradient-checkpointing out"):
            models.recompute_activations(weights)
        return
    models.recompute_activations(weights)
    again = learner(weights)(**piece)["mlm"].sum
    assert torch.equal(again, plain)
    again.backward()


@pytest.mark.parametrize("name", SMALL)
def test_an_encoder_without_heads_is_a_start_and_half_an_encoder_is_none(configs, dataset, tmp_path, name):
    whole = AutoModel.from_config(built(configs, name, dataset).config)
    whole.save_pretrained(tmp_path)
    weights, warnings = models.start_from(str(tmp_path), dataset, length=32)
    assert weights.config.model_type == name
    assert "begin at random" in warnings[0]
    embeddings = next(
        number for number, value in whole.state_dict().items() if value.shape[0] == whole.config.vocab_size
    )
    whole.save_pretrained(tmp_path, state_dict={k: v for k, v in whole.state_dict().items() if k != embeddings})
    with pytest.raises(UsageError, match="lacks 1 weights of the encoder, such as .*embed"):
        models.start_from(str(tmp_path), dataset, length=32)


# ------------------------------------------------------------------------------------------------------ RoBERTa's own


def byte_level_bpe(texts):
    """A tokenizer as RoBERTa's: <s> <pad> </s> <unk> <mask>, and the mask takes the space before it."""
    special = ["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True, special=True)]
    tokenizer = tokenizers.Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0))
    return tokenizer


@pytest.fixture(scope="module")
def roberta(tmp_path_factory):
    """The checkpoint of a RoBERTa that was trained on rows of 32 tokens of such a tokenizer."""
    tmp_path = tmp_path_factory.mktemp("roberta")
    texts = ["river " * 40 + "bank"] * 2
    (tmp_path / "corpus.txt").write_text("\n\n".join(texts * 50))
    byte_level_bpe(texts).save(str(tmp_path / "tokenizer.json"))
    build([tmp_path / "corpus.txt"], tmp_path / "shards", tokenizer=str(tmp_path / "tokenizer.json"))
    values = {"model_type": "roberta", "vocab_size": 50265, "type_vocab_size": 1, "max_position_embeddings": 20}
    (tmp_path / "roberta.json").write_text(json.dumps(SMALL["roberta"] | values | {"pad_token_id": 7}))
    train(tmp_path / "shards", tmp_path / "run", model=str(tmp_path / "roberta.json"), steps=20, global_batch_size=16,
          lr=1e-2, save_every=20, eval_every=0)  # fmt: skip
    return tmp_path / "run" / "step-00000020"


def test_a_roberta_of_a_byte_level_bpe_has_positions_after_its_padding_id(roberta):
    """So rows of 32 need 34 positions; and its checkpoint tells the tokenizer how long rows may be."""
    config = json.loads((roberta / "config.json").read_text())
    assert (config["pad_token_id"], config["max_position_embeddings"]) == (1, 34)
    tokenizer = AutoTokenizer.from_pretrained(roberta)
    assert tokenizer.model_max_length == 32
    rows = tokenizer(["river " * 50, "river bank"], truncation=True, padding=True, return_tensors="pt")
    assert rows.keys() == {"input_ids", "attention_mask"}
    positions = []
    model = AutoModelForMaskedLM.from_pretrained(roberta)
    model.roberta.embeddings.position_embeddings.register_forward_hook(lambda _, ids, __: positions.append(ids[0]))
    model(**rows)
    filled = int(rows["attention_mask"][1].sum())
    assert positions[0][0].tolist() == list(range(2, 34))
    assert positions[0][1].tolist() == [*range(2, 2 + filled), *[1] * (32 - filled)]


@pytest.mark.slow
def test_it_fills_masks_in_a_pipeline(roberta):
    fill = transformers.pipeline("fill-mask", model=str(roberta), tokenizer=str(roberta))
    assert fill("river <mask> river")[0]["sequence"] == "river river river"


# ---------------------------------------------------------------------------------------------------------- documents


LENGTHS = [13, 11, 8]  # of three documents in a row of 32


@pytest.mark.parametrize("name", [name for name in SMALL if FAMILIES[name].isolation])
def test_packed_documents_are_what_they_are_apart(configs, dataset, name):
    weights = built(configs, name, dataset).eval()
    ids = torch.randint(5, 80, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).expand(2, -1)
    with torch.no_grad():
        apart = torch.cat([weights.base_model(input_ids=part).last_hidden_state for part in ids.split(LENGTHS, 1)], 1)
        leaking = weights.base_model(input_ids=ids).last_hidden_state
        together = learner(weights, isolate=True).encode(ids, position_ids=positions)
    torch.testing.assert_close(together, apart, rtol=0, atol=2e-6)
    assert (leaking - apart).abs().max() > 1e-4


def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):
    """What torch's kernel of this name computes, on CPUs; it too refuses float32 and dtypes that differ."""
    assert query.dtype == key.dtype == value.dtype == torch.bfloat16
    assert cu_seq_q.dtype == torch.int32
    assert max_q == max_k == sum(LENGTHS)
    places = torch.arange(query.shape[0])
    document, distance = torch.bucketize(places, cu_seq_q[1:], right=True), (places[:, None] - places).abs()
    mask = (document[:, None] == document) & ((window_size[0] < 0) | (distance <= window_size[0]))
    q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(0, 1)


@pytest.mark.parametrize("name", [name for name in SMALL if FAMILIES[name].isolation == "kernel"])
def test_the_kernel_of_gpus_is_given_what_it_takes(configs, dataset, monkeypatch, name):
    calls = []
    monkeypatch.setattr(
        torch.nn.attention.varlen, "varlen_attn", lambda *a, **k: calls.append(1) or varlen_attn(*a, **k)
    )
    weights = learner(built(configs, name, dataset).eval(), isolate=True)
    ids = torch.randint(5, 80, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).expand(2, -1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = weights.encode(ids, position_ids=positions, cu_seqlens=feed.cu_seqlens_of(positions)).float()
        expected = weights.encode(ids, position_ids=positions).float()
    assert len(calls) == 2
    assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("name", [name for name in EVERY if name not in FAMILIES or not FAMILIES[name].isolation])
def test_what_cannot_keep_documents_apart_says_so(configs, dataset, name):
    config = Config(data=str(dataset.path), out="nowhere", model=configs[name], isolate_documents=True)
    with pytest.raises(UsageError, match=f"{name} cannot keep packed documents apart.*; bert, modernbert, .* can"):
        assemble.learner(config, built(configs, name, dataset), dataset, ALONE, "fp32")


# ------------------------------------------------------------------------------------------------------------- teaching


@pytest.mark.parametrize("name", [name for name in SMALL if FAMILIES[name].taps])
def test_what_is_tapped_are_hidden_states_and_linear_maps_of_what_comes_before(configs, dataset, name):
    weights = built(configs, name, dataset).eval()
    shares = len({id(layer) for layer in layers_of(weights)}) == 1
    numbers = [1] if shares else [EMBEDDINGS, 0]
    taps = Taps(weights, numbers, hidden=True)
    ids = torch.randint(5, 80, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        states = weights.base_model(input_ids=ids, output_hidden_states=True).hidden_states
    for number in numbers:
        torch.testing.assert_close(taps.hidden[number], states[number + 1])
    assert len(layers_of(weights)) == 2
    if FAMILIES[name].taps == "attention":
        shapes = {part.shape[:2] for part in taps.projections(numbers[-1])}
        assert shapes == {(2, 32)}


@pytest.mark.parametrize("method", ["relations", "hidden", "logits"])
@pytest.mark.parametrize("name", MOST)
def test_a_family_teaches_and_learns_by_each_method_or_says_that_it_cannot(configs, dataset, tmp_path, name, method):
    taps = family_of(built(configs, name, dataset)).taps
    can = method == "logits" or taps == "attention" or (taps == "hidden" and method == "hidden")
    for model, taught_by in ((name, "bert"), ("bert", name)):
        place = tmp_path / taught_by
        if not place.exists():
            built(configs, taught_by, dataset, seed=1).save_pretrained(place)
        config = Config(
            data=str(dataset.path), out="x", model=configs[model], length=32, teacher=str(place), distil=method,
            **({"distil_layers": "last"} if method == "hidden" else {}),
        )  # fmt: skip
        if not can:
            with pytest.raises(UsageError, match=f"cannot read the layers of {name} .*give --distil logits"):
                assemble.learner(config, built(configs, model, dataset), dataset, ALONE, "fp32")
            continue
        module = assemble.learner(config, built(configs, model, dataset), dataset, ALONE, "fp32")
        batch = bertdata.Loader(dataset, length=32, samples="documents").read(np.arange(40, 44))
        piece = module.prepare(next(feed.micro_batches(batch, size=4, count=1, device=CPU)))
        loss = module(**piece)["distil"].sum
        loss.backward()
        assert 0 < loss.item() < 1e4


def test_layers_whose_projections_are_not_found_learn_hidden_states_alone(configs, dataset, tmp_path, monkeypatch):
    """As those of a family of one's own, which has the row Family()."""
    monkeypatch.setattr("bertrain.models.families._PROJECTIONS", ())
    built(configs, "bert", dataset).save_pretrained(tmp_path)
    given = {"data": str(dataset.path), "out": "x", "model": configs["bert"], "length": 32, "teacher": str(tmp_path)}
    with pytest.raises(UsageError, match="cannot read the layers of bert .*give --distil logits or hidden"):
        assemble.learner(Config(**given), built(configs, "bert", dataset), dataset, ALONE, "fp32")
    module = assemble.learner(Config(**given, distil="hidden"), built(configs, "bert", dataset), dataset, ALONE, "fp32")
    assert module.objectives["distil"].compares_attention is False


def test_layers_that_share_weights_are_not_compared_one_by_one(configs, dataset, tmp_path):
    built(configs, "bert", dataset).save_pretrained(tmp_path)
    config = Config(data=str(dataset.path), out="x", model=configs["albert"], length=32,
                    teacher=str(tmp_path), distil="hidden")  # fmt: skip
    with pytest.raises(UsageError, match="layers of albert share their weights; give --distil-layers last"):
        assemble.learner(config, built(configs, "albert", dataset), dataset, ALONE, "fp32")


# ----------------------------------------------------------------------------------------------------------- operations


@pytest.mark.parametrize("name", SMALL | VARIANTS)
def test_operations_are_those_that_torch_counts(configs, dataset, name):
    """So the vocabulary projection is that of the masked places alone. Windows save nothing in plain attention."""
    weights = built(configs, name, dataset).eval()
    weights.set_attn_implementation("eager")
    batch = bertdata.Loader(dataset, length=32).read(np.arange(4))
    piece = next(feed.micro_batches(batch, size=4, count=1, device=CPU))
    with FlopCounterMode(display=False) as counter:
        learner(weights).logits(**piece)
    operations = replace(Operations.of(weights), windows=(None, None))
    counted = operations.of_step(rows=4, length=32, slots=batch.targets.shape[1]) / 3
    relative = name.startswith("deberta")  # whose relative positions share products between the rows of a batch
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.1 if relative else 0.02)


class OwnConfig(PreTrainedConfig):
    """What a program may register that has a model of its own, with no encoder that transformers knows."""

    model_type = "one-of-our-own"
    hidden_size: int = 16


class OwnForMaskedLM(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embeddings = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.mixer = torch.nn.GRU(config.hidden_size, config.hidden_size // 2, bidirectional=True, batch_first=True)
        self.head = torch.nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids, attention_mask=None):
        return MaskedLMOutput(logits=self.head(self.mixer(self.embeddings(input_ids))[0]))


def test_a_model_of_ones_own_trains_slower_and_says_so(dataset, tmp_path, capsys):
    AutoConfig.register("one-of-our-own", OwnConfig)
    AutoModelForMaskedLM.register(OwnConfig, OwnForMaskedLM)
    (tmp_path / "own.json").write_text('{"model_type": "one-of-our-own", "hidden_size": 32}')
    options = {"model": str(tmp_path / "own.json"), "steps": 2, "eval_every": 0}
    whole = losses(train(dataset.path, tmp_path / "run", **options))
    assert capsys.readouterr().out.count("one-of-our-own is not in the table of families") == 1
    shutil.rmtree(tmp_path / "run" / "step-00000002")
    assert losses(train(dataset.path, tmp_path / "run", **options)) == whole


def test_a_model_that_needs_more_than_tokens_is_one_sentence(configs, dataset, tmp_path):
    """Or that transformers itself cannot call, as FlauBERT with its norms first."""
    for name, values, said in (
        ("xmod", SMALL["roberta"], "language"),
        ("flaubert", SMALL["flaubert"] | {"pre_norm": True}, ""),
    ):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"model_type": name} | values))
        config = Config(data=str(dataset.path), out="x", model=str(path), length=32)
        with pytest.raises(UsageError, match=f"{name} cannot predict tokens from tokens alone: .*{said}"):
            assemble.model(config, dataset)


def test_operations_of_a_family_that_is_not_in_the_table_are_estimated(configs, dataset):
    weights = built(configs, "longformer", dataset)
    parameters = sum(parameter.numel() for parameter in weights.parameters())
    assert Operations.of(weights).of_step(rows=4, length=32, slots=5) == 6 * 4 * 32 * parameters


# ------------------------------------------------------------------------------------------------------------- commands


def invoke(command, *arguments):
    done = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("name", MOST)
def test_every_command_takes_every_family(configs, dataset, tmp_path, name):
    run, data = tmp_path / "run", ("--data", dataset.path)
    said = invoke(doctor.main, *data, "--out", run, "--model", configs[name], "--length", 32, "--steps", 1)
    assert ("training is slower" in said) == (name in UNLISTED)
    train(dataset.path, run, model=configs[name], steps=1, eval_every=0)
    assert '"loss": ' in invoke(evaluate.main, *data, "--checkpoint", run, "--json", "--show", 1)
    limits = ("--length", 32, "--max-samples", 8, "--batch-size", 8, "--top-k", 4)
    assert "done: " in invoke(teacher.main, *data, "--model", run, "--out", tmp_path / "logits", *limits)
    options = {"model": configs[name], "teacher_cache": str(tmp_path / "logits")}
    taught = train(dataset.path, tmp_path / "taught", steps=1, **options)
    assert taught[0]["distil_loss"] > 0
    again = train(dataset.path, tmp_path / "again", init=str(run), steps=1)
    assert again[0]["loss"] > 0
    (tmp_path / "train.tsv").write_text("river light\t1\nsalt stone\t0\n" * 4)
    labelled = ("--train", tmp_path / "train.tsv", "--dev", tmp_path / "train.tsv", "--out", tmp_path / "tuned")
    assert "1 seeds" in invoke(finetune.main, "--checkpoint", run, *labelled, "--seeds", 1, "--epochs", 1)


# ------------------------------------------------------------------------------------------------ traps of transformers


def test_mpnet_has_its_own_idea_of_padding():
    """If this fails transformers reads it from the configuration, and Family.padding_id can go."""
    config = AutoConfig.for_model("mpnet", **SMALL["mpnet"], vocab_size=90, pad_token_id=0)
    assert AutoModel.from_config(config).embeddings.padding_idx == 1


def test_a_loaded_roformer_would_train_its_sines(tmp_path):
    """If this fails transformers keeps them fixed, and its entry of untrained parts can go."""
    new = AutoModelForMaskedLM.from_config(AutoConfig.for_model("roformer", **SMALL["roformer"], vocab_size=90))
    new.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    fixed = [model.roformer.encoder.embed_positions.weight.requires_grad for model in (new, loaded)]
    assert fixed == [False, True]
    assert not models.load(tmp_path).roformer.encoder.embed_positions.weight.requires_grad


def test_deberta_overflows_in_bf16(configs, dataset):
    """If this fails transformers computes it in bf16, and Family.half can go."""
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="overflow"):
        built(configs, "deberta", dataset)(input_ids=torch.arange(8)[None])
