"""--side-channel: equal to two tables that are added, ordinary checkpoints, to the bit."""

import json

import pytest
import torch
from families import model_of
from helpers import refuses
from tokenizers import Tokenizer
from torch.func import functional_call
from training import TINY, changing, entries, learner, losses, refused_run, train, train_twice
from transformers import AutoModelForMaskedLM

import bertdata
from bertdata.errors import UsageError
from bertrain.lab import side_channel
from bertrain.optim import optimizers
from bertrain.options.config import Config
from bertrain.runtime import feed

EMBEDDINGS = "model.bert.embeddings.word_embeddings.weight"
SHORT = {"steps": 5, "eval_every": 0, "model": TINY}


@pytest.fixture(scope="module")
def table(tmp_path_factory, dataset):
    """Letters have whether they are vowels, and those that continue a word that as well; [MASK] and words have none."""
    path = tmp_path_factory.mktemp("table") / "table.tsv"
    rows = []
    for token in sorted(vocabulary(dataset)):
        letter = token.removeprefix("##")
        if len(letter) == 1 and letter.isalpha():
            rows.append("\t".join([token, "vowel" if letter in "aeiou" else "other", *["inside"] * (token != letter)]))
    path.write_text("\n".join([*rows, "no token\tx", ""]))
    return str(path)


@pytest.fixture(scope="module")
def with_table(once, dataset, table):
    """The directory of a run with the table."""
    return once("with", lambda out: train(dataset.path, out / "run", side_channel=table, **SHORT)) / "run"


@pytest.fixture(scope="module")
def without(once, dataset):
    """The directory of the same run without the table."""
    return once("without", lambda out: train(dataset.path, out / "run", **SHORT)) / "run"


def vocabulary(dataset):
    return Tokenizer.from_str(dataset.tokenizer_file("tokenizer.json").decode()).get_vocab()


def batches(dataset, number):
    loader = bertdata.Loader(dataset, length=32, global_batch_size=6)
    return [next(feed.micro_batches(next(loader), size=6, count=1, device=torch.device("cpu"))) for _ in range(number)]


def of_ids(table, dataset, number):
    """[V, structures]: how often each id has each structure."""
    read = side_channel.read(table, vocabulary(dataset))
    matrix = torch.zeros(number, len(read.names))
    for token_id, structure in zip(read.ids, read.structures, strict=True):
        matrix[token_id, structure] += 1
    return matrix


def test_steps_are_those_of_two_tables_that_are_added(dataset, table):
    """The reference adds the tables in its forward pass, for input and tied output; torch computes its gradients."""
    module, reference = (learner(model_of(TINY, dataset, seed=3)) for _ in range(2))
    side_channel.add(module, side_channel.read(table, vocabulary(dataset)), 32)
    optimizer = optimizers.build(module, Config.of(data="x", out="y", weight_decay=0.1, clip_norm=1e9))
    module.side_channel.attach(optimizer, module.model.get_input_embeddings().weight)
    optimizers.set_learning_rate(optimizer, 0.01)
    own = dict(reference.named_parameters())
    matrix = of_ids(table, dataset, len(own[EMBEDDINGS]))
    structures = torch.nn.Parameter(torch.zeros(matrix.shape[1], 32))
    decayed, plain = ([p for p in own.values() if (p.ndim > 1) == is_decayed] for is_decayed in (True, False))
    groups = [{"params": [*decayed, structures], "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    other = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.98), eps=1e-6)
    for piece in batches(dataset, 6):
        module(**piece)["mlm"].sum.backward()
        optimizer.step()
        optimizer.zero_grad()
        added = {EMBEDDINGS: own[EMBEDDINGS] + matrix @ structures}
        functional_call(reference, added, kwargs=dict(piece), tie_weights=True)["mlm"].sum.backward()
        other.step()
        other.zero_grad()
    assert float(structures.detach().abs().max()) > 0.01
    assert not module.side_channel.weight.any()
    added = {EMBEDDINGS: own[EMBEDDINGS] + matrix @ structures}
    torch.testing.assert_close(module.get_parameter(EMBEDDINGS), added[EMBEDDINGS], rtol=0, atol=2e-5)
    piece = batches(dataset, 1)[0]
    wanted = functional_call(reference, added, kwargs=dict(piece), tie_weights=True)["mlm"].sum
    torch.testing.assert_close(module(**piece)["mlm"].sum, wanted, rtol=1e-4, atol=0)


def test_checkpoints_are_ordinary_and_tokens_without_a_structure_learn_as_before(dataset, table, with_table, without):
    """After one step; later ones have other gradients."""
    resolved = json.loads((with_table / "run.json").read_text())["resolved"]
    assert resolved["side_channel"] == {"structures": 3, "ids": 52}
    log, plain = losses(entries(with_table)), losses(entries(without))
    assert log[0] == plain[0]
    assert log[1:] != plain[1:]
    one, other = (
        AutoModelForMaskedLM.from_pretrained(run / "step-00000001").state_dict() for run in (with_table, without)
    )
    assert one.keys() == other.keys()
    name = EMBEDDINGS.removeprefix("model.")
    has = of_ids(table, dataset, len(one[name])).any(1)
    assert all(torch.equal(one[key], other[key]) for key in one if key != name and "decoder.weight" not in key)
    assert torch.equal(one[name][~has], other[name][~has])
    assert (one[name][has] != other[name][has]).any(1).all()
    assert not (with_table / "step-00000001" / "beside.pt").exists()


@pytest.mark.parametrize(
    "more",
    [
        {"optimizer": "muon", "phase": changing(0.4, layers=[1, None])},
        {
            "phase": changing(0.3, 0.7, layers=[1, 2, None], trains=["", r"layer\.1\.|cls", ""]),
            "lr_scale": ["side_channel=2"],
        },
        {"elastic": "layers=1:2,width=16:32:16", "optimizer": "muon"},
    ],
)
def test_a_run_resumes_to_the_bit(dataset, table, tmp_path, more):
    options = SHORT | {"side_channel": table, "steps": 6, "save_every": 3} | more
    train_twice(dataset.path, tmp_path / "run", 3, **options)


def test_a_rate_of_0_is_the_run_without_the_table_and_init_begins_where_the_weights_are(
    dataset, table, without, tmp_path
):
    options = {"side_channel": table, "lr_scale": ["side_channel=0"], "save_every": 100}
    frozen = train(dataset.path, tmp_path / "frozen", **SHORT | options)
    assert losses(frozen) == losses(entries(without))
    init = SHORT | {"init": str(without), "model": "modernbert-tiny", "steps": 3, "save_every": 100}
    plain, channel = (
        train(dataset.path, tmp_path / name, **init | more)
        for name, more in (("plain", {}), ("channel", {"side_channel": table}))
    )
    assert losses(channel)[0] == losses(plain)[0]
    assert losses(channel)[2:] != losses(plain)[2:]


def test_other_tables_and_frozen_embeddings_are_refused(dataset, table, with_table, tmp_path):
    (tmp_path / "other.tsv").write_text("a\tx\n")
    for more, kind, out in (
        ({"side_channel": tmp_path / "other.tsv"}, "other-settings", with_table),
        ({}, "other-settings", with_table),
        ({"side_channel": table, "lr_scale": "word_embeddings=0"}, "conflict", tmp_path / "frozen"),
        ({"side_channel": tmp_path / "nothere.tsv"}, "not-found", tmp_path / "run"),
    ):
        refused_run(dataset.path, out, **SHORT | more, kind=kind, option="side_channel")


def test_a_file_that_is_no_table_is_refused(tmp_path):
    for number, (content, kind, line) in enumerate(
        (
            (b"a\tx\n\nstone\n", "bad-row", "line 3"),
            (b"a\tx\t\n", "bad-row", "line 1"),
            (b"\tx\n", "bad-row", "line 1"),
            (b"a\tx\nb\tx\na\ty\n", "bad-row", "line 3"),
            (b"unheard\tx\n", "no-match", ""),
            (b"", "no-match", ""),
            (b"a\t\xff\n", "not-text", "line 1"),
        )
    ):
        path = tmp_path / str(number)
        path.write_bytes(content)
        with refuses(kind, None if kind == "not-text" else "side_channel", error=UsageError, says=str(path)) as refusal:
            side_channel.read(str(path), {token: number for number, token in enumerate("abcdefgh")})
        assert line in str(refusal.value)


def test_lines_may_end_as_on_windows_and_a_name_may_stand_twice(tmp_path):
    (tmp_path / "table.tsv").write_bytes("木\t木\r\n林\t木\t木\r\n\r\n水\t水".encode())
    read = side_channel.read(str(tmp_path / "table.tsv"), {"木": 7, "林": 5, "水": 9})
    assert (read.names, read.num_ids) == (("木", "水"), 3)
    assert list(zip(read.ids.tolist(), read.structures.tolist(), strict=True)) == [(7, 0), (5, 0), (5, 0), (9, 1)]
    channel = side_channel.SideChannel(read, 4)
    model = torch.nn.Embedding(10, 4)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD([*model.parameters(), channel.weight], lr=1.0)
    channel.attach(optimizer, model.weight)
    model(torch.tensor([7, 5, 1])).sum().backward()
    optimizer.step()
    moved = (before - model.weight.detach())[:, 0]
    assert moved.tolist() == pytest.approx([0, 1, 0, 0, 0, 1 + 2 * 3, 0, 1 + 3, 0, 0])  # 林 and 木: 1 + 2
