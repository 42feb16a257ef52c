"""--side-channel: equal to two tables that are added, blind to what is hidden, ordinary checkpoints, to the bit."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch.func import functional_call
from training import entries, flags, learner, losses, on_ranks, train
from transformers import AutoModelForMaskedLM

import bertdata
from bertdata.errors import UsageError
from bertrain import feed, optim
from bertrain.config import Config
from bertrain.models import build
from bertrain.optim import side_channel

ROOT = Path(__file__).parent.parent
BERT = {"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2,
        "intermediate_size": 48, "max_position_embeddings": 80, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0}  # fmt: skip
EMBEDDINGS = "model.bert.embeddings.word_embeddings.weight"
SHORT = {"steps": 5, "eval_every": 0}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "bert.json"
    path.write_text(json.dumps(BERT))
    return str(path)


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


def vocabulary(dataset):
    return Tokenizer.from_str(dataset.tokenizer_file("tokenizer.json").decode()).get_vocab()


def batches(dataset, number):
    loader = bertdata.Loader(dataset, length=32, global_batch_size=6)
    return [next(feed.micro_batches(next(loader), size=6, count=1, device=torch.device("cpu"))) for _ in range(number)]


def made(dataset, table, model, **options):
    """A Learner with the side channel of a table, and its optimizer."""
    weights, _ = build.build(model, dataset.special_tokens, length=32, seed=3)
    module = learner(weights)
    read = side_channel.read(table, vocabulary(dataset))
    module.side_channel = side_channel.SideChannel(read, weights.get_input_embeddings().embedding_dim)
    optimizer = optim.build(module, Config(data="x", out="y", **options))
    optim.set_learning_rate(optimizer, 0.01)
    return module, optimizer


def of_ids(table, dataset, number):
    """[V, structures]: how often each id has each structure."""
    read = side_channel.read(table, vocabulary(dataset))
    matrix = torch.zeros(number, len(read.names))
    for token_id, structure in zip(read.ids, read.structures, strict=True):
        matrix[token_id, structure] += 1
    return matrix


def test_steps_are_those_of_two_tables_that_are_added(dataset, table, bert):
    """The twin adds the tables in its forward pass, for input and tied output, and leaves gradients to torch."""
    options = {"weight_decay": 0.1, "clip_norm": 1e9}
    module, optimizer = made(dataset, table, bert, **options)
    twin = learner(build.build(bert, dataset.special_tokens, length=32, seed=3)[0])
    own = dict(twin.named_parameters())
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
        functional_call(twin, added, kwargs=dict(piece), tie_weights=True)["mlm"].sum.backward()
        other.step()
        other.zero_grad()
    assert float(structures.detach().abs().max()) > 0.01
    assert not module.side_channel.weight.any()
    found, expected = module.get_parameter(EMBEDDINGS), own[EMBEDDINGS] + matrix @ structures
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    piece = batches(dataset, 1)[0]
    added = {EMBEDDINGS: own[EMBEDDINGS] + matrix @ structures}
    wanted = functional_call(twin, added, kwargs=dict(piece), tie_weights=True)["mlm"].sum
    torch.testing.assert_close(module(**piece)["mlm"].sum, wanted, rtol=1e-4, atol=0)


def is_blind(logits_of, piece):
    """Whether logits stay the same when only what is hidden changes."""
    hidden = piece["targets"].clone()
    used = hidden != bertdata.IGNORE_INDEX
    hidden[used] = hidden[used].flip(0)
    assert not torch.equal(hidden, piece["targets"])
    return torch.equal(logits_of(piece), logits_of(dict(piece) | {"targets": hidden}))


def test_nothing_hidden_leaks_and_a_leak_would_be_found(dataset, table, bert, tmp_path):
    """The twin has structures of the ids before masking, as those who compute them beside the ids do."""
    train(dataset.path, tmp_path / "run", model=bert, side_channel=table, **SHORT)
    module = learner(build.load(tmp_path / "run" / "step-00000005")).eval()
    special, embeddings = dataset.special_tokens, module.get_parameter(EMBEDDINGS).detach()
    matrix = of_ids(table, dataset, len(embeddings))
    structures = torch.linalg.lstsq(matrix, embeddings).solution
    own = embeddings - matrix @ structures

    def ids_before_masking(piece):
        used = piece["targets"] != bertdata.IGNORE_INDEX
        rows = torch.arange(len(used))[:, None].expand_as(used)
        ids = piece["input_ids"].clone()
        ids[rows[used], piece["masked_positions"][used]] = piece["targets"][used]
        return ids

    def channel(ids):
        return matrix[ids] @ structures

    def with_channel(choose):
        """Logits of the model whose embeddings are own + channel of the ids that `choose` gives."""

        def logits(piece):
            vectors = own[piece["input_ids"]] + channel(choose(piece))
            hidden = module.model.bert(inputs_embeds=vectors, attention_mask=piece.get("attention_mask"))
            return module.predict(hidden.last_hidden_state, piece["masked_positions"])

        return logits

    with torch.no_grad():
        piece = batches(dataset, 1)[0]
        honest, leaking = with_channel(lambda piece: piece["input_ids"]), with_channel(ids_before_masking)
        torch.testing.assert_close(module.logits(**piece), honest(piece), rtol=0, atol=1e-6)
        for logits_of in (lambda piece: module.logits(**piece), honest):
            assert is_blind(logits_of, piece)
        assert not is_blind(leaking, piece)
        masked, replaced = (
            {"[MASK]": piece["input_ids"] == special.mask,
             "random": (piece["input_ids"] != special.mask) & (piece["input_ids"] != ids_before_masking(piece))}[name]
            for name in ("[MASK]", "random")
        )  # fmt: skip
        assert masked.sum() > 5 < replaced.sum() + 5
        assert not channel(piece["input_ids"])[masked].any()  # that of [MASK], which has none
        assert channel(ids_before_masking(piece))[masked].any()
        assert torch.equal(channel(piece["input_ids"])[replaced], channel(piece["input_ids"][replaced]))


def test_checkpoints_are_ordinary_and_tokens_without_a_structure_learn_as_before(
    dataset, table, bert, tmp_path, capsys
):
    """After one step; later ones have other gradients."""
    log = train(dataset.path, tmp_path / "with", model=bert, side_channel=table, **SHORT)
    assert "--side-channel: 52 ids have one or more of 3 structures" in capsys.readouterr().out
    assert json.loads((tmp_path / "with" / "run.json").read_text())["resolved"]["side_channel"] == {
        "structures": 3, "ids": 52,
    }  # fmt: skip
    without = train(dataset.path, tmp_path / "without", model=bert, **SHORT)
    assert losses(log)[0] == losses(without)[0]
    assert losses(log)[1:] != losses(without)[1:]
    one, other = (AutoModelForMaskedLM.from_pretrained(tmp_path / name / "step-00000001").state_dict()
                  for name in ("with", "without"))  # fmt: skip
    assert one.keys() == other.keys()
    name = EMBEDDINGS.removeprefix("model.")
    has = of_ids(table, dataset, len(one[name])).any(1)
    assert all(torch.equal(one[key], other[key]) for key in one if key != name and "decoder.weight" not in key)
    assert torch.equal(one[name][~has], other[name][~has])
    assert (one[name][has] != other[name][has]).any(1).all()
    assert not (tmp_path / "with" / "step-00000001" / "beside.pt").exists()


@pytest.mark.parametrize(
    "more",
    [{"optimizer": "adamw", "average": 0.4}, {"optimizer": "muon", "grow": "1,2", "grow_at": "0.4"},
     {"grow": "1,2,2", "grow_at": "0.3,0.7", "freeze_trunk": True, "lr_scale": ["side_channel=2"]},
     {"elastic": "layers=1:2,width=16:32:16", "optimizer": "muon"}],
)  # fmt: skip
def test_a_run_resumes_to_the_bit(dataset, table, bert, tmp_path, more):
    options = SHORT | {"model": bert, "side_channel": table, "steps": 8} | more
    whole = train(dataset.path, tmp_path / "run", **options)
    weights = [(tmp_path / "run" / f"step-{step:08d}" / "model.safetensors").read_bytes() for step in (3, 8)]
    assert weights[0] != weights[1]
    for step in range(4, 9):
        shutil.rmtree(tmp_path / "run" / f"step-{step:08d}")
    for average in (tmp_path / "run").glob("average-*"):
        shutil.rmtree(average)
    assert losses(train(dataset.path, tmp_path / "run", **options)) == losses(whole)
    assert (tmp_path / "run" / "step-00000008" / "model.safetensors").read_bytes() == weights[1]


def test_a_rate_of_0_is_the_run_without_the_table_and_init_begins_where_the_weights_are(dataset, table, bert, tmp_path):
    without = train(dataset.path, tmp_path / "without", model=bert, **SHORT)
    frozen = train(
        dataset.path, tmp_path / "frozen", model=bert, side_channel=table, lr_scale=["side_channel=0"], **SHORT
    )
    assert losses(frozen) == losses(without)
    init = {"init": str(tmp_path / "without"), "model": "modernbert-tiny"}
    plain, channel = (
        train(dataset.path, tmp_path / name, **SHORT | init | more)
        for name, more in (("plain", {}), ("channel", {"side_channel": table}))
    )
    assert losses(channel)[0] == losses(plain)[0]
    assert losses(channel)[2:] != losses(plain)[2:]


@pytest.mark.dist
def test_two_ranks_learn_as_one(dataset, table, bert, tmp_path):
    options = SHORT | {"model": bert, "side_channel": table}
    one = train(dataset.path, tmp_path / "one", **options)
    code, _, err = on_ranks(2, "bertrain.pretrain", flags(dataset.path, tmp_path / "two", **options))
    assert code == 0, err
    for (step, loss, *_), (other_step, other, *_) in zip(losses(one), losses(entries(tmp_path / "two")), strict=True):
        assert (step, loss) == (other_step, pytest.approx(other, abs=1e-4))


def refused(dataset, out, capsys, **options):
    """The sentence that a run ends with."""
    with pytest.raises(SystemExit) as ended:
        train(dataset.path, out, **SHORT | options)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_other_tables_and_frozen_embeddings_are_refused(dataset, table, bert, tmp_path, capsys):
    options = {"model": bert, "side_channel": table}
    train(dataset.path, tmp_path / "run", **SHORT | options)
    (tmp_path / "other.tsv").write_text("a\tx\n")
    said = refused(dataset, tmp_path / "run", capsys, model=bert, side_channel=str(tmp_path / "other.tsv"))
    assert re.search(
        r"was trained with --side-channel of SHA-256 \w{16}, and --side-channel of SHA-256 \w{16} was", said
    )
    assert "and none was given" in refused(dataset, tmp_path / "run", capsys, model=bert)
    said = refused(dataset, tmp_path / "frozen", capsys, lr_scale=["word_embeddings=0"], **options)
    assert "--side-channel learns with the word embeddings, and something else, such as --lr-scale, freezes" in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"a\t\xff\n", "line 1 is not UTF-8 text; save the file"),
        (b"a\tx\n\nstone\n", "line 3, is 'stone'; write a token, a tab"),
        (b"a\tx\t\n", "line 1, is 'a\\tx\\t'"),
        (b"\tx\n", "line 1, is '\\tx'"),
        (b"a\tx\nb\tx\na\ty\n", "has the token 'a' in lines 1 and 3"),
        (b"unheard\tx\n", "names none of the 78 tokens"),
        (b"", "names none of the"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, content, said):
    path = tmp_path / "table.tsv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match="^--side-channel ") as refusal:
        side_channel.read(str(path), {token: number for number, token in enumerate("abcdefgh" * 9 + "αβγδεζ")}
                          | {str(number): 0 for number in range(64)})  # fmt: skip
    assert said in str(refusal.value)


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
