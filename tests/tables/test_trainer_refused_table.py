"""REFUSED of the trainer: options and files that a command of bertrain does not take. Nothing is trained or written."""

import json
import os
import shlex
from pathlib import Path

import pytest
from support.commands import refused
from support.disk import contents, write
from support.families import LISTED

PLAIN = {  # command → arguments that make sense, after which those of a row come
    "pretrain": "--data shards --out out --length 32 --steps 4 --global-batch-size 6",
    "finetune": "--checkpoint run --train data.tsv --dev data.tsv --out out --seeds 1 --epochs 1 --length 3",
    "augment": "--checkpoint run --train data.tsv --out out.tsv",
    "suite": "--checkpoint run --out out --seeds 1 --epochs 1",
    "evaluate": "--checkpoint run",
    "extract": "--checkpoint run --out out",
    "search": "--checkpoint run --data shards --out out --latency 1s --length 3",
    "teacher": "--model run --data shards --out out --length 32 --max-samples 9",
}
MODELS = {  # name of a file → the configuration in it, if that is not a model_type alone
    "gpt2": {},  # a decoder
    "t5": {},  # an encoder with a decoder
    "decoder": LISTED["bert"] | {"model_type": "bert", "is_decoder": True},
    "mpnet": LISTED["mpnet"],  # whose padding id is always 1
    "xmod": LISTED["roberta"],  # which needs more than tokens
    "options": {"config": {"data": "shards"}, "model_type": None},
}
LORA, TEACHER = "pretrain --init run --lora r=2,alpha=4", "pretrain --teacher run --model"
ELASTIC, REPLACED = "pretrain --model bert.json --elastic", "pretrain --model bert.json --discriminator"
REFUSED = {  # kind and option of the error → command lines
    "unknown task": ["finetune --task precedes", "augment --task qa"],
    "unknown objective": ["pretrain --model bert.json --objective mlm+spam"],
    "malformed lora": ["finetune --lora 8"],
    "malformed name": ["suite glues --data glue"],
    "missing data": ["evaluate"],
    "conflict data": ["evaluate --data shards --pairs data.tsv"],
    "conflict length": ["finetune --length 2", "evaluate --pairs data.tsv --length 8"],
    "malformed show": ["evaluate --data shards --length 8 --show -1"],
    "no-split split": ["evaluate --data shards --split none --length 8"],
    "conflict lora": [f"finetune --lora r=2,alpha=2 {more}" for more in ("--from-scratch", "--freeze all")]
    + [f"{LORA},target=decoder"],
    "conflict label": ["augment --task pairs", "augment --train single.tsv"],
    "conflict recipe": ["teacher --recipe modernbert-base", "pretrain --recipe tiny --config bert.json"],
    "conflict objective": ["pretrain --model bert.json --objective mlm+nsp --isolate-documents"],
    "too-long length": [
        f"{words} --length 600"
        for words in ("finetune", "teacher", "evaluate --data shards", f"{TEACHER} modernbert-tiny")
    ],
    "too-short-to-mask mlm_probability": ["teacher --mlm-probability 0.001"],
    "no-match lora": [f"{LORA},target=qurey"],
    "no-match lr_scale": ["pretrain --model bert.json --lr-scale embedings=0.1", f"{LORA} --lr-scale embeddings=0.1"],
    "nothing-to-train lr_scale": ["pretrain --model bert.json --lr-scale .=0"]
    + ["pretrain --model bert.json --elastic layers=1:2 --sub-networks 1 --lr-scale 'embeddings|cls|layer.0=0'"],
    "out-of-range layers": ["extract --layers 4"],
    "out-of-range feed_forward": ["extract --feed-forward 0"],
    "out-of-range heads": ["extract --width 25 --heads 2"],
    "malformed latency": ["search --latency 5", "search --latency 0ms"],
    "unsupported checkpoint": ["search"],  # without sub-networks
    "out-of-range elastic": [f"{ELASTIC} {sizes}" for sizes in ("layers=1", f"width=1:{10**18}")],
    "malformed elastic": [f"{ELASTIC} {sizes}" for sizes in ("width=10:32:8", "depth=1:3", "layers=1:2,layers=2")],
    "conflict elastic": [f"{ELASTIC} {sizes}" for sizes in ("heads=2,width=15:32:17", "heads=1:2,width=31:32")]
    + ["pretrain --model modernbert.json --elastic width=16:32:8"],
    "unsupported attention": [f"pretrain --model bert.json --attention {name}" for name in ("cudnn", "efficient")]
    + ["pretrain --model deberta.json --attention math"],
    "unsupported share_embeddings": [f"{REPLACED} electra.json"],
    "unsupported precision": [f"{REPLACED} deberta.json --share-embeddings none --precision bf16"],
    "model-not-found discriminator": [f"{REPLACED} none.json"],
    "model-unreadable model": [f"pretrain --model {name}.json" for name in ("gpt2", "t5", "decoder", "options")],
    "model-unreadable": ["pretrain --model xmod.json"],
    "unsupported model": ["pretrain --model mpnet.json"],
    "weights-missing init": [f"{LORA} --objective mlm+nsp"],
    "unsupported rope_base": ["pretrain --model bert.json --rope-base 1e5"],
    "unsupported objective": ["pretrain --model modernbert-tiny --objective mlm+nsp"],
    "unsupported": ["pretrain --model electra.json --elastic layers=1:2"],
    "unsupported distil_layers": [f"{TEACHER} {name}.json --distil hidden" for name in ("deep", "albert")],
    "not-a-run teacher": ["pretrain --model bert.json --teacher ."],
    "not-a-run checkpoint": ["finetune --checkpoint .", "evaluate --checkpoint . --data shards"],
    "model-not-found checkpoint": ["finetune --checkpoint ./gone"],
    "out-exists out": ["finetune --out data.tsv", "finetune --out data.tsv/cola", "augment --out single.tsv"]
    + ["teacher --out shards", "extract --out shards", "pretrain --out data.tsv"],
    "not-found config": ["pretrain --config nowhere.json"],
    "not-text": ["augment --keep latin.txt"],
    "no-column label": ["suite glue --data glue"],  # of the last task, before the first one is trained
    "bad-row": ["finetune --dev seven.tsv", "finetune --task regression --text label --label sentence"]
    + ["augment --train empty.tsv"],
}


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch, dataset, bert_run, configs):
    """The files that rows name, in the working directory."""
    monkeypatch.chdir(tmp_path)
    links = {"shards": dataset.path, "run": bert_run}
    links |= {f"{name}.json": configs[name] for name in ("bert", "albert", "electra", "modernbert", "deberta")}
    for name, path in links.items():
        os.symlink(path, name)
    write("data.tsv", "sentence\tlabel", "river light\t1", "salt stone\t0")
    for name, lines in {"seven": ["light\t7"], "single": ["river"], "empty": ["river\t1", "light\t"]}.items():
        write(f"{name}.tsv", *lines)
    for name, values in MODELS.items():
        write(f"{name}.json", json.dumps({"model_type": name} | values))
    write("deep.json", json.dumps(json.loads(Path("bert.json").read_bytes()) | {"num_hidden_layers": 6}))
    Path("latin.txt").write_bytes(b"not\nna\xefve\n")
    for name, label in (("RTE", "label"), ("WNLI", "answer")):
        for part in ("train", "dev"):
            write(f"glue/{name}/{part}.tsv", f"sentence1\tsentence2\t{label}", "a\tb\t0", "b\ta\t1")


LINES = [(line, *kind.split(), None)[:3] for kind, lines in REFUSED.items() for line in lines]


@pytest.mark.parametrize(("line", "kind", "option"), LINES)
def test_a_command_that_makes_no_sense_is_refused(tmp_path, line, kind, option):
    before, (name, *words) = contents(tmp_path), shlex.split(line)
    refused("bertrain", name, *shlex.split(PLAIN[name]), *words, kind=kind, option=option)
    assert contents(tmp_path) == before
    assert name != "pretrain" or not Path("out").exists()
