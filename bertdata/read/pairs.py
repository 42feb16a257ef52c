"""Samples that are pairs of segments: BERT next sentence prediction."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertdata.errors import DatasetError, UsageError
from bertdata.read import kernels
from bertdata.read.index import Append, derived
from bertdata.read.stream import Rows, TokenStream, require_sound


class Pairs:
    def __init__(self, stream: TokenStream, *, seed: int, short_seq_prob: float) -> None:
        dataset, split = stream.dataset, stream.split
        if any(shard.num_sentences is None for shard in stream.shards):
            raise UsageError(
                f"{dataset.path} does not know where sentences begin, which pairs are made of; build it with "
                "--sentences line"
            )
        if dataset.splits[split].num_documents < 2:
            raise UsageError(f"split {split} of {dataset.path} has one document, and half of all pairs are of two")
        if stream.length < 5:
            raise UsageError(f"length is {stream.length}; a pair needs [CLS], two [SEP] and two tokens: at least 5")
        self.stream, self._seed, self._short_seq_prob = stream, seed, short_seq_prob
        identity = stream.identity("pairs") | {"seed": seed, "short_seq_prob": short_seq_prob}
        arrays, self._known = derived(identity, {"pairs": "<i8", "sentences": "<u8"}, self._make)
        self._pairs, self._sentences = arrays["pairs"].reshape(-1, 5), arrays["sentences"]
        self.num_samples = self._pairs.shape[0]
        require_sound(self.num_samples - 1)

    @property
    def facts(self) -> dict[str, float]:
        """Padding and what is cut off are those of 4,096 samples."""
        chosen = np.linspace(0, self.num_samples - 1, min(4096, self.num_samples)).astype(np.int64)
        rows, cropped = self._rows(np.zeros_like(chosen), chosen)
        kept, lost = int((rows.filled - 1).sum()), int(cropped.sum())
        pad_share = 1 - (kept + 3 * chosen.size) / (self.stream.length * chosen.size)
        return self._known | {"pad_share": pad_share, "crop_share": lost / (kept + lost)}

    def rows(self, epochs: NDArray[np.int64], sample_ids: NDArray[np.int64]) -> Rows:
        return self._rows(epochs, sample_ids)[0]

    def _rows(self, epochs: NDArray[np.int64], sample_ids: NDArray[np.int64]) -> tuple[Rows, NDArray[np.int64]]:
        """And how many tokens each row lost."""
        ids, filled = self.stream.empty(sample_ids.size)
        token_type_ids, labels, cropped = np.empty_like(ids), np.empty_like(filled), np.empty_like(filled)
        spans = np.empty((sample_ids.size * 2, 5), np.int64)
        count = kernels.pair_rows(
            epochs, sample_ids, np.uint64(self._seed), self._pairs, self._sentences, int(self.stream.has_separators),
            *self.stream.table, ids, filled, token_type_ids, labels, cropped, spans,
        )  # fmt: skip
        require_sound(count)
        goes_on = self.stream.fill(spans[:count], filled, ids)
        return Rows(ids, filled, None, token_type_ids, labels, goes_on), cropped

    def ranges(self, epoch: int, first: int, stop: int) -> list[tuple[int, int]]:
        """Without the second segments that are from elsewhere."""
        pairs = self._pairs[first:stop, :3]
        return [(int(pairs[:, 0].min()), int(pairs.max()))]

    def _make(self, append: Append) -> dict[str, Any]:
        stream, most = self.stream, self.stream.length - 3
        num_documents = num_sentences = num_pairs = num_random = 0
        for number, documents in stream.documents():
            sentences = stream.dataset.array(stream.shards[number].name, "sentences")
            first, last = np.searchsorted(sentences, documents[[0, -1]])
            sentences = sentences[first : last + 1]
            if sentences.size < 2:
                raise DatasetError(f"{stream.dataset.path} is damaged; bertdata verify says where")
            flagged = np.empty(sentences.size - 1, np.uint64)
            pairs = np.empty((flagged.size, 5), np.int64)
            count = kernels.segment(
                documents, sentences, num_documents, num_sentences, int(stream.starts[number]),
                int(stream.has_separators), most, np.uint64(round(self._short_seq_prob * 2**32)),
                np.uint64(self._seed), pairs, flagged,
            )  # fmt: skip
            if count < 0:
                raise DatasetError(f"{stream.dataset.path} is damaged; bertdata verify says where")
            append("pairs", pairs[:count].ravel())
            append("sentences", flagged)
            num_documents, num_sentences = num_documents + documents.size - 1, num_sentences + flagged.size
            num_pairs, num_random = num_pairs + count, num_random + int((pairs[:count, 2] < 0).sum())
        append("sentences", np.array([int(stream.starts[-1]) << 1 | 1], np.uint64))
        return {"random_share": num_random / num_pairs}
