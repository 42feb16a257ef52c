"""Samples that are pairs of segments, for the next sentence prediction of BERT."""

from __future__ import annotations

from typing import Any

import numpy as np

from bertdata.errors import UsageError, damaged, require
from bertdata.read.index import Append, index_identity, open_index
from bertdata.read.kernels import pairs as kernels
from bertdata.read.kernels.rows import SPAN, Frames
from bertdata.read.stream import Columns, Samples, Wanted, require_sound

_FACTS_SAMPLES = 4096


class Pairs(Samples):
    """Samples that are pairs of segments A and B, each of consecutive sentences.

    Sentences are added until they have enough tokens for a row. A random number of them, at least one, is A. With
    probability 1/2 the rest is B; else B is from a different document, and the next pair starts where A ends:

        document     s0 s1 s2 s3 s4 s5          s0 to s3 have enough tokens; A is s0 s1
        B follows    [CLS] s0 s1 [SEP] s2 s3 [SEP]              label 0; the next pair starts at s4
        B random     [CLS] s0 s1 [SEP] other document [SEP]     label 1; the next pair starts at s2

    The seed determines where pairs are cut. The seed and the epoch determine the document of a random B, and the tokens
    to cut off if A and B together are too long. A share `short_seq_prob` of the documents is cut to shorter rows.
    docs/determinism.md has the algorithm.

    The first Loader of pairs makes an index of 48 bytes per pair and 8 bytes per sentence, in O(sentences) time and
    constant memory.

    Raises UsageError for a dataset without sentences, for a split of one document and for rows of less than 5 tokens;
    DatasetError if the offsets of documents or sentences are damaged.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        dataset, split = self.dataset, self.split
        if not dataset.splits[split].stores("sentences"):
            sentence = f"pairs need sentences, which {dataset.path} does not store; build it with --sentences line"
            raise UsageError(sentence, "not-stored", option="samples", given="pairs")
        if dataset.splits[split].num_documents < 2:
            sentence = f"split {split} of {dataset.path} has one document, and pairs need two; give a larger dataset"
            raise UsageError(sentence, "empty", option="split", given=split)
        require(self.length >= 5, "length", self.length, "at least 5: [CLS], two [SEP] and a token of each segment")
        identity = index_identity(self) | {"seed": self.seed, "short_seq_prob": self.short_seq_prob}
        arrays, self._facts = open_index(identity, {"pairs": "<i8", "sentences": "<u8"}, self._write_index)
        self._index = tuple(kernels.PairIndex(arrays["pairs"].view(kernels.PAIR), arrays["sentences"]))
        self.num_samples, self.spans_per_row = self._index[0].size, 2
        require_sound(self.num_samples - 1)

    @property
    def facts(self) -> dict[str, float]:
        """pad_share and crop_share are measured on 4,096 evenly spaced samples."""
        chosen = np.linspace(0, self.num_samples - 1, min(_FACTS_SAMPLES, self.num_samples)).astype(np.int64)
        shape = chosen.size, self.length
        frames = Frames(np.empty(shape, np.int64), np.empty_like(chosen), np.empty(2 * shape[0], SPAN))
        wanted = Wanted(np.arange(chosen.size), np.zeros_like(chosen), chosen)
        require_sound(self.lay_out(wanted, tuple(frames), self.columns(chosen.size), 0))
        kept, lost = int((frames.text_places - 1).sum()), int(self._cropped.sum())
        pad_share = 1 - (kept + 3 * chosen.size) / (self.length * chosen.size)
        return self._facts | {"pad_share": pad_share, "crop_share": lost / (kept + lost)}

    def columns(self, num_rows: int) -> Columns:
        return {
            "token_type_ids": np.empty((num_rows, self.length), np.int64),
            "next_sentence_label": np.empty(num_rows, np.int64),
        }

    def lay_out(self, wanted: Wanted, frames: tuple[Any, ...], columns: Columns, num_spans: int) -> int:
        self._cropped = np.empty_like(wanted.sample_ids)  # number of tokens cut off from each row
        own, seed = kernels.PairColumns(**columns, cropped=self._cropped), np.uint64(self.seed)
        return int(kernels.pair_rows(*wanted, seed, self._index, self.table, frames, tuple(own), num_spans))

    def ranges(self, epoch: int, first: int, stop: int) -> list[tuple[int, int]]:
        """Does not include random segments."""
        pairs = self._index[0][first:stop]
        return [(int(pairs["a_start"].min()), int(max(pairs["a_stop"].max(), pairs["b_stop"].max())))]

    def _write_index(self, append: Append) -> dict[str, Any]:
        """Cut the documents of the split into pairs, some documents at a time, and write the index."""
        rules = kernels.PairRules(self.length - 3, np.uint64(round(self.short_seq_prob * 2**32)), np.uint64(self.seed))
        num_documents = num_sentences = num_pairs = num_random = 0
        for number, documents in self.documents():
            sentences = self.dataset.array(self.shards[number].name, "sentences")
            first, last = np.searchsorted(sentences, documents[[0, -1]])
            sentences = sentences[first : last + 1]
            if sentences.size < 2:
                raise damaged(self.dataset.path)
            part = kernels.DocumentRange(
                documents, sentences, num_documents, num_sentences, int(self.starts[number]), self.separator
            )
            packed = np.empty(sentences.size - 1, np.uint64)
            pairs = np.empty(packed.size, kernels.PAIR)
            count = kernels.segment(part, rules, pairs, packed)
            if count < 0:
                raise damaged(self.dataset.path)
            append("pairs", pairs[:count].view(np.int64))
            append("sentences", packed)
            num_documents, num_sentences = num_documents + documents.size - 1, num_sentences + packed.size
            num_pairs, num_random = num_pairs + count, num_random + int((pairs["b_wanted"][:count] > 0).sum())
        append("sentences", np.array([kernels.pack_sentence(self.starts[-1], True)]))  # the end, as a document
        return {"random_share": num_random / num_pairs}
