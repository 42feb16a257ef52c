"""The files that commands of other tools read: text in many forms, vocabularies, ids, models, labelled examples."""

from __future__ import annotations

import gzip
import json
import random
import struct
from pathlib import Path
from typing import Any

KNOWN = ["the", "of", "and", "stone", "river", "light", "under", "morning", "bread", "letter", "wind", "house", "salt"]
WORDS = [*KNOWN, "Häuser", "naïve", "rivers", "12", "x-ray", "水"]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

SIZES = {"vocab_size": 100, "architectures": [], "max_position_embeddings": 80}
WIDTHS = SIZES | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DIMS = SIZES | {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "dropout": 0.0, "attention_dropout": 0.0}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "type_vocab_size": 0}
LOCAL = {"local_attention": 8, "global_attn_every_n_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {"model_type": "bert"} | WIDTHS | NO_DROPOUT,
    "dropout": {"model_type": "bert", "hidden_dropout_prob": 0.2} | WIDTHS,
    "modernbert": {"model_type": "modernbert"} | WIDTHS | LOCAL,
    "modern-dropout": {"model_type": "modernbert", "attention_dropout": 0.1, "mlp_dropout": 0.2} | WIDTHS,
    "distilbert": {"model_type": "distilbert", "tie_word_embeddings": False} | DIMS,
    "albert": {"model_type": "albert", "embedding_size": 16} | WIDTHS | NO_DROPOUT,
    "electra": {"model_type": "electra", "embedding_size": 16} | WIDTHS,
    "deberta": {"model_type": "deberta-v2"} | WIDTHS | RELATIVE,
}


def documents(number: int) -> list[str]:
    """Of a few lines each, the same on every machine."""
    draw = random.Random(7)
    made = []
    for document in range(number):
        lines = [" ".join(draw.choices(WORDS, k=draw.randint(2, 12))) + "." for _ in range(draw.randint(1, 9))]
        made.append(f"Document {document}.\n" + "\n".join(lines) + "\n")
    return made


def chinese() -> str:
    draw = random.Random(8)
    letters = [chr(0x4E00 + number) for number in range(300)]
    lines = ["".join(draw.choices(letters, k=draw.randint(3, 40))) + "。" for _ in range(600)]
    return "\n\n".join(lines) + "\n"


def two_characters(text: str) -> list[str]:
    """Segment Chinese text, for --words inputs:two_characters."""
    return [text[at : at + 2] for at in range(0, len(text), 2)]


def byte_level_bpe(text: str) -> str:
    """A tokenizer.json like those of GPT-2 and RoBERTa, trained on a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"vocab_size": 400, "special_tokens": ["<|endoftext|>", "[CLS]", "[SEP]", "[MASK]"]}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(**options, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer.to_str()


def as_toml(options: dict[str, Any]) -> str:
    """Options as a file of TOML; a table in them is on one line."""
    return "".join(f"{name} = {_inline(value)}\n" for name, value in options.items())


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_inline(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return json.dumps(value)


def write_inputs(folder: Path, number: int = 400) -> None:
    """Write all files, of so many documents."""
    import pyarrow as pa
    from pyarrow import parquet

    def write(name: str, text: str) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")

    bodies = documents(number)
    text, rows = "\n".join(bodies), [{"number": at, "body": body} for at, body in enumerate(bodies)]
    letters = sorted(set(text + "abcdefghijklmnopqrstuvwxyz") - set(" \n"))
    vocabulary = [*SPECIALS, *letters, *("##" + letter for letter in letters), *sorted(KNOWN)]
    write("vocab.txt", "\n".join(vocabulary) + "\n")
    write("characters.txt", "\n".join([*SPECIALS, *sorted(set(chinese()) - {"\n"})]) + "\n")
    write("bpe.json", byte_level_bpe(text))
    write("english.txt", text)
    write("chinese.txt", chinese())
    lines = "".join(json.dumps(row, ensure_ascii=row["number"] % 2 == 0) + "\n" for row in rows)
    write("english.jsonl", lines + '{"number": 400}\n{"number": 401, "body": null}\n')
    for at, body in enumerate(bodies[:60]):
        write(("pages/" if at % 5 else "pages/drafts/") + f"{at}" + (".txt" if at % 3 else ".md"), body)
    (folder / "english.txt.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    with pa.CompressedOutputStream(str(folder / "english.jsonl.zst"), "zstd") as file:
        file.write(lines.encode())
    table = pa.Table.from_pylist(rows)
    parquet.write_table(table, folder / "english.parquet", row_group_size=64)
    with pa.ipc.new_file(str(folder / "english.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=100)
    write_ids(folder / "tokens", 5 * number)
    for name, settings in MODELS.items():
        write(f"{name}.json", json.dumps(settings))
    draw = random.Random(9)
    for name, size in (("train.tsv", 48), ("dev.tsv", 24)):
        texts = [draw.choices(WORDS, k=draw.randint(3, 14)) for _ in range(size)]
        write(name, "".join(f"{' '.join(words)}\t{'river' in words}\n" for words in texts))
    pairs = [draw.choices(KNOWN, k=6) for _ in range(20)]
    judged = [{"sentence_good": " ".join(pair), "sentence_bad": " ".join(sorted(pair))} for pair in pairs]
    write("pairs.jsonl", "".join(json.dumps(row) + "\n" for row in judged))


def write_ids(prefix: Path, number: int) -> None:
    """Write so many sentences, five to a document, as the two files of Megatron, and as rows of Parquet."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    draw = random.Random(10)
    lengths, starts = [draw.randint(1, 30) for _ in range(number)], np.arange(0, number + 1, 5)
    ends, ids = np.cumsum(lengths), np.array([draw.randrange(5, 40) for _ in range(sum(lengths))], "<u2")
    prefix.with_suffix(".bin").write_bytes(ids.tobytes())
    arrays = np.array(lengths, "<i4"), 2 * (ends - lengths), starts
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, number, starts.size)
    prefix.with_suffix(".idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    rows = [document.tolist() for document in np.split(ids, ends[4:-1:5])]
    parquet.write_table(pa.table({"input_ids": rows}), prefix.with_suffix(".parquet"))
