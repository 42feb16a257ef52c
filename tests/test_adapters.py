"""--lora: what is frozen and what is trained, what is written, and who can read it; sentence embeddings."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from conftest import SPECIAL
from peft import PeftModel
from safetensors.torch import load_file
from training import entries, flags, learner, losses, on_ranks, train
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from bertdata.errors import UsageError
from bertrain import doctor, evaluate, finetune
from bertrain.config import Config
from bertrain.models import adapters, build
from bertrain.runtime.rates import Operations

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
         "max_position_embeddings": 80, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
MODELS = {
    "bert": SIZES,
    "modernbert": SIZES | {"local_attention": 8, "global_attn_every_n_layers": 2},
    "bert untied": SIZES | {"tie_word_embeddings": False},
    "albert": SIZES | {"embedding_size": 16},
}
NUMBER = {"bert": 12, "modernbert": 8, "bert untied": 12, "albert": 6}  # linear maps in the layers
LORA = {"lora": "r=2,alpha=6", "steps": 4, "eval_every": 0, "lr": 2e-2}
DOCS = Path(__file__).parent.parent / "docs"
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # in PeftModel


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Configurations by name."""
    place = tmp_path_factory.mktemp("configs")
    for name, values in MODELS.items():
        (place / f"{name}.json").write_text(json.dumps(values | {"model_type": name.split()[0]}))
    return {name: str(place / f"{name}.json") for name in MODELS}


@pytest.fixture(scope="module")
def runs(dataset, configs, tmp_path_factory):
    """name → a run that trained all weights, and one that trained an adapter on its last checkpoint."""
    made = {}

    def run(name):
        if name not in made:
            place = tmp_path_factory.mktemp(name.replace(" ", "-"))
            train(dataset.path, place / "start", model=configs[name], steps=2, eval_every=0)
            train(dataset.path, place / "adapted", init=str(place / "start"), **LORA | {"eval_every": 4})
            made[name] = place / "start", place / "adapted"
        return made[name]

    return run


def logits(model):
    """float32 [2, 16, V] of one batch of ids."""
    ids = torch.arange(32).view(2, 16) % 80 + 5
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def last(run):
    return sorted(run.glob("step-*"))[-1]


@pytest.mark.parametrize("name", MODELS)
def test_a_merged_checkpoint_is_an_ordinary_one_with_the_logits_of_training(dataset, runs, name):
    start, adapted = runs(name)
    before, after = load_file(last(start) / "model.safetensors"), load_file(last(adapted) / "model.safetensors")
    assert {name: value.shape for name, value in before.items()} == {name: value.shape for name, value in after.items()}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    merged, plain = (AutoModelForMaskedLM.from_pretrained(last(run)) for run in (adapted, start))
    assert type(merged) is type(plain)
    assert not hasattr(merged, "peft_config")
    tied = [model.get_output_embeddings().weight is model.get_input_embeddings().weight for model in (merged, plain)]
    assert tied[0] == tied[1] == ("untied" not in name and name != "albert") or tied == [True, True]
    training = AutoModelForMaskedLM.from_pretrained(last(start))
    adapters.add(training, adapters.parse(LORA["lora"]), seed=1)
    torch.testing.assert_close(logits(training), logits(plain), rtol=0, atol=0)  # B begins at 0
    adapters.read(training, last(adapted))
    torch.testing.assert_close(logits(merged), logits(training), rtol=1e-6, atol=1e-6)
    assert (logits(merged) - logits(plain)).abs().max() > 1e-2
    beside = PeftModel.from_pretrained(AutoModelForMaskedLM.from_pretrained(last(start)), last(adapted) / "adapter")
    torch.testing.assert_close(logits(beside), logits(training), rtol=0, atol=0)
    maps = {name for name, module in training.named_modules() if hasattr(module, "base_layer")}
    assert len(maps) == NUMBER[name]
    assert changed == {f"{name}.weight" for name in maps}
    found = evaluate_on(adapted, dataset)
    assert found == pytest.approx(entries(adapted)[-1]["validation_loss"], abs=1e-6)


def evaluate_on(run, dataset):
    done = CliRunner().invoke(evaluate.main, ["--checkpoint", str(run), "--data", str(dataset.path), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.output.splitlines()[-1])["loss"]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"optimizer": "muon", "lr_scale": ["lora_B=4", "layer.0=0"], "average": 0.9},
        {"lora": "r=2,alpha=6,target=query|decoder"},
    ],
)
def test_a_run_goes_on_to_the_bit_and_what_stands_still_does(dataset, runs, tmp_path, more, capsys):
    start = shutil.copytree(runs("bert untied")[0], tmp_path / "start")
    options = LORA | {"init": str(start), "steps": 12 if "average" in more else 4} | more
    whole = train(dataset.path, tmp_path / "run", **options)
    assert re.search(r"an adapter of [\d,]+ parameters is trained; [\d,]+ are frozen", capsys.readouterr().out)
    shutil.copytree(last(tmp_path / "run"), tmp_path / "last")
    kept = {path.name: path for path in (tmp_path / "last").rglob("*") if path.is_file()}
    for step in sorted((tmp_path / "run").glob("step-*"))[2:]:
        shutil.rmtree(step)
    train(dataset.path, start, model=json.loads((start / "run.json").read_bytes())["config"]["model"], steps=3)
    again = train(dataset.path, tmp_path / "run", **options)  # on the checkpoint it began with, not on the newest
    shutil.rmtree(last(start))
    assert losses(again) == losses(whole)
    for name in ("model.safetensors", "adapter_model.safetensors"):
        there = next(last(tmp_path / "run").rglob(name))
        assert there.read_bytes() == kept[name].read_bytes()
    one, two = (
        torch.load(path, weights_only=True) for path in (kept["optimizer.pt"], last(tmp_path / "run") / "optimizer.pt")
    )
    assert one["state"].keys() == two["state"].keys()
    for number, moments in one["state"].items():
        assert all(torch.equal(value, two["state"][number][kind]) for kind, value in moments.items())
    own = load_file(kept["adapter_model.safetensors"])
    wanted = re.compile(more.get("lora", "").partition("target=")[2])
    assert all(wanted.search(name) for name in own)
    if "average" in more:
        assert not any(own[name].any() for name in own if "layer.0" in name and "lora_B" in name)
        mean = tmp_path / "run" / "average-00000012"
        weights = AutoModelForMaskedLM.from_pretrained(last(start))
        beside = PeftModel.from_pretrained(weights, mean / "adapter")
        torch.testing.assert_close(
            logits(AutoModelForMaskedLM.from_pretrained(mean)), logits(beside), rtol=0, atol=1e-6
        )
        assert (mean / "model.safetensors").read_bytes() != kept["model.safetensors"].read_bytes()


@pytest.mark.dist
@pytest.mark.slow
def test_an_adapter_does_not_depend_on_ranks(dataset, runs, tmp_path):
    start, _ = runs("modernbert")
    options = LORA | {"init": str(start), "optimizer": "muon", "eval_every": 2}
    alone = train(dataset.path, tmp_path / "one", **options)
    code, _, said = on_ranks(2, "bertrain.pretrain", flags(dataset.path, tmp_path / "two", **options))
    assert code == 0, said
    for one, two in zip(alone, entries(tmp_path / "two"), strict=True):
        for name in ("loss", "validation_loss"):
            assert (name in one) == (name in two)
            assert name not in one or one[name] == pytest.approx(two[name], rel=1e-4)


def test_a_run_goes_on_with_the_same_adapter_and_weights_alone(dataset, runs, tmp_path, capsys):
    start, adapted = (shutil.copytree(run, tmp_path / run.name) for run in runs("modernbert"))
    options = LORA | {"steps": 5, "init": json.loads((adapted / "run.json").read_bytes())["config"]["init"]}
    for more, said in (
        ({"lora": "r=2,alpha=8"}, "was trained with --lora r=2,alpha=6, and --lora r=2,alpha=8 was given"),
        ({"lora": ""}, "was trained with --lora r=2,alpha=6, and none was given"),
    ):
        with pytest.raises(SystemExit) as refused:
            train(dataset.path, adapted, **options | more)
        assert refused.value.code == 2
        assert said in capsys.readouterr().err
    path = last(adapted) / "adapter" / "adapter_config.json"
    moved = json.loads(path.read_bytes()) | {"base_model_name_or_path": str(sorted(start.glob("step-*"))[0])}
    path.write_text(json.dumps(moved))
    index = json.loads((last(adapted) / "checkpoint.json").read_bytes())
    index["files"].pop("adapter/adapter_config.json")
    (last(adapted) / "checkpoint.json").write_text(json.dumps(index))
    with pytest.raises(SystemExit):
        train(dataset.path, adapted, **options)
    said = "has an adapter for other weights than --init"
    assert said in capsys.readouterr().err
    examined = CliRunner().invoke(doctor.main, flags(dataset.path, adapted, **options))
    assert re.search(f"^FAIL  run .*{said}", examined.output, re.MULTILINE), examined.output
    build.build("modernbert-tiny", dataset.special_tokens, length=32, seed=0)[0].save_pretrained(tmp_path / "larger")
    path.write_text(json.dumps(moved | {"base_model_name_or_path": str(tmp_path / "larger")}))
    with pytest.raises(SystemExit):
        train(dataset.path, adapted, **options)
    said = f"adapter was trained on weights of other sizes than those of {tmp_path / 'larger'}; put the weights back"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"lora": "r=2,alpha=4"}, "--lora r=2,alpha=4 needs --init"),
        ({"lora": "r=2,alpha=4", "init": "x", "grow": "1,2", "grow_at": "0.5"}, "--grow and --lora were given"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(given, sentence):
    with pytest.raises(UsageError, match=sentence):
        Config(data="x", out="y", **given)


@pytest.mark.parametrize("given", ["8", "r=8", "alpha=8,r=8", "r=0,alpha=8", "r=8,alpha=16,bits=8", "r=8,alpha=16,x=1"])
def test_what_is_no_lora_is_refused(given):
    with pytest.raises(UsageError, match=f"--lora is {given}; write it like r=8,alpha=16"):
        adapters.parse(given)


def test_the_parts_of_a_lora():
    assert adapters.parse("r=8,alpha=16") == (8, 16, False, "")
    assert adapters.parse("r=8,alpha=1,bits=4,target=a=b,c") == (8, 1, True, "a=b,c")
    with pytest.raises(UsageError, match="target is no regular expression"):
        adapters.parse("r=8,alpha=1,target=(")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"lora": "r=2,alpha=4,target=qurey"}, "target=qurey matches none of the 14 linear maps, such as bert.encoder"),
        ({"lora": "r=2,alpha=4,target=decoder"}, "cls.predictions.decoder, whose weights are those of the embeddings"),
        ({"lr_scale": ["embeddings=0.1"]}, "--lr-scale embeddings=0.1 matches none of the 24 parameters"),
        ({"objective": "mlm+nsp"}, "has no weights for cls.seq_relationship.bias, and --lora would not train them"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_step(dataset, runs, tmp_path, more, said, capsys):
    with pytest.raises(SystemExit) as refused:
        train(dataset.path, tmp_path / "run", init=str(runs("bert")[0]), **LORA | more)
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("library", "lora", "said"),
    [
        ("peft", "r=2,alpha=4", "--lora needs peft; pip install -e '.[lora]'"),
        ("bitsandbytes", "r=2,alpha=4,bits=4", "needs bitsandbytes; pip install bitsandbytes, or leave bits=4 out"),
    ],
)
def test_a_missing_library_is_one_sentence(configs, monkeypatch, library, lora, said):
    monkeypatch.setitem(sys.modules, library, None)
    model, _ = build.build(configs["bert"], SPECIAL, length=32, seed=0)
    with pytest.raises(UsageError, match=re.escape(said)):
        adapters.add(model, adapters.parse(lora), seed=0)


def test_products_are_counted_and_less_memory_is_expected(dataset, configs, runs, tmp_path):
    model, _ = build.build(configs["modernbert"], SPECIAL, length=32, seed=0)
    before = Operations.of(model)
    adapters.add(model, adapters.parse("r=2,alpha=4"), seed=0)
    after = Operations.of(model)
    own = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert after.token == before.token + own
    assert (after.place, after.width) == (before.place, before.width)
    assert not any("lora" in name for name in learner(model).objective_parameters())
    disk = {}
    for lora in ([], ["--lora", "r=2,alpha=4"]):
        place = ["--data", dataset.path, "--out", tmp_path / "run", "--init", runs("modernbert")[0], "--length", 32]
        said = CliRunner().invoke(doctor.main, [*map(str, place), *lora, "--steps", "1", "--keep", "30000"])
        assert said.exit_code in (0, 1), said.output
        disk[bool(lora)] = float(re.search(r"being written need ([\d.]+) GB", said.output)[1])
    assert disk[True] < 0.6 * disk[False]


# ------------------------------------------------------------------------------------------------------- fine-tuning


def write_examples(path):
    rows = [(text, label) for label, texts in ((1, ["river light", "light"]), (0, ["salt", "stone"])) for text in texts]
    path.write_text("".join(f"{text}\t{label}\n" for text, label in rows * 6))
    return path


def tune(*arguments):
    done = CliRunner().invoke(finetune.main, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_fine_tuning_trains_an_adapter_and_the_head(runs, tmp_path, name):
    start, data = last(runs(name)[0]), write_examples(tmp_path / "train.tsv")
    command = ["--checkpoint", start, "--train", data, "--dev", data, "--out", tmp_path / "out", "--lr", 2e-2,
               "--batch-size", 4, "--epochs", 10, "--json", "--lora", "r=4,alpha=8"]  # fmt: skip
    done = tune(*command, "--seeds", 1)
    assert done.exit_code == 0, done.output
    result = json.loads(done.output.splitlines()[-1])
    assert result["lora"] == "r=4,alpha=8"
    assert result["dev_accuracy"]["min"] == 1.0
    more = tune(*command, "--seeds", 2)
    assert "seed 0: finished before" in more.output
    before, after = load_file(start / "model.safetensors"), load_file(tmp_path / "out" / "seed-0" / "model.safetensors")
    adapter = load_file(tmp_path / "out" / "seed-0" / "adapter" / "adapter_model.safetensors")
    maps = {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in adapter if ".lora_" in key}
    both = [key for key in before if key in after and not key.startswith("head.")]  # a ModernBERT's is trained in full
    assert {key for key in both if not torch.equal(before[key], after[key])} == {f"{key}.weight" for key in maps}
    options = {"num_labels": 2}
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "seed-0")
    beside = PeftModel.from_pretrained(
        AutoModelForSequenceClassification.from_pretrained(start, **options), tmp_path / "out" / "seed-0" / "adapter"
    )
    torch.testing.assert_close(logits(merged), logits(beside), rtol=0, atol=1e-6)
    other = load_file(tmp_path / "out" / "seed-1" / "model.safetensors")
    assert not torch.equal(after["classifier.weight"], other["classifier.weight"])
    refused = tune(*command, "--from-scratch")
    assert (refused.exit_code, "--from-scratch and --lora were given" in refused.output) == (2, True)
    refused = tune(*command[:-1], "8")
    assert (refused.exit_code, "--lora is 8; write it like" in refused.output) == (2, True)


# -------------------------------------------------------------------------------------------------------- the pages


def code_of(page):
    """The Python files of a page."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)


def test_sentence_embeddings(dataset, runs, tmp_path, capsys):
    from sentence_transformers import SentenceTransformer

    script, *_ = code_of("embeddings.md")
    found = {"__name__": "embeddings"}
    exec(
        compile(script.replace("STEPS, ROWS, RATE = 500, 32, 5e-5", "STEPS, ROWS, RATE = 50, 4, 1e-3"), "x", "exec"),
        found,
    )  # noqa: S102
    start = last(runs("bert")[0])
    made = found["main"](str(dataset.path), str(start), str(tmp_path / "embeddings"))
    texts = ["river light", "the bread of morning and the wind", "salt"]
    one, two = (SentenceTransformer(str(tmp_path / "embeddings")).encode(texts) for _ in range(2))
    assert one.shape == (3, 32)
    assert (one == two).all()
    assert (one == made.encode(texts)).all()
    assert abs(one - SentenceTransformer(str(start)).encode(texts)).max() > 1e-3
    assert "step 50: loss" in capsys.readouterr().out
    tokenizer = made.tokenizer
    pairs = list(found["neighbours"](dataset, tokenizer))
    shards = dataset.splits["train"].shards
    assert len(pairs) == sum(shard.num_sentences - shard.num_documents for shard in shards)
    first = tokenizer.decode(dataset.document(0), skip_special_tokens=True)
    assert first.startswith(f"{pairs[0][0]} {pairs[0][1]}")
