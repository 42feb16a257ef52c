"""The Loader: a stream of masked batches. Its only state is one position.

    position ──► source ──► sample id ──► row of ids ──► masked row and targets ──► Batch
             mix.py     order.py      samples.py     masking.py                types.py

A Loader has no queue, no worker and no random generator. It computes each batch on request, from (dataset, seed,
position) alone. So the global stream is the same for any number of ranks, any restart and any batch size. Without a mix
there is one source, and its positions equal the positions of the stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from bertdata.choices import MOST_ROWS, SAMPLE_KINDS, SHUFFLES
from bertdata.errors import StateError, require, require_integer, require_known, require_positive, require_share
from bertdata.format.dataset import Dataset
from bertdata.read import order
from bertdata.read.masking import Masker
from bertdata.read.mix import Mix, Weight, one_source, ratio, require_alike
from bertdata.read.pairs import Pairs
from bertdata.read.pieces import Pieces
from bertdata.read.stream import Rows, Samples, Wanted, rows_of
from bertdata.read.windows import Windows
from bertdata.read.words import tables
from bertdata.types import Batch, Masking

STATE_VERSION = 1
_KINDS: dict[str, type[Samples]] = {"windows": Windows, "documents": Pieces, "packed": Pieces, "pairs": Pairs}


def _pairs_of(shards: Any) -> tuple[tuple[Dataset, Weight], ...]:
    """Return the datasets with their weights. Raise UsageError for other arguments."""
    pairs = ((shards, 1),) if isinstance(shards, Dataset) else tuple(shards) if isinstance(shards, Iterable) else ()
    are_pairs = [isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], Dataset) for pair in pairs]
    expected = "a dataset from bertdata.open(path), or several with weights, such as [(a, 0.7), (b, 0.3)]"
    require(pairs and all(are_pairs), "shards", shards, expected, "not-a-dataset")
    return pairs


class Loader:
    """A stream of batches for one rank.

    shards: an opened dataset, or several with weights, such as [(a, 0.7), (b, 0.3)], to mix their samples in this
        ratio. Mixed datasets need the same tokenizer. Each keeps the order that a Loader of it alone has.
    length: T, the number of tokens in a row, including [CLS] and [SEP].
    global_batch_size: the rows of a step over all ranks, at most 2**24. Ranks get equal numbers of rows, or differ by
        one row; a rank can have no row.
    seed: the seed of the order, the masks and the pairs; an integer from 0 to 2**64 - 1.
    rank, world_size: the rank of this loader, and the number of ranks.
    split: "train", "validation" or "test".
    samples: "windows", "documents", "packed" or "pairs"; docs/determinism.md defines each.
    short_seq_prob: for "pairs", the share of documents that are cut to shorter rows, from 0 to 1.
    shuffle: "full" shuffles all samples of an epoch; "blocks" 64 MiB at a time, for datasets larger than memory.
    masking: a Masking, or None for rows without masks.
    epochs: the number of epochs after which the stream ends; its last step can be smaller. None: the stream is endless.
        An epoch of a mix has the sum of the samples of its datasets.
    variants: the number M of distinct epochs: epoch e repeats the order and masks of epoch e mod M. None: every epoch
        has new masks.
    starts: for several datasets, how many samples of each were read before this mix; by default 0. Each dataset
        continues from there, in its own order.

    .position: the number of samples that all ranks together have read.
    .num_samples: N, the number of samples of an epoch over all ranks and sources.
    .sources: one object with .num_samples for each dataset, in the order given.
    .weights: the weights of the sources, as the smallest whole numbers in the same ratio.

    Iteration continues from `position`: a second `for` after a `break` does not restart. A Loader pickles in less than
    4 KB. Use it in one thread at a time. It opens in O(shards), after parsing tokenizer.json. The first Loader of
    documents, packed or pairs writes an index to $BERTDATA_CACHE, by default ~/.cache/bertdata.

    Raises UsageError for invalid arguments, and DatasetError for damaged files.
    """

    def __init__(
        self,
        shards: Dataset | Sequence[tuple[Dataset, Weight]],
        *,
        length: int = 128,
        global_batch_size: int = 256,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        split: str = "train",
        samples: str = "windows",
        short_seq_prob: float = 0.1,
        shuffle: str = "full",
        masking: Masking | None = Masking(),  # noqa: B008  (frozen)
        epochs: int | None = None,
        variants: int | None = None,
        starts: Sequence[int] = (),
    ) -> None:
        self.length, self.seed = require_integer("length", length), require_integer("seed", seed)
        self.global_batch_size = require_integer("global_batch_size", global_batch_size)
        self.rank, self.world_size = require_integer("rank", rank), require_integer("world_size", world_size)
        self.split, self.samples, self.short_seq_prob = split, samples, require_share("short_seq_prob", short_seq_prob)
        self.shuffle, self.masking = shuffle, masking
        self.epochs = None if epochs is None else require_positive("epochs", epochs)
        self.variants = None if variants is None else require_positive("variants", variants, most=(1 << 32) - 1)
        starts = starts if isinstance(starts, Iterable) else (starts,)
        self.starts = tuple(require_integer("starts", start) for start in starts)
        require(0 <= self.seed < 1 << 64, "seed", self.seed, "an integer from 0 to 2**64 - 1")
        require_positive("global_batch_size", self.global_batch_size, most=MOST_ROWS)
        require(0 <= self.rank < self.world_size, "rank", self.rank, f"0 to {self.world_size - 1}, below world_size")
        require_known("shuffle", self.shuffle, SHUFFLES)
        require_known("samples", self.samples, SAMPLE_KINDS)
        either = "a Masking, such as Masking(policy='span'), or None"
        require(isinstance(masking, Masking | None), "masking", masking, either, "malformed")
        pairs = _pairs_of(shards)
        require(len(pairs) == 1 or variants is None, "variants", variants, "None for a mix", "conflict")
        has_starts = len(self.starts) == len(pairs) > 1 and min(self.starts) >= 0
        expected = "a number of samples from 0 for each of several datasets"
        require(not self.starts or has_starts, "starts", list(self.starts), expected)
        self.shards = pairs[0][0] if len(pairs) == 1 else pairs
        datasets, self.weights = [dataset for dataset, _ in pairs], ratio([weight for _, weight in pairs])
        require_alike(datasets)
        self.position = 0
        words = masking is not None and masking.policy in ("whole_word", "span")
        self._block = max(1, order.BLOCK_TOKENS // max(1, self.length - 2)) if shuffle == "blocks" else None
        options = dict[str, Any](split=split, length=self.length, seed=self.seed, words=words)
        options |= {"block": self._block, "variants": self.variants, "short_seq_prob": self.short_seq_prob}
        self.sources = tuple(_KINDS[samples](dataset, samples, **options) for dataset in datasets)
        self._sizes = np.array([source.num_samples for source in self.sources])
        self.num_samples = int(self._sizes.sum())
        self._mix = Mix(self.weights, seed=self.seed, starts=self.starts) if len(pairs) > 1 else None
        self._masker = self._new_masker()

    def _new_masker(self) -> Masker | None:
        if self.masking is None:
            return None
        dataset = self.sources[0].dataset
        options = tables(dataset, self.masking)
        return Masker(self.masking, dataset.special_tokens, length=self.length, seed=self.seed, **options)

    def __getstate__(self) -> dict[str, Any]:
        derived = ("num_samples", "sources", "weights")
        return {name: value for name, value in vars(self).items() if name[0] != "_" and name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        position = state.pop("position")
        self.__init__(**state)  # type: ignore[misc]  # on a new object
        self.position = position

    def counts(self, position: int | None = None) -> list[int]:
        """Return how many samples of each source precede a position, by default the current one. Includes `starts`.

        This count divided by the source's num_samples is its number of epochs.
        """
        position = self.position if position is None else position
        return self._mix.counts(position) if self._mix else [position]

    @property
    def facts(self) -> dict[str, float]:
        """Shares of an epoch, from 0 to 1. For a mix: weighted means.

        pad_share: the share of padding tokens.
        crop_share: the share of the text that is cut off.
        random_share: only for "pairs": the share of pairs whose second segment comes from a different document.
        """
        facts, total = [source.facts for source in self.sources], sum(self.weights)
        shares = [weight / total for weight in self.weights]
        return {name: sum(share * each[name] for share, each in zip(shares, facts, strict=True)) for name in facts[0]}

    @property
    def num_slots(self) -> int:
        """K: the length of a row of `Batch.targets`."""
        return self._masker.num_slots if self._masker else 0

    def __repr__(self) -> str:
        paths = ", ".join(str(source.dataset.path) for source in self.sources)
        rows = f"{self.samples} of {self.length} tokens, {self.global_batch_size} rows a batch"
        return f"<Loader of {paths}: split {self.split}, {rows}, position {self.position}>"

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self.batch(0)
        if batch is None:
            raise StopIteration
        self.position = self.position_of(1)
        return batch

    def position_of(self, number: int) -> int:
        """Return where batch `number` starts: 0 is the next batch, 1 the one after it. Does not move the stream."""
        position = self.position + number * self.global_batch_size
        return position if self.epochs is None else min(position, self.epochs * self.num_samples)

    def batch(self, number: int) -> Batch | None:
        """Return this rank's rows of a batch, numbered as in position_of; None at the end. Does not move the stream."""
        start, stop = self.position_of(number), self.position_of(number + 1)
        if start == stop:
            return None
        first, last = order.rank_slice(start, stop, rank=self.rank, world_size=self.world_size)
        if self._block and first < last:
            for source, count in zip(self.sources, self.counts(last), strict=True):
                source.read_ahead(max(0, count - 1))
        return self.read(np.arange(first, last))

    def read(self, positions: np.ndarray) -> Batch:
        """Return the samples at any positions, int64 [B], such as a past batch. Does not move the stream.

        Raises UsageError for positions below 0.
        """
        rows = self._rows_at(positions)
        ids, sample_ids = rows.members["input_ids"], rows.members["sample_ids"]
        if self._masker:
            masked_positions, targets, weights = self._masker.apply(
                ids, rows.text_places, rows.epochs, sample_ids, rows.inside_word
            )
        else:
            masked_positions = targets = np.empty((sample_ids.size, 0), np.int64)
            weights = None
        return Batch(masked_positions=masked_positions, targets=targets, weights=weights, **rows.members)

    def spans(self, positions: np.ndarray) -> np.ndarray:
        """Return the ranges of tokens that form the samples at any positions, int64 [B]: int64 [n, 3].

        Each line of the result is (index in `positions`, first token, number of tokens). Tokens are counted in all
        shards of the split, in order; in a mix, the split of the row's source. Only "windows" include document
        separators.
        """
        spans = self._rows_at(positions).spans
        return np.stack([spans["row"], spans["start"], spans["length"]], 1)

    def _rows_at(self, positions: np.ndarray) -> Rows:
        """Return the rows at any positions, without masks."""
        positions = np.asarray(positions)
        if positions.ndim != 1 or positions.dtype.kind not in "iu":
            require(False, "positions", f"{positions.dtype} {list(positions.shape)}", "integers [B]", "malformed")
        positions = positions.astype(np.int64, copy=False)
        first = positions.min(initial=0)
        require(first >= 0, "positions", first, "numbers from 0")
        if self.variants is not None:
            positions = positions % (self.variants * self.num_samples)
        places = self._mix.places(positions) if self._mix else one_source(positions)
        ids = order.sample_ids(
            places.positions,
            num_samples=self._sizes,
            seed=self.seed,
            block=self._block,
            which=places.which,
            bounds=places.bounds,
        )
        wanted = [Wanted(which, *ids) for which in places.rows()]
        return rows_of([*zip(self.sources, wanted, strict=True)], places.sources)

    def _identity(self) -> dict[str, Any]:
        """Return the members of a state that must match when the state is loaded."""
        ids = [source.dataset.dataset_id for source in self.sources]
        mix = [list(pair) for pair in zip(ids, self.weights, strict=True)]
        variants = {} if self.variants is None else {"variants": self.variants}
        return variants | {
            "version": STATE_VERSION,
            **({"sources": mix} if self._mix else {"dataset_id": ids[0]}),
            **({"starts": list(self.starts)} if self.starts else {}),
            "split": self.split,
            "seed": self.seed,
            "length": self.length,
            "samples": self.samples,
            "short_seq_prob": self.short_seq_prob if self.samples == "pairs" else None,
            "shuffle": self.shuffle,
            "masking": asdict(self.masking) if self.masking else None,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return a small JSON-serializable dict, from which `load_state_dict` continues with exactly the next batch."""
        return self._identity() | {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to the position of a state. The rank, the world size and the batch size may differ from the saved ones.

        Also adopts the masking rule of the state; a state without a rule has rule 1. Raises StateError if any other
        setting differs; its `given` maps each name to (value in the state, value here).
        """
        masking, stored = self.masking, state.get("masking")
        if masking and isinstance(stored, dict):
            masking = masking.with_rule_of(stored)
            state = state | {"masking": {"rule": 1} | stored}
        here = dict.fromkeys(("variants", "sources", "dataset_id", "starts")) | self._identity()
        here["masking"] = asdict(masking) if masking else None
        differing = {name: (state.get(name), now) for name, now in here.items() if state.get(name) != now}
        was, now = differing.get("masking", (None, None))
        if isinstance(was, dict) and isinstance(now, dict):  # without equal members
            keys = [key for key in was | now if was.get(key) != now.get(key)]
            differing["masking"] = {key: was.get(key) for key in keys}, {key: now.get(key) for key in keys}
        if differing:
            words = "; ".join(f"{name} was {was!r} and is {now!r}" for name, (was, now) in differing.items())
            sentence = f"this state belongs to a different stream: {words}; give the Loader the same options"
            raise StateError(sentence, "other-stream", option="state", given=differing)
        position = state.get("position")
        if type(position) is not int or not 0 <= position < 1 << 62:
            sentence = f"the position in this state is {position!r}; expected a number of samples"
            raise StateError(sentence, "damaged", option="state", given=position)
        self.position = position
        if masking != self.masking:
            self.masking = masking
            self._masker = self._new_masker()
