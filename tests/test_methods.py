"""RUNS: runs of every method × {stopped and resumed, two ranks, its checkpoint in transformers}."""

import pytest
from support.commands import succeeds
from support.runs import QUIET, TINY, assert_near, changing, last_checkpoint, train, train_twice
from transformers import AutoModelForMaskedLM

from bertrain.lab.distillation import teacher

NAMES = ("distil_loss", "discriminator_loss", "discriminator_accuracy")
RUNS = {
    "logits": {"teacher": "run", "distil": "logits"},
    "relations": {"teacher": "run", "distil": "relations", "lr": 3e-2},
    "hidden": {"teacher": "run", "distil": "hidden", "lr": 3e-2},
    "cached": {"teacher_cache": "cache"},
    "elastic": {"elastic": "layers=1:2,width=16:32:8"},
    "stacked": {"phase": changing(0.5, layers=[1, None])},
    "replaced": {"discriminator": TINY},
    "replaced, tied": {"discriminator": TINY, "share_embeddings": "tied"},
    "replaced, apart": {"discriminator": TINY, "share_embeddings": "none"},
    "diffusion": {"objective": "diffusion", "masking": "uniform"},
    "lora": {"init": "run", "lora": "r=2,alpha=6", "lr": 2e-2},
    "lora, muon": {"init": "run", "lora": "r=2,alpha=6", "optimizer": "muon", "lr_scale": ["lora_B=4", "layer.0=0"]},
    "lora, targets": {"init": "run", "lora": "r=2,alpha=6,target=query|dense"},
}


@pytest.fixture
def options(dataset, bert_run, once):
    """options(name): those of a run of four steps."""

    def answer(folder):
        limits = ["--max-samples", 24, "--length", 32, "--top-k", 8]
        succeeds(teacher.main, "--model", bert_run, "--data", dataset.path, "--out", folder / "cache", *limits)

    def of(name):
        places = {"run": str(bert_run), "cache": str(once("answers", answer) / "cache")}
        given = {
            key: places.get(value, value) if isinstance(value, str) else value for key, value in RUNS[name].items()
        }
        return QUIET | {"steps": 4, "save_every": 2} | given

    return of


@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes_to_the_same_bits_and_its_checkpoint_is_one_of_transformers(dataset, tmp_path, options, name):
    log = train_twice(dataset.path, tmp_path / "run", 2, **options(name))
    assert log[0]["loss"] > 0
    _, info = AutoModelForMaskedLM.from_pretrained(last_checkpoint(tmp_path / "run"), output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]


@pytest.mark.parametrize(
    "name", [name if name == "replaced, tied" else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_two_ranks_have_the_losses_of_one(dataset, tmp_path, options, name):
    given = options(name) | {"micro_batch_size": 1, "global_batch_size": 4, "eval_every": 4, "save_every": 100}
    one = train(dataset.path, tmp_path / "one", **given)
    two = train(dataset.path, tmp_path / "two", ranks=2, **given)
    assert_near(one, two, *NAMES, rel=1e-4)
