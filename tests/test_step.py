"""What one step does on any device: where it computes in half precision and by which kernels."""

import json

import pytest
import torch
from training import QUIET, TINY, assert_near, refused_run, train
from transformers import AutoConfig, AutoModelForMaskedLM

from bertrain.models import attention
from bertrain.models.encoder import Encoder
from bertrain.objectives import OBJECTIVES, LossSum, Objective

SEEN = {}


def in_half():
    return torch.is_autocast_enabled("cpu")


class Watching(Objective):
    """Keeps whether autocast was on in each part of a step."""

    def count(self, batch):
        return len(batch.sample_ids)

    def prepare(self, piece):
        SEEN["prepare"] = in_half()
        return piece

    def forward(self, encoder, outputs, piece):
        SEEN["forward"] = in_half()
        outputs.logits.register_hook(lambda gradient: SEEN.update(backward=in_half()))
        return LossSum(outputs.logits.float().square().mean(), torch.tensor(0))


def test_only_the_forward_pass_is_in_autocast(dataset, tmp_path):
    """Neither the backward pass, as torch advises, nor what a teacher computes without gradients."""
    OBJECTIVES["watching"] = Watching
    SEEN.clear()
    options = QUIET | {"objective": "mlm+watching", "precision": "bf16", "steps": 1, "micro_batch_size": 2}
    train(dataset.path, tmp_path / "run", **options)
    assert SEEN == {"prepare": False, "forward": True, "backward": False}


# --------------------------------------------------------------------------------------------------------- --attention


def enabled():
    """The kernels that torch may choose among, by name."""
    answers = {
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
    }
    return tuple(name for name, is_enabled in answers.items() if is_enabled)


@pytest.mark.parametrize(
    ("choice", "version", "expected"),
    [
        ("auto", "2.13.0+cu130", ("flash", "efficient", "math")),
        ("auto", "2.6.0", ("flash", "efficient", "math")),
        ("auto", "2.14.0a0+git1", ("flash", "cudnn", "efficient", "math")),
        ("auto", "3.0.1", ("flash", "cudnn", "efficient", "math")),
        ("cudnn", "2.13.0", ("cudnn",)),
        ("math", "2.13.0", ("math",)),
    ],
)
def test_kernels_on_gpus(monkeypatch, choice, version, expected):
    """auto leaves cuDNN out where it has known faults; what is asked for is given."""
    monkeypatch.setattr(torch, "__version__", version)
    encoder = Encoder(AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(TINY)))
    names = attention.kernels(choice, encoder, torch.device("cuda"))
    assert names == expected
    before = enabled()
    with attention.limited(names)():
        assert enabled() == expected
    assert enabled() == before


@pytest.mark.parametrize("choice", ["auto", "flash", "math"])
@pytest.mark.parametrize("more", [{}, {"gradient_checkpointing": True}, {"isolate_documents": True}], ids=str)
def test_a_step_has_the_kernels_that_are_asked_for(dataset, tmp_path, monkeypatch, choice, more):
    """In the forward pass and in the backward pass; the evaluation and what comes after have all of them."""
    seen, plain = set(), torch.nn.functional.scaled_dot_product_attention

    def attend(*arguments, **options):
        seen.add((torch.is_grad_enabled(), enabled()))
        return plain(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    before, expected = enabled(), ("flash", "math") if choice == "auto" else (choice,)
    train(dataset.path, tmp_path / "run", **QUIET | {"steps": 2, "attention": choice, **more})
    assert seen == {(True, expected), (False, before)}
    assert enabled() == before
    resolved = json.loads((tmp_path / "run" / "run.json").read_text())["resolved"]
    assert tuple(resolved["attention"]) == expected


def test_kernels_learn_the_same(dataset, tmp_path):
    logs = [
        train(dataset.path, tmp_path / choice, **QUIET | {"steps": 3, "attention": choice, "precision": precision})
        for choice, precision in (("flash", "fp32"), ("math", "fp32"), ("flash", "bf16"))
    ]
    assert_near(logs[0], logs[1], rel=1e-4)
    assert_near(logs[0], logs[2], rel=2e-2)


@pytest.mark.parametrize("choice", ["cudnn", "efficient"])
def test_a_kernel_that_cannot_run_is_one_sentence(dataset, tmp_path, choice):
    options = QUIET | {"steps": 2, "attention": choice}
    refused_run(dataset.path, tmp_path / "run", **options, kind="unsupported", option="attention", given=choice)


def test_a_model_that_attends_by_itself_has_no_choice(dataset, configs, tmp_path):
    options = QUIET | {"steps": 2, "model": str(configs["deberta"]), "attention": "math"}
    refused_run(dataset.path, tmp_path / "run", **options, kind="unsupported", option="attention", given="math")
    train(dataset.path, tmp_path / "run", **options | {"attention": "auto"})
    resolved = json.loads((tmp_path / "run" / "run.json").read_text())["resolved"]
    assert resolved["attention"] == ["eager"]
