"""README.md of a checkpoint: what it says is what run.json, trainer.json and the log say, and a user's own is kept."""

import json
import re
import shlex
import shutil

import pytest
from click.testing import CliRunner
from huggingface_hub import ModelCard
from test_elastic import BERT
from training import train
from transformers import AutoModelForMaskedLM

from bertrain import extract, finetune
from bertrain.config import Config
from bertrain.pretrain import pretrain
from bertrain.runtime import card, checkpoint
from bertrain.tasks import TASKS

OPTIONS = {"steps": 4, "save_every": 2, "eval_every": 2, "average": 0.5, "mlm_probability": 0.3}


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    """A run of four steps with sub-networks. Tests must not change it."""
    place = tmp_path_factory.mktemp("card")
    (place / "bert.json").write_text(json.dumps(BERT))
    train(dataset.path, place / "run", model=str(place / "bert.json"), elastic="layers=1:3", **OPTIONS)
    return place / "run"


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def cells(directory):
    """The rows of two cells of a card's tables."""
    return dict(re.findall(r"^\| ([a-z, ]+) \| (.*) \|$", (directory / "README.md").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", ["step-00000002", "step-00000004", "average-00000004"])
def test_the_hub_reads_a_card(trained, name):
    about = ModelCard.load(trained / name / "README.md")
    assert about.data.to_dict() == {
        "library_name": "transformers", "pipeline_tag": "fill-mask", "tags": ["bertrain", "bert"], "license": "other",
    }  # fmt: skip
    assert about.text.lstrip().startswith(f"# {name}\n")
    assert str(trained.parent) not in about.content  # which is nobody else's business


@pytest.mark.parametrize("name", ["step-00000002", "step-00000004"])
def test_a_card_has_the_numbers_of_the_run(trained, dataset, name):
    found, stated = cells(trained / name), json.loads((trained / "run.json").read_bytes())["resolved"]
    saved = checkpoint.read_trainer(trained / name)
    log = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    (entry,) = (entry for entry in log if entry["step"] == saved["step"] and "tokens" in entry)
    assert found["steps"] == f"{saved['step']} of {stated['steps']}"
    assert found["tokens read, with padding"] == f"{entry['tokens']:,}" == f"{saved['tokens']:,}"
    assert found["seconds of training"] == f"{saved['spent_s']:.1f}"
    assert found["masked share"] == "0.3, exact"
    text = (trained / name / "README.md").read_text()
    assert f"with {stated['parameters']:,} parameters" in text
    assert f"| `{stated['dataset_id']}` | {dataset.num_documents:,} | {dataset.num_tokens:,} | 1 |" in text


@pytest.mark.parametrize(
    ("name", "kind"), [("step-00000004", "validation"), ("average-00000004", "average")]
)  # fmt: skip
def test_the_last_card_has_the_loss_that_was_measured_after_its_checkpoint(trained, name, kind):
    log = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    last = [entry for entry in log if "validation_loss" in entry][-1]
    found, text = cells(trained / name), (trained / name / "README.md").read_text()
    assert last["step"] == 4
    assert found["validation loss"] == f"{last[f'{kind}_loss']:.4f} nats a token"
    reference = json.loads((trained / "run.json").read_bytes())["resolved"]["reference_loss"]
    assert found["guessing by frequency alone"] == f"{reference['unigram']:.4f} nats a token"
    assert (found["right"], found["after step"]) == (f"{last[f'{kind}_accuracy']:.2%}", "4")
    assert "at most 2,048 rows of 32 tokens of the validation split. 15% of their tokens are masked" in text


def test_an_earlier_card_has_the_loss_that_was_known(trained):
    assert "No validation loss had been measured" in (trained / "step-00000002" / "README.md").read_text()


def test_the_options_of_a_card_are_those_that_differ(trained):
    (line,) = re.findall(
        r"^    bertrain pretrain (--model .*)$", (trained / "step-00000004/README.md").read_text(), re.M
    )
    words = shlex.split(line)
    given = dict(zip(words[::2], words[1::2], strict=True))
    config = json.loads((trained / "run.json").read_bytes())["config"]
    wanted = ["model", "elastic", "length", "steps", "global_batch_size", "lr", "mlm_probability", "average"]
    expected = {"--" + name.replace("_", "-"): str(config[name]) for name in wanted}
    assert given == expected | {"--model": "bert.json"}


def test_the_lines_of_a_card_load_the_model(trained, dataset, monkeypatch):
    monkeypatch.chdir(trained)
    (code,) = re.findall(r"```python\n(.*?)```", (trained / "step-00000004" / "README.md").read_text(), re.DOTALL)
    found = {}
    exec(code, found)
    assert isinstance(found["model"], type(AutoModelForMaskedLM.from_pretrained(trained / "step-00000004")))
    assert len(found["tokenizer"]) == dataset.special_tokens.vocab_size


def test_an_edited_card_is_kept_and_harms_no_checkpoint(run):
    for name in ("step-00000004", "average-00000004"):
        (run / name / "README.md").write_text("mine\n")
    assert checkpoint.find(run).name == "step-00000004"
    options = json.loads((run / "run.json").read_bytes())["config"] | {"out": str(run)}
    pretrain(Config(**options))
    assert {(run / name / "README.md").read_text() for name in ("step-00000004", "average-00000004")} == {"mine\n"}
    (run / "step-00000004" / "README.md").unlink()
    assert checkpoint.find(run).name == "step-00000004"


def test_an_edited_card_outlives_a_damaged_checkpoint_of_its_step(run):
    (run / "step-00000004" / "README.md").write_text("mine\n")
    (run / "step-00000004" / "model.safetensors").write_bytes(b"damaged")
    pretrain(Config(**json.loads((run / "run.json").read_bytes())["config"] | {"out": str(run)}))
    assert checkpoint.find(run).name == "step-00000004"
    assert (run / "step-00000004" / "README.md").read_text() == "mine\n"


def test_a_change_of_one_letter_is_seen(run):
    directory = run / "step-00000004"
    assert not card.is_changed(directory)
    text = (directory / "README.md").read_text()
    (directory / "README.md").write_text(text.replace("license: other", "license: mit"))
    assert card.is_changed(directory)
    card.renew(directory, text.encode())
    assert "license: mit" in (directory / "README.md").read_text()


def test_a_fine_tuned_model_has_a_card_which_is_renewed_until_it_is_edited(trained, tmp_path):
    lines = [f"{word} {number}\t{word == 'good'}" for number in range(8) for word in ("good", "bad")]
    (tmp_path / "train.tsv").write_text("\n".join(lines) + "\n")

    def tuned(**more):
        (tmp_path / "tuned" / "seed-0" / "seed.json").unlink(missing_ok=True)  # as if it were interrupted
        options = {"train": tmp_path / "train.tsv", "dev": tmp_path / "train.tsv", "checkpoint": trained, "seeds": 1,
                   "out": tmp_path / "tuned", "epochs": 1} | more  # fmt: skip
        words = [item for name, value in options.items() for item in (f"--{name}", str(value))]
        result = CliRunner().invoke(finetune.main, words)
        assert result.exit_code == 0, result.output
        (run,) = json.loads((tmp_path / "tuned" / "result.json").read_bytes())["runs"]
        return run, tmp_path / "tuned" / "seed-0" / "README.md"

    run, path = tuned()
    about = ModelCard.load(path)
    assert (about.data.pipeline_tag, about.data.license) == ("text-classification", "other")
    assert f"| dev | accuracy | {run['dev']['accuracy']:.4f} |" in about.text
    assert "| rows | 16 |" in about.text
    assert "| epochs | 1 |" in about.text
    assert "from `step-00000004`" in about.text
    assert "| epochs | 2 |" in tuned(epochs=2)[1].read_text()
    path.write_text("mine\n")
    assert tuned(epochs=1)[1].read_text() == "mine\n"


def test_a_task_has_a_name_on_the_hub():
    assert {kind.head.__name__ for kind in TASKS.values()} == set(card.PIPELINES)


def test_a_sub_network_has_a_card(trained, tmp_path):
    arguments = ["--checkpoint", str(trained), "--layers", "1", "--out", str(tmp_path / "small")]
    result = CliRunner().invoke(extract.main, arguments)
    assert result.exit_code == 0, result.output
    about = ModelCard.load(tmp_path / "small" / "README.md")
    parameters = sum(p.numel() for p in AutoModelForMaskedLM.from_pretrained(tmp_path / "small").parameters())
    assert f"with {parameters:,} parameters" in about.text
    assert "of the checkpoint `step-00000004` after step 4" in about.text
    assert about.data.tags == ["bertrain", "bert"]
