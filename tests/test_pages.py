"""What pages and notebooks say is so, and is shown as it is meant."""

import ast
import importlib
import json
import re

import pytest
import reference_pages as pages
from markdown_it import MarkdownIt
from support.commands import succeeds
from support.data import ROOT

from bertdata.cli import main as data_main
from bertdata.errors import KINDS
from bertrain.__main__ import main

# ------------------------------------------------------------------------------------------------------ generated pages


NUM_WORDS = 4  # so many words in a row are a sentence's, and not by chance


@pytest.mark.parametrize("page", pages.PAGES)
def test_the_page_is_that_of_the_source(page):
    assert (ROOT / page).read_text(encoding="utf-8") == pages.PAGES[page](), (
        "run make reference, and look at the changes"
    )


def test_every_error_states_a_kind_and_is_a_sentence_that_a_user_can_read():
    assert {error.kind for error in pages.errors()} == {*KINDS}
    assert len(pages.errors()) > 300
    for error in pages.errors():
        words = re.sub(r"⟨[\w ]+⟩|…", "", error.message)
        is_prefix = error.message.endswith(": …")  # of the message of another error
        assert is_prefix or len(re.findall(r"[A-Za-z]{2,}", words)) >= 2, error
        assert not re.search(r"[⟨⟩\n\\]|\. [A-Z]", words), error
        assert not re.search(r"[.!?:;,]$", error.message), error
        assert words.count("(") == words.count(")"), error


def word_rows(text):
    """All rows of NUM_WORDS words of a text."""
    words = [word.strip(",;.()") for word in text.split()]
    rows = (tuple(words[at : at + NUM_WORDS]) for at in range(len(words) - NUM_WORDS + 1))
    return {row for row in rows if all(re.fullmatch(r"[A-Za-z'_-]+", word) for word in row)}


def test_no_test_holds_a_sentence_of_an_error():
    """Tests look at the kind, the option and the value; a better sentence must not break them."""
    ours = rf"(?<!click\.)\b({'|'.join({error.name for error in pages.errors()} | {'BertdataError'})})\b"
    parts = [part for error in pages.errors() for part in re.split(r"⟨.*?⟩|…|;", error.message)]
    known = set().union(*map(word_rows, parts))
    for path in sorted((ROOT / "tests").glob("*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        texts = [(node.lineno, node.value) for node in texts if id(node) not in docstrings]
        assert [(path.name, *text) for text in texts if word_rows(text[1]) & known] == []
        calls = [ast.unparse(node) for node in nodes if isinstance(node, ast.Call)]
        assert not [call for call in calls if re.match(rf"pytest\.raises\(.*{ours}.*match=", call)], path.name


def test_options_state_one_default_and_what_is_required_in_one_form():
    commands = pages.command_page()
    assert not re.search(r'\[default: ""\]|\[default: [^]]*\]\s+\[default: ', commands)
    for name in ("pretrain", "doctor", "teacher"):
        section = commands.partition(f"\n### bertrain {name}\n")[2].partition("\n### ")[0]
        assert section.partition("  --data ")[2].partition("\n  --")[0].rstrip().endswith("[required]")


NEVER = (
    "anew|mended|planted|go on|goes on|going on|went on|to the bit|same bits|at hand|side channel|is refused|"
    "are refused|be refused|of others|laid|what there is|that is no|found by first bytes|made again|not any more|"
    "gives back|nothing but|what it gave|asked for|once more|the like|a stranger|figures|is said to"
)


def test_pages_and_source_use_the_words_of_the_field():
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bert*/**/*.py")]
    found = [(path.name, *re.findall(rf"(?i)\b({NEVER})\b", " ".join(path.read_text().split()))) for path in files]
    assert [each for each in found if each[1:]] == []


# ----------------------------------------------------------------------------------------------------- lists and tables


COLUMNS = re.compile(r" *\w[\w ]*\w  +[^|]+")  # of what a program prints: a name and a value


def misread(text):
    """Numbers of lines where a code host shows something else than what the text looks like."""
    lines = text.splitlines()
    for token in MarkdownIt().enable("table").parse(text):
        first, last = token.map or (0, 0)
        part, language, is_wrong = lines[first:last], token.info.partition(" ")[0], False
        if token.type == "paragraph_open":  # a row of no table, or a line that is not indented as its list is
            is_wrong = any(line[:1] == "|" or (token.level > 1 and line[:1] != " ") for line in part[1:])
        elif token.type in ("ordered_list_open", "bullet_list_open"):  # a line of text that begins like an item
            is_wrong = token.level == 0 and first > 0 and lines[first - 1].strip() != ""
        elif token.type == "table_open":
            is_wrong = len({(line[0], line[-1], len(re.findall(r"(?<!\\)\|", line))) for line in part}) > 1
        elif token.type in ("code_block", "fence") and language in ("", "bash", "text"):
            rows = re.sub(r"<<'END'\n.*?\nEND\n|'[^']*'", "", token.content, flags=re.DOTALL).splitlines()
            indents = [len(row) - len(row.lstrip()) for row in rows]
            if language == "text":
                near = [n for n in range(1, len(rows) - 1) if indents[n - 1] == indents[n + 1] < indents[n]]
                is_wrong = any(all(map(COLUMNS.fullmatch, rows[n - 1 : n + 2])) for n in near)
            else:
                deeper = [n for n in range(1, len(rows)) if indents[n] > indents[n - 1]]
                is_wrong = any(rows[n - 1][-1:] != "\\" for n in deeper)
        if is_wrong:
            yield first + 1


WRONG = ["- item\ntext\n", "text\n1. text\n", "| a | b |\n|---|---|\n| 1\n| 2 |\n", "    one\n        two\n"]
WRONG += ["```text\n  loss      2.6\n    perplexity  13\n  tokens    9\n```\n"]


@pytest.mark.parametrize("text", WRONG)
def test_what_is_misread_is_found(text):
    assert [*misread(text)]


def test_lists_tables_and_indented_lines_are_shown_as_they_are_meant():
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    found = {str(path.relative_to(ROOT)): [*misread(path.read_text())] for path in files if path.name != "api.md"}
    assert {name: lines for name, lines in found.items() if lines} == {}


# ------------------------------------------------------------------------------------------------------- names of tests


NAMED = re.compile(r"`((?:tables/)?test_\w+\.py)(?:::(test_\w+))?`")


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/reliability.md"])
def test_tests_that_a_page_names_exist_and_each_line_about_security_names_some(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = NAMED.findall(text)
    assert len({file for file, _ in named}) > 10
    for file, test in named:
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert not test or f"\ndef {test}(" in source, f"{file} has no {test}"
    if page == "SECURITY.md":
        last_cells = [line.split("|")[-2].strip() for line in text.splitlines() if line.startswith("|")]
        cells = [cell for cell in last_cells if cell not in ("tests", "---")]
        assert len(cells) > 24
        for cell in cells:
            assert any(test for _, test in NAMED.findall(cell)), cell
            assert re.sub(r"`[\w.:/]+`", "", cell).strip(" ,") == "", cell


GUARDS = """
1 test_words test_ids_are_those_of_the_library, test_words test_ids_of_wordpiece_are_those_of_the_library
2 tables/test_input_table test_files_give_these_documents
3 tables/test_input_table test_files_give_these_documents, test_inputs test_a_build_with_bad_rows_can_be_interrupted_and_made_in_parts
4 test_import test_files_give_these_documents
5 test_inputs test_an_interrupted_build_from_a_pipe_starts_anew, test_build test_an_interrupted_build_continues_without_redoing_shards
6 test_prepare test_the_dataset_is_that_of_the_changed_texts, test_prepare test_the_first_of_equal_texts_is_kept
7 tables/test_tokenizer_table test_a_directory_gives_the_ids_of_transformers, test_tokens test_a_hub_gives_a_tokenizer_or_says_that_it_has_none
8 test_teach test_a_cache_belongs_to_its_samples_and_its_teacher, test_pretrain test_text_that_the_tokenizer_of_the_model_does_not_know_is_refused_for_the_tokenizer
9 test_build test_a_dataset_equals_the_reference, test_loader test_ranks_share_the_batches_of_one_stream
10 test_samples test_rows_equal_their_reference
11 test_samples test_where_the_cache_is
12 test_cli test_show_says_what_the_mask_did_and_what_follows, test_cli test_verify_names_the_damage
13 test_teach test_work_without_end_or_beyond_the_limit_is_refused
14 test_kernels test_masks_equal_their_reference
15 test_kernels test_masks_equal_their_reference
16 test_samples test_masks_are_those_of_the_row
17 test_samples test_random_ids_are_those_of_tokens
18 test_samples test_masks_are_those_of_the_row
19 test_kernels test_masks_equal_their_reference
20 test_teach test_with_variants_the_stream_comes_round_and_is_the_same_until_then
21 test_pretrain test_a_step_of_a_resumed_run_can_be_traced
22 test_samples test_rows_equal_their_reference
23 test_extending test_the_example_of_a_method_trains_and_resumes_to_the_same_bits
24 test_run test_losses_of_pairs_are_those_of_transformers
25 test_pretrain test_a_run_writes_its_configuration_its_log_and_checkpoints
26 test_samples test_rows_equal_their_reference
27 test_report test_the_page_is_the_one_that_was_worked_out
28 test_grammar test_the_example_of_a_million_parameters_runs
29 test_build test_a_share_ends_below_its_bound, test_kernels test_text_hash_equals_its_reference
30 test_dist test_two_processes_give_the_losses_of_one
31 test_kernels test_orders_equal_their_reference
32 test_feed test_pickled_datasets_are_small
33 test_survive test_memory_stays_below_its_bound
34 test_cli test_bench_measures_what_it_says
35 test_loader test_restoring_from_every_step_gives_the_rest_of_the_stream
36 test_inputs test_a_build_with_bad_rows_can_be_interrupted_and_made_in_parts, test_format test_batches_never_hold_ids_outside_the_vocabulary
37 test_families test_loss_and_gradients_are_those_of_transformers
38 test_model test_a_run_starts_from_a_directory_and_from_nothing_else
39 test_grow test_a_frozen_trunk_stands_still_to_the_bit_and_moves_once_it_is_trained
40 test_teach test_hidden_states_and_attention_are_mapped_as_they_should
41 test_teach test_cached_and_asked_give_the_same_losses, test_finetune test_a_student_learns_what_its_teacher_says_and_not_the_labels
42 test_teach test_a_cache_holds_the_most_probable_tokens_of_the_softmax_and_the_mass_of_the_others
43 test_elastic test_gradients_are_the_means_of_those_of_sub_networks_alone
44 test_elastic test_a_search_is_kept_and_continued_and_its_best_is_what_extract_writes
45 test_grow test_each_tensor_comes_from_where_the_rule_says
46 test_adapters test_a_merged_checkpoint_is_an_ordinary_one_with_the_logits_of_training, test_adapters test_a_missing_library_is_one_sentence
47 test_optim test_steps_are_those_of_the_reference, test_extending test_gradients_are_clipped_to_the_norm_of_the_option
48 test_phases test_steps_rows_and_rates_are_those_of_the_reference
49 test_step test_only_the_forward_pass_is_in_autocast, tables/test_run_table test_micro_batches_and_ranks_learn_what_one_batch_does
50 test_dist test_the_shortest_command_trains_on_all_ranks_in_one_directory
51 test_pretrain test_a_step_of_a_resumed_run_can_be_traced
52 test_trackers test_a_tracker_gets_the_numbers_of_the_log_and_a_run_continues_its_record
53 test_pairs test_each_sample_is_shown_with_the_best_predictions_of_its_masked_tokens
54 test_pretrain test_a_checkpoint_is_an_ordinary_hugging_face_directory_with_the_same_loss
55 test_grammar test_training_comes_close_to_the_best_loss_there_is
56 test_tasks test_a_suite_runs_what_is_there_in_its_own_layout, test_tasks test_a_suite_of_json_runs_in_its_own_layout
57 test_augment test_copies_change_words_alone_and_keep_the_rest, test_augment test_a_word_of_several_tokens_gets_its_nearest_neighbours
58 test_grow test_rates_are_scaled_by_the_last_pattern_that_matches
59 test_pretrain test_a_checkpoint_is_an_ordinary_hugging_face_directory_with_the_same_loss, test_import test_a_dataset_of_text_is_exported
60 test_run test_the_doctor_measures_how_long_a_run_takes, test_run test_the_doctor_finds_what_is_wrong
"""  # noqa: E501


def test_each_line_of_the_page_names_tests_that_exist():
    page = (ROOT / "docs" / "howto" / "migrate.md").read_text(encoding="utf-8")
    guards = dict(line.split(" ", 1) for line in GUARDS.strip().splitlines())
    assert re.findall(r"^\| (\d+) \|", page, re.MULTILINE) == [*guards] == [str(number) for number in range(1, 61)]
    for number, names in guards.items():
        for file, function in (name.split() for name in names.split(", ")):
            source = (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8")
            assert f"\ndef {function}(" in source, f"{number}: {file}.py has no {function}"


# --------------------------------------------------------------------------------------------------------- measurements


@pytest.fixture
def script(monkeypatch):
    """script(name): a module of benchmarks/."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


def test_the_page_holds_the_table_of_what_was_measured(script):
    table, data = script("table"), json.loads((ROOT / "benchmarks" / "results" / "comparison.json").read_text())
    _, _, rest = (ROOT / "docs" / "benchmarks.md").read_text().partition(f"{table.BEGIN}\n")
    assert rest.partition(f"\n{table.END}")[0] == table.page(data)
    assert data["rows"] == table.rows_of(data["measured"])
    assert data["notes"] == table.notes(data["measured"])
    assert {row["question"] for row in data["rows"]} == {*table.ROWS}
    assert {row["library"] for row in data["rows"]} >= {*table.NAMES.values()}


def test_readme_has_the_table_of_committed_results_whose_rows_name_a_section_of_a_page(script):
    proof, text = script("proof"), (ROOT / "README.md").read_text()
    assert text.partition(f"{proof.BEGIN}\n")[2].partition(f"\n{proof.END}")[0] == proof.table(*proof.read())
    assert len(text.splitlines()) <= 120
    for one in proof.read()[1]:
        page, _, section = one["page"].partition("#")
        headings = re.findall(r"^## (.*)$", (ROOT / page).read_text(), re.MULTILINE)
        assert section in {re.sub(r"[^\w -]", "", text).replace(" ", "-").lower() for text in headings}


# ------------------------------------------------------------------------------------------------------------ notebooks


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_was_executed_in_order_shows_a_plot_and_has_options_that_exist(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert path.stat().st_size < 300_000
    text = json.dumps([{name: output[name] for name in output if name != "data"} for output in outputs])
    assert not re.search(r"/(tmp|home|root|work|usr)/", text)
    source = "\n".join("".join(cell["source"]) for cell in cells).replace("\\\n", " ")
    for program, command, words in re.findall(r"^!(bertdata|bertrain) (\S+) (.*)", source, re.MULTILINE):
        known = succeeds(data_main if program == "bertdata" else main, command, "--help").output
        assert all(f" {option} " in known for option in re.findall(r"(--[a-z-]+)", words))
