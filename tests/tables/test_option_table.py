"""REFUSED: what no option of a kind takes. Each option, and each rule between options, is tried by its declaration."""

import re
from itertools import combinations
from math import inf, nan

import pytest
from support.commands import refused, refuses
from support.data import ROOT

from bertdata import BertdataError
from bertrain import config, options
from bertrain.config import Config, all_options, layered
from bertrain.methods import options_of_methods
from bertrain.options import Either, Needs, flag
from bertrain.pretrain import main

TEXTS, WHOLE, NUMBERS = [5, {}], ["x", 1.5, True, {}], ["x", True, {}, nan]
KINDS = {
    options.TEXT: ("river", TEXTS),
    options.FLAG: (True, ["yes", 1]),
    options.INTEGER: (7, WHOLE),
    options.COUNT: (7, [*WHOLE, 0, -1, 1 << 63]),
    options.COUNT_OR_0: (7, [*WHOLE, -1]),
    options.ABOVE_0: (0.25, [*NUMBERS, 0, -1, inf, 10**400]),
    options.FROM_0: (0.25, [*NUMBERS, -1, inf]),
    options.BELOW_1: (0.25, [*NUMBERS, -1, 1]),
    options.SHARE: (0.25, [*NUMBERS, 0, 1.1]),
    options.WEIGHT: (0.25, [*NUMBERS, -1, 1.1]),
    config.TEXTS: (["a", "b"], [5, ["a", 5], {"a": "b"}]),
    config.NUMBERS: ([0.25, 2], [["x"], "1;2", ",", "0,1", "nan,1"]),
    config.ROWS: ("16..64", ["x", 0, "", "1..2..3", "16..", 1.5, True, 2**24 + 1]),
    config.AMOUNT: ("4K", ["x", 0, -1, 0.5, "1.5", "4k", True, "9999999T"]),
    config.PART: ("1/3", ["x", "1/0", 0, 1.5, True, "1e-99999"]),
    config.DIRECTORY: ("out", [5, "s3://bucket/run"]),
    config.PATTERN: ("layer", [5, "("]),
    config.SCALES: (["a=0.5"], [5, ["a"], ["=1"], ["(=1"], ["a=x"], ["a=-1"]]),
    config.MILESTONES: (["tokens=1K"], [5, ["1K"], ["rows=1K"], ["tokens=x"], ["tokens=0"]]),
    config.TABLES: ([{"steps": 2}], [5, [5], "x"]),
    all_options()["lora"].metadata["kind"]: (
        "r=2,alpha=4",
        [5, "8", "r=0,alpha=4", "r=2,alpha=0", "r=2,alpha=4,target=("],
    ),
}
"""Kind → a value that is no default, and values that are refused. Choices follow from their declaration."""

CHECKS = {
    "data": [{"data": ()}],
    "weights": [{"data": ["a", "b"]}, {"data": ["a", "b"], "weights": [1, 2, 3]}, {"weights": [1]}],
    "masking": [{"objective": "diffusion"}],
    "random_fraction": [{"random_fraction": 0.3}],
    "compile": [
        {"compile": "on", "elastic": "layers=1:2"},
        {"compile": "on", "teacher": "t", "gradient_checkpointing": True},
    ],
    "distil": [{"teacher_cache": "t", "distil": "hidden"}, {"teacher": "t", "layers": 1}],
    "distil_layers": [{"teacher": "t", "distil": "hidden", "elastic": "layers=1:2"}],
    "teacher_cache": [
        {"teacher_cache": "t", "data": ["a", "b"], "weights": [1, 2]},
        {"teacher_cache": "t", "phase": [{"steps": 1}, {"steps": 1, "length": 16}]},
    ],
}
"""Option → options with which its Check does not hold."""

TAKE_WORDS = (options.TEXT, options.FLAG, config.TEXTS, config.DIRECTORY, config.PATTERN, config.TABLES)
OPTIONS, GIVEN = all_options(), {"data": "d"}
WITH_MUON = ("muon_rate", "muon_momentum")
RULES = [rule for kind in (Config, *options_of_methods().values()) for rule in kind.rules]


def tried(name):
    """A value of an option that is no default, and values that are refused."""
    kind, default = OPTIONS[name].metadata["kind"], OPTIONS[name].default
    if kind.choices and kind not in KINDS:
        right = next(value for value in kind.choices if value != default)
        return ([right], [["spam"], 5]) if kind.many else (right, ["spam", 5])
    return KINDS[kind]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_value_that_an_option_does_not_take_is_one_sentence_that_names_it(name):
    kind, (right, wrong) = OPTIONS[name].metadata["kind"], tried(name)
    kind.parse(right)
    for given in [*wrong, *(str(each) for each in wrong if kind not in TAKE_WORDS and isinstance(each, int | float))]:
        with pytest.raises(BertdataError) as error:
            Config.make(**{"data": "d"} | {name: given})
        assert error.value.option == name
        assert error.value.kind in ("malformed", "out-of-range", "unknown", "bad-url")
        if isinstance(given, str) and kind not in TAKE_WORDS and not OPTIONS[name].metadata["in_files"]:
            words = ["--data", "d", f"{flag(name)}={given}"]
            refused(main, *words, kind=error.value.kind, option=name, given=(given,) if kind.many else given)


@pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
def test_options_that_do_not_go_together_are_one_sentence_that_names_one(rule):
    if isinstance(rule, Either):
        for pair in combinations(rule.names, 2):
            with pytest.raises(BertdataError) as error:
                Config.make(**GIVEN | {name: tried(name)[0] for name in pair})
            assert error.value.kind in ("conflict", "needs-option")
            if not rule.why:
                values = [{name: tried(name)[0]} for name in pair]
                assert layered(*values) == values[1]
                assert layered(*values[::-1]) == values[0]
    elif isinstance(rule, Needs):
        for name in rule.names:
            with refuses("needs-option", name):
                Config.make(**GIVEN | {name: tried(name)[0]})
    else:
        Config.make(data="d", teacher_cache="t", phase=[{"steps": 1, "data": "d"}, {"steps": 1}])  # twice the same
        for given in CHECKS[rule.name]:
            with pytest.raises(BertdataError) as error:
                Config.make(**GIVEN | given)
            assert (error.value.option, error.value.kind) in ((rule.name, "conflict"), (rule.name, "missing"))


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.metadata["of"]])
def test_an_option_that_is_of_another_one_is_left_out_where_that_one_changes(name):
    of, given = OPTIONS[name].metadata["of"], {name: tried(name)[0]}
    assert layered(given, {of: OPTIONS[of].default}) == given | {of: OPTIONS[of].default}
    assert layered(given, {of: "other"}) == {of: "other"}
    assert layered(given | {of: ["a", "b"]}, {of: ("a", "b")}) == given | {of: ("a", "b")}  # a file has a list


RESUMED = {  # what a resumed run may change, and what is compared by content; all other options stay
    "told": "steps epochs tokens schedule decay_share share phase",
    "free": "out micro_batch_size attention compile gradient_checkpointing save_every save_at keep resume eval_every "
    "log_every log_to",
    "content": "data model init teacher_cache teacher discriminator",
}


def test_phases_set_what_the_page_names_and_resumed_runs_change_what_they_may():
    page = (ROOT / "docs" / "phases.md").read_text().split("## What a phase may set")[1].partition("All other")[0]
    of_phases = {name for name, option in OPTIONS.items() if option.metadata["phase"]}
    assert of_phases == {*re.findall(r"`(\w+)`", page), *config.DURATIONS}
    for kind, names in RESUMED.items():
        assert {name for name, option in OPTIONS.items() if option.metadata["resume"] == kind} == {*names.split()}
    of = {name: option.metadata["of"] for name, option in OPTIONS.items() if option.metadata["of"]}
    assert of == {"weights": "data", "decay_share": "schedule"} | dict.fromkeys(("lr", *WITH_MUON), "optimizer")
