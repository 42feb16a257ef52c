"""A side channel: tokens that share a structure, such as the radical of their characters, learn together.

A table gives each token any number of structures. The embedding of a token is then a sum, as that of a word and its
parts in fastText (Bojanowski et al., 2017), or of a Chinese character and its radical (Sun et al., 2014):

    word embedding of token t  =  a vector of its own  +  the vectors of its structures

Only the sum is kept, as the word embeddings of the model. The gradient of a structure's vector is the sum of the
gradients of its tokens. The optimizer takes its step for the vector as for any parameter, and the step is added to the
word embeddings of these tokens. So the model is an ordinary one at any time, its output is tied to the sum where it is
tied to the embeddings, and it takes ids alone: the structure of a token is that of the id that the model sees, [MASK]
or a random token where the text is hidden. docs/methods.md has the rules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
from torch.nn import Module, Parameter
from torch.nn import functional as F

from bertdata.errors import UsageError
from bertdata.tokenize.tokenizer import TOKENIZER
from bertrain.commands import reading
from bertrain.methods import LearnerSetting, Method
from bertrain.objectives import Learner
from bertrain.options.fields import Excludes, Options, option


@dataclass(frozen=True, kw_only=True)
class SideChannelOptions(Options):
    side_channel: str = option("")
    """File of names that tokens share, such as the radicals of characters: each line has a token and its names, with
    tabs between. The
    word embeddings of tokens with a common name learn together (docs/methods.md).
    """


class Structured(Method):
    """Word embeddings of tokens that share a structure learn together."""

    options_type = SideChannelOptions
    excludes = (
        Excludes("lora", "side_channel", "a side channel trains the word embeddings, which an adapter freezes"),
    )

    def identity(self, learner: Learner) -> Mapping[str, str]:
        return {"side-channel": identity(self.options.side_channel)}

    def learner(self, learner: Learner, setting: LearnerSetting) -> Learner:
        """Raises UsageError for a table that does not fit the vocabulary, or a model without a table of embeddings."""
        path, model = self.options.side_channel, learner.model
        try:
            embeddings = model.get_input_embeddings()
        except NotImplementedError:
            embeddings = None
        if not isinstance(embeddings, torch.nn.Embedding):
            kind = model.config.model_type
            sentence = f"--side-channel needs a table of word embeddings, which {kind} does not have; leave it out"
            raise UsageError(sentence, "unsupported", option="side_channel", given=path)
        vocabulary = tokenizers.Tokenizer.from_str(setting.shards.tokenizer_file(TOKENIZER).decode()).get_vocab()
        add(learner, read(path, vocabulary), embeddings.embedding_dim)
        return learner

    def optimizer(self, optimizer: torch.optim.Optimizer, learner: Learner) -> None:
        embeddings: Any = learner.model.get_input_embeddings()
        channel_of(learner).attach(optimizer, embeddings.weight)

    def facts(self, learner: Learner) -> Mapping[str, Any]:
        return channel_of(learner).facts

    def lines(self, learner: Learner) -> Sequence[str]:
        return [
            "--side-channel: {ids:,} ids have one or more of {structures:,} structures".format(**self.facts(learner))
        ]


class Structures(NamedTuple):
    """What a file says of the ids of a vocabulary: int64 [N] each, one pair for each structure of each id."""

    ids: torch.Tensor
    structures: torch.Tensor
    names: tuple[str, ...]  # of the structures, by their numbers

    @property
    def num_ids(self) -> int:
        """How many ids have a structure."""
        return len(self.ids.unique())


def read(path: str, vocabulary: Mapping[str, int]) -> Structures:
    """The table of a file: lines of a token, a tab and the names of its structures, with tabs between.

    vocabulary: token → id. Tokens that it lacks are passed over. Raises UsageError for a file that cannot be read or
    is no such table, and where it names no token of the vocabulary.
    """
    ids, structures, numbers = list[int](), list[int](), dict[str, int]()
    first_line = dict[str, int]()
    text = reading.decoded(_bytes(path), f"--side-channel {path}")
    for number, line in enumerate(text.split("\n"), 1):
        token, *names = line.removesuffix("\r").split("\t")
        if not token and not names:
            continue
        if not token or not names or not all(names):
            sentence = (
                f"--side-channel {path}, line {number}, is {line[:40]!r}; write a token, a tab and the names of its "
                "structures, with tabs between"
            )
            raise UsageError(sentence, "bad-row", option="side_channel", given=path)
        if first_line.setdefault(token, number) != number:
            sentence = (
                f"--side-channel {path} has the token {token!r} in line {first_line[token]} and line {number}; put all "
                "its structures into one line"
            )
            raise UsageError(sentence, "bad-row", option="side_channel", given=path)
        for name in names if token in vocabulary else ():
            ids.append(vocabulary[token])
            structures.append(numbers.setdefault(name, len(numbers)))
    if not ids:
        sentence = (
            f"--side-channel {path} names none of the {len(vocabulary)} tokens of the vocabulary; write them as "
            "tokenizer.json of the shards does"
        )
        raise UsageError(sentence, "no-match", option="side_channel", given=path)
    return Structures(torch.tensor(ids), torch.tensor(structures), tuple(numbers))


def identity(path: str) -> str:
    """What a resumed run must have again: the digest of the file."""
    return f"of SHA-256 {hashlib.sha256(_bytes(path)).hexdigest()[:16]}"


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise UsageError(
            f"--side-channel {path} does not exist; check the name", "not-found", option="side_channel", given=path
        ) from None
    except OSError as error:
        sentence = f"--side-channel {path} cannot be read ({error.strerror}); give a file that can"
        raise UsageError(sentence, "unreadable", option="side_channel", given=path) from None


class SideChannel(Module):
    """The steps of the structures' vectors. It is a part of the Learner for its name alone: nothing calls it.

    Takes memory for structures × width with its moments, and in a step two passes over the word embeddings and, for a
    moment, a tensor of their size.
    """

    weight: Parameter
    """[structures, width]: 0 but within a step of the optimizer, as the word embeddings take in every step at once."""

    def __init__(self, table: Structures, width: int) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(len(table.names), width))
        self.table = table

    @property
    def facts(self) -> dict[str, Any]:
        """For run.json: how many structures there are, and how many ids have one."""
        return {"structures": len(self.table.names), "ids": self.table.num_ids}

    def attach(self, optimizer: torch.optim.Optimizer, embeddings: Parameter) -> None:
        """Makes every step of an optimizer, which has the weight among its parameters, one of the word embeddings too.

        embeddings: [V, width]. Raises UsageError if they are frozen.
        """
        if not embeddings.requires_grad:
            sentence = (
                "--side-channel learns with the word embeddings, and something else, such as --lr-scale, freezes them; "
                "leave one of the two out"
            )
            raise UsageError(sentence, "conflict", option="side_channel")
        self.weight.requires_grad_(False)  # its gradient comes from `gather`, on every rank the same
        ids, structures = self.table.ids.to(embeddings.device), self.table.structures.to(embeddings.device)
        of_structures = _members(structures, ids, len(self.weight))
        of_ids = _members(ids, structures, len(embeddings))

        @torch.no_grad()
        def gather(*_: Any) -> None:
            if embeddings.grad is not None:  # as it is in a frozen trunk
                self.weight.grad = _sums(embeddings.grad, *of_structures)

        @torch.no_grad()
        def scatter(*_: Any) -> None:
            if self.weight.grad is not None:
                embeddings.add_(_sums(self.weight, *of_ids))
                self.weight.zero_()

        optimizer.register_step_pre_hook(gather)
        optimizer.register_step_post_hook(scatter)


def add(learner: Learner, table: Structures, width: int) -> None:
    """Makes a side channel a part of a learner, by the name side_channel. Call its `attach` for the optimizer."""
    learner.side_channel = channel = SideChannel(table, width)
    learner.sizes["side_channel.weight"] = channel.weight.numel()


def channel_of(learner: Learner) -> SideChannel:
    """The side channel that `add` has made."""
    channel: Any = learner.side_channel
    return channel


def _members(groups: torch.Tensor, members: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs, int64 [N] each → the members of group 0, then of group 1, …; and where each begins, int64 [number + 1]."""
    ends = torch.bincount(groups, minlength=number).cumsum(0)
    return members[groups.argsort(stable=True)], torch.cat([ends.new_zeros(1), ends])


def _sums(rows: torch.Tensor, members: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """Of each group the sum of its rows, in one order: [number, width]."""
    return F.embedding_bag(members, rows, begins, mode="sum", include_last_offset=True)
