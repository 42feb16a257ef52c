"""Tokens that share a structure, such as a radical, learn together: a method from outside the package.

    python examples/radicals.py shards/ radicals.tsv
    python examples/structured_embeddings.py --data shards/ --out run/ --structures radicals.tsv

A line of the table has a token and the names of its structures, with tabs between them. The embedding of a token is the
sum of a vector of its own and the vectors of its structures (Bojanowski et al., 2017; Sun et al., 2014). Only the sum
is kept: the gradient of a structure is the sum of those of its tokens, and the step that the optimizer takes for the
structure is added to their word embeddings. So checkpoints are ordinary ones, and the structure of a masked token is
that of [MASK]: nothing names the hidden token.
"""

import hashlib
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from bertdata.errors import UsageError
from bertrain import pretrain
from bertrain.commands import reading
from bertrain.methods import METHODS, Method
from bertrain.options import TEXT, Options, option


@dataclass(frozen=True, kw_only=True)
class StructureOptions(Options):
    structures: str = option("", TEXT)
    """Table of tokens and the names of their structures, with tabs between them."""


class Structures(torch.nn.Module):
    """The vectors of structures, which are 0 except in a step of the optimizer."""

    def __init__(self, table, vocabulary, width):
        super().__init__()
        rows = [line.split("\t") for line in reading.text(table, "structures").splitlines()]
        names = {}  # of structures → number
        pairs = [
            (vocabulary[token], names.setdefault(name, len(names)))
            for token, *own in rows
            for name in own
            if token in vocabulary
        ]
        if not pairs:
            sentence = f"--structures {table} has no token of the vocabulary with a structure; give another table"
            raise UsageError(sentence, "no-match", option="structures", given=table)
        self.ids, self.numbers = torch.tensor(pairs).T
        self.weight = torch.nn.Parameter(torch.zeros(len(names), width))

    def attach(self, optimizer, embeddings):
        """Let each step of the optimizer for the vectors change the word embeddings, [V, width]."""
        ids, numbers = self.ids.to(embeddings.device), self.numbers.to(embeddings.device)
        self.weight.requires_grad_(False)  # `before` computes its gradient, the same on every rank

        @torch.no_grad()
        def before(*_):
            if embeddings.grad is None:  # they are frozen
                return
            self.weight.grad = torch.zeros_like(self.weight).index_add_(0, numbers, embeddings.grad[ids])

        @torch.no_grad()
        def after(*_):
            embeddings.index_add_(0, ids, self.weight[numbers])
            self.weight.zero_()

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)


class StructuredEmbeddings(Method):
    options_type = StructureOptions

    def identity(self, learner):
        return {"structures": hashlib.sha256(reading.text(self.options.structures).encode()).hexdigest()[:16]}

    def learner(self, learner, setting):
        vocabulary = Tokenizer.from_str(setting.shards.tokenizer_file("tokenizer.json").decode()).get_vocab()
        width = learner.model.get_input_embeddings().embedding_dim
        learner.structures = Structures(self.options.structures, vocabulary, width)
        return learner

    def optimizer(self, optimizer, learner):
        learner.structures.attach(optimizer, learner.model.get_input_embeddings().weight)


METHODS["structures"] = StructuredEmbeddings
if __name__ == "__main__":
    pretrain.main()
