"""The inputs and outputs of the kernels that turn text into ids: records of arrays, and their constants."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

PADDING = 80  # bytes that must be readable after the text
EMPTY = np.uint64(0xFFFFFFFFFFFFFFFF)  # in a table of runs: no such run; in a table of merges: a free slot
# Return codes: all text is encoded; the entry of state[CODE_POINT] is missing; the result of `tokenizers` for the
# adjacent code points state[BEFORE] and state[CODE_POINT] is missing; `Output.hard` is full
DONE, UNKNOWN_CODE_POINT, UNKNOWN_PAIR, TOO_MANY_HARD = range(4)
# Indexes of `Output.state`
PIECE, BYTE, PLACE, NUM_HARD, CODE_POINT, BEFORE, HAS_BEGUN, REPLACED, LEVEL, LIMITS = range(10)
MOST_RULES = 8
NUM_STATES = LIMITS + MOST_RULES
# A step of WordTables.steps: the next state in the low bits, and flags
CLASSES = 64  # most classes of characters; class 0 is the end of the text
STATES = np.uint16(0x0FFF)
HARD_STEP = np.uint16(0x2000)  # the character fits no table
MEETS_STEP = np.uint16(0x4000)  # the character may change the previous one
ENDED = np.uint16(0x8000)  # a word ends before the character
# Bits of the first uint64 of an entry of WordTables.points, above the class
#   MEETS        may change the previous code point, or be changed with it
#   HARD_FORM    fits no table
#   SILENT_FORM  has an empty normal form
#   SPACE_FORM   has the normal form of a space
#   BLANK        is removed at the ends of a piece
#   PREFIXED     has a normal form that begins with the prefix
#   LONE         is a word by itself, and may end words: the second uint64 is the value of its ids
MEETS, HARD_FORM, SILENT_FORM, SPACE_FORM, BLANK, PREFIXED, LONE = (np.uint64(1 << n) for n in range(24, 31))
# WordTables.prefix_when: the pieces, words or texts that get a prefix
NEVER, EACH_PIECE, FIRST_PIECE, EACH_WORD = range(4)
# WordTables.model
BYTE_BPE, CHARACTER_BPE, UNIGRAM, WORD_PIECE, WHOLE_WORD = range(5)
# Output.hard, last column: the position of a hard run in the text (LATER_PIECE: a whole piece, except the first one of
# the text), or one word, without or with the prefix
IN_MIDDLE, AT_BEGIN, LATER_PIECE, ONE_WORD, WITH_PREFIX = range(5)
# WordTables.finds: NOTHING; words that end before bytes of `ends`; runs, perhaps of several words, between bytes that
# cut words; or words by one of two rules
NOTHING, WORDS, RUNS, GPT2_WORDS, LLAMA3_WORDS = range(5)
# WordTables.stops: the role of a byte after a quick word, if it is not a value of ids. NOT_QUICK: run the automaton;
# NEXT_BEGINS: the next word begins with it; OWN_WORD: it is a separate word if a space follows
NOT_QUICK, NEXT_BEGINS, OWN_WORD = EMPTY, EMPTY - np.uint64(1), EMPTY - np.uint64(2)
STRIPS_LEFT, STRIPS_RIGHT, STRIPS_LATE = 1, 2, 4  # bits of WordTables.strips; late: after text has changed
RANGES = 4  # ranges of bytes, in Added
# WordTables.kinds; MAY_CHANGE: only the automaton can decide
NOT_KNOWN, IS_LETTER, IS_NUMBER, IS_OTHER, IS_BLANK, MAY_CHANGE = (np.uint8(n) for n in range(6))
WINDOW = 512  # bytes of text in which words are found before their look-up begins
FOLD = np.uint64(0x2020202020202020)


class Text(NamedTuple):
    """Pieces of text, for example documents, lines, or text between two added tokens."""

    data: Any  # uint8 [n]: valid UTF-8, at least PADDING bytes longer than the last piece
    starts: Any  # int64 [num_pieces]: piece i is data[starts[i] : stops[i]]; pieces do not overlap and are in order
    stops: Any  # int64 [num_pieces]
    tails: Any  # int64 [num_pieces]: id to append to the ids of the piece, -1 for none
    begins: Any  # bool [num_pieces]: whether the piece begins a document


class WordTables(NamedTuple):
    """Tables of a tokenizer for the kernel for words."""

    points: Any  # uint64 [0x110000, 2]: an entry for each code point (words.py packs them); 0: not loaded yet
    kinds: Any  # uint8 [0x110000]: NOT_KNOWN, IS_LETTER, ... of each code point, to find words by a rule
    quick: Any  # uint8 [256]: class of each ASCII character that is not hard and changes no other; else 0
    steps: Any  # uint16 [num_states * CLASSES]: see rules.Rules
    skips: Any  # bool [num_states]: whether the letters a to z keep the state, and a word may end before each
    finds: int  # NOTHING, ...: units that the kernel finds without the automaton
    ends: Any  # uint8 [RANGES, 2]: ranges (least, most - least) of the bytes that may end it
    stops: Any  # uint64 [256]: NEXT_BEGINS, ..., or the value of the ids of a byte that is a word, or in no word
    has_marks: int  # 1 if a code point may change the stop before it, else 0
    fold: Any  # uint64: 0x20 in each byte if quick words in capitals have the same ids as in lower case, else 0
    longest: int  # most bytes of a word that is not hard
    starts: Any  # int64 [num_rules]
    keeps_gaps: Any  # bool [num_rules]: whether text between the words of a rule is a word too
    cuts: Any  # bool [CLASSES * CLASSES]
    meets: int  # 1 if a code point may change the previous one, else 0
    strips: int  # the ends of a piece at which blank characters are removed: STRIPS_LEFT, ...
    prefix: Any  # uint8 [k]: text put before a piece
    prefix_class: int  # class of the prefix
    prefix_when: int  # NEVER, EACH_PIECE, FIRST_PIECE or EACH_WORD
    prefix_always: int  # 1: also before a piece that begins with it, else 0
    collapses: int  # 1: several spaces are reduced to one, else 0
    model: int  # BYTE_BPE, ...
    is_plain: int  # 1: the model gets raw words of the text, else 0
    byte_ids: Any  # int64 [1 or 2, 256]: id of each byte, -1 for none; row 1: at the end of a word, if different
    pairs: Any  # uint64 [power of two]: hash table of the merges of ids, or of symbols; see `add_pairs`
    merged: Any  # int32 [num_ranks]: the resulting id of each merge; for symbols 0, 1, ..., as a rank is a symbol
    symbols: Any  # int32 [num_symbols, 4]: its two parts, the longest shorter symbol that it begins with, its bytes
    symbol_ids: Any  # int32 [n]: the id of each symbol; then ids of tokens that are words, but not made by merges
    trie: Any  # uint64 [n]: the tokens, characters or symbols of the model; see `child_of`
    scores: Any  # float64 [vocab_size]: score of each token of a Unigram model
    unk_score: float  # score of an unknown character in a Unigram model
    unk: int  # id of the unknown token, -1 if there is none
    fuse_unk: int  # 1: adjacent unknown characters are one token, else 0
    max_chars: int  # WORD_PIECE: a word with more characters is unknown
    special: Any  # bool [vocab_size]: whether text must not become the id
    special_to: int  # id that replaces such an id; -1 if there is none, and the ids are unusable


class RunTables(NamedTuple):
    """Hash tables of the runs in the text of a thread, with their values, and scratch memory of this thread.

    Both tables consist of sets of four slots of 32 bytes; a free slot is zeros. The hash of a run selects one of two
    slots where its search begins. A new run takes a free slot, or else replaces the run in the second slot, and stays
    there. So frequent runs stay. When `spelled` or `pool` is full, the tables are cleared.
    """

    near: Any  # uint64 [num_sets * 16]: (first 8 bytes, bytes 8 to 15, value, second value), for runs of up to 16 bytes
    far: Any  # uint64 [num_sets * 16]: (hash, index in `spelled` and length, value, second value), for longer runs
    used: Any  # int64 [2]: bytes of `spelled` and ids of `pool` in use
    spelled: Any  # uint8 [n]: the runs of `far`
    pool: Any  # uint32 [n]: the ids of runs with more ids than fit
    stable: Any  # int64 [slots]: hash table of pairs of code points: (pair, whether they do not change each other)
    word: Any  # uint8 [m]: the bytes of a word
    ids: Any  # int64 [m]: the ids of a word
    ranks: Any  # int64 [2, m]: for BPE of long words the merges; for Unigram the start and id of the best token
    best: Any  # float64 [m]: for Unigram the best score up to each byte
    keys: Any  # uint64 [4 * (WINDOW + 72)]: rows for the runs in a window of text: the two words of `key_of`; the set;
    # the value of the stop after the run. For runs from `_find_runs`, bits 32 to 47 of the set are the distance from
    # the first run, and higher bits are the length; all other runs end at `places`
    places: Any  # uint16 [WINDOW + 136]: see `find_words`, also for the next two
    bits: Any  # uint64 [NUM_BITS]
    carry: Any  # uint64 [NUM_CARRIES]
    dead: Any  # uint64 [m / 64 + 1]: see `cut_word`


class Output(NamedTuple):
    """The outputs of a kernel."""

    ids: Any  # uint16 or uint32 [n]: the ids; a store may write up to three excess elements
    bounds: Any  # int64 [num_pieces + 1]: the ids of piece i are ids[bounds[i] : bounds[i + 1]]
    hard: Any  # int64 [h, 4]: runs that `tokenizers` must encode: (start, stop, index in ids, IN_MIDDLE, ...)
    state: Any  # int64 [NUM_STATES]: progress of the kernel, to continue from; zeros at the start


class Added(NamedTuple):
    """Added tokens to search a text for."""

    trie: Any  # uint64 [n]: trie of their spellings, each with the token's number; see `child_of`
    ids: Any  # int64 [num_tokens]: the id; -1: the token stays text; -2: `tokenizers` encodes the whole text
    begins: Any  # bool [65536]: whether a token begins with two bytes, at index 256 * first + second
    first: Any  # uint8 [RANGES, 2]: ranges (least, most - least) that hold all first bytes of tokens
    second: Any  # uint8 [RANGES, 2]: the same for all second bytes
    watched: Any  # uint8 [RANGES, 2]: ranges with the first bytes of all code points that `AddedTokens` looks for
