"""The model of speed of `bertrain doctor --gpu`, beside runs of ours and of others."""

import re

import pytest
import torch
from conftest import ROOT
from helpers import invoke
from training import TINY
from transformers import AutoModelForMaskedLM, BertConfig, ModernBertConfig

from bertrain.commands import doctor
from bertrain.commands.speed import GPUS, Sizes, seconds_of_step
from bertrain.run.rates import Operations

PAGE = ROOT / "docs" / "gpu.md"
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


def encoder(config):
    with torch.device("meta"):
        return Sizes.of(AutoModelForMaskedLM.from_config(config))


def decoder(width, layers, vocab_size, parameters, *, rotary=False):
    """One that multiplies each token with those before it, and predicts all of them."""
    token, target = 12 * layers * width**2, vocab_size * width
    operations = Operations(token=token, target=target, width=width, scores=float, windows=(None,) * layers)
    return Sizes(
        operations=operations,
        trained=parameters,
        width=width,
        inner=4 * width,
        layers=layers,
        vocab_size=vocab_size,
        rotary=rotary,
    )


IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "cls_token_id": 2, "sep_token_id": 3}
RESIZED = encoder(ModernBertConfig(vocab_size=30522, **IDS))
ALONE = {"passes": 1, "gpus": 1}
MEASURED = {
    **{
        f"{name}, our {gpu.upper()}": (sizes, gpu, {"rows": 2**15 // length, "length": length, "slots": slots, **ALONE})
        for name, sizes, length, slots, gpus in [
            ("bert-base, rows of 128", encoder(BertConfig()), 128, 19, ("h100", "h200")),
            ("bert-base, rows of 512", encoder(BertConfig()), 512, 77, ("h100", "h200")),
            ("bert-large, rows of 512", encoder(BertConfig(**LARGE)), 512, 77, ("h200",)),
            ("modernbert-base, rows of 1,024", RESIZED, 1024, 154, ("h100",)),
            ("modernbert-base, packed rows of 1,024", RESIZED, 1024, 154, ("h200",)),
        ]
        for gpu in gpus
    },
    "ModernBERT-base, rows of 1,024": (
        encoder(ModernBertConfig()),
        "h100",
        {"rows": 576, "length": 1024, "slots": 307, "passes": 6, "gpus": 8},
    ),
    "BERT-large of NVIDIA, rows of 128": (
        encoder(BertConfig(**LARGE)),
        "a100",
        {"rows": 8192, "length": 128, "slots": 20, "passes": 32, "gpus": 1},
    ),
    "GPT-2 (124M) of llm.c in PyTorch": (
        decoder(768, 12, 50304, 124_000_000),
        "h100",
        {"rows": 64, "length": 1024, "slots": 1024, "passes": 1, "gpus": 8},
    ),
    "nanochat of 32 layers": (
        decoder(2048, 32, 65536, 1_879_048_192, rotary=True),
        "h100",
        {"rows": 32, "length": 2048, "slots": 2048, "passes": 4, "gpus": 8},
    ),
    "BERT-base of Hugging Face, in MosaicBERT's recipe": (
        encoder(BertConfig()),
        "a100",
        {"rows": 512, "length": 128, "slots": 128, "passes": 4, "gpus": 8},
    ),
}
"""Name → model, GPU, and the step of one of them: of runs of ours, and of those that others published."""


def tokens_a_second(sizes, gpu, **step):
    return step["rows"] * step["length"] / seconds_of_step(sizes, GPUS[gpu], **step)


@pytest.mark.parametrize("name", MEASURED)
def test_the_page_has_the_error_of_each_run(name):
    (line,) = (line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |"))
    published, said, error = (cell.strip() for cell in line.split("|")[3:6])
    sizes, gpu, step = MEASURED[name]
    expected = tokens_a_second(sizes, gpu, **step)
    thousands = float(re.search(r"= ([\d.]+) k", published)[1])
    assert f"{expected / 1000:.3g} k" == said
    assert f"{expected / 1000 / thousands - 1:+.0%}".replace("-", "−").replace("%", " %") == error


def test_a_step_takes_longer_with_more_to_do_and_on_slower_gpus():
    sizes, step = encoder(BertConfig()), {"rows": 64, "length": 512, "slots": 77, "passes": 1, "gpus": 1}
    one = tokens_a_second(sizes, "h200", **step)
    slowest_first = sorted(GPUS, key=lambda gpu: tokens_a_second(sizes, gpu, **step))
    assert slowest_first == ["l4", "4090", "a100", "h100", "h200"]
    assert tokens_a_second(encoder(BertConfig(**LARGE)), "h200", **step) < one / 2
    assert tokens_a_second(sizes, "h200", **step | {"length": 128, "rows": 256, "slots": 19}) > one
    few = step | {"rows": 8}
    assert tokens_a_second(sizes, "4090", **few | {"gpus": 8}) < tokens_a_second(sizes, "4090", **few)


def examine(dataset, tmp_path, **options):
    options = {"data": dataset.path, "out": tmp_path / "run", "model": TINY, "length": 32, "steps": 100} | options
    words = (word for name, value in options.items() if value for word in (f"--{name.replace('_', '-')}", value))
    result = invoke(doctor.main, *words)
    return result.exit_code, {line.split()[1]: line for line in result.output.splitlines() if line[4:6] == "  "}


def numbers(line):
    return [float(number.replace(",", "")) for number in re.findall(r"[\d,.e+-]*\d", line.partition("; computed")[0])]


def test_the_doctor_prints_the_speed_of_a_machine_that_is_not_here(dataset, tmp_path):
    code, lines = examine(dataset, tmp_path, gpu="h100", nproc=2)
    assert code == 0
    assert "devices" not in lines
    assert "1 × 128 on each of 2 ranks" in lines["batch"]
    assert "16 on each of 2 ranks" in examine(dataset, tmp_path, gpu="h100", nproc=2, length=2048)[1]["batch"]
    assert "each H100 has 80.0 GB" in lines["memory"]
    total, each, gpus, mfu, hours, gpu_hours = numbers(lines["speed"].split("about")[1])
    assert (total, gpus, gpu_hours) == (pytest.approx(2 * each, rel=1e-2), 2, pytest.approx(2 * hours, rel=1e-2))
    assert 0 <= mfu < 65
    assert hours == pytest.approx(100 * 256 * 32 / total / 3600, rel=1e-2)
    timed = examine(dataset, tmp_path, gpu="h100", steps=None, budget="2h")[1]["speed"]
    assert numbers(timed.split("MFU")[1])[1:] == [2, 2]


def test_a_run_that_does_not_fit_on_that_gpu_is_found(dataset, tmp_path):
    options = {"gpu": "l4", "micro_batch_size": 10**7, "global_batch_size": 10**7}
    code, lines = examine(dataset, tmp_path, **options)
    assert (code, lines["memory"][:4]) == (1, "FAIL")
