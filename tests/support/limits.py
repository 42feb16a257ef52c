"""The constants of the product that tests change, by the names that tests give them."""

from contextlib import ExitStack
from unittest.mock import patch

CONSTANTS = {
    "block_bytes": "bertdata.sources.formats.BLOCK_BYTES",
    "longest_row": "bertdata.sources.formats.LONGEST_ROW",
    "longest_document": "bertdata.sources.formats.LONGEST_DOCUMENT",
    "longest_json": "bertdata.sources.jsonl._LONGEST",
    "decoded_bytes": "bertdata.sources.tables._DECODED_BYTES",
    "chunk": "bertdata.sources.streams.CHUNK",
    "part_bytes": "bertdata.sources.plan.PART_BYTES",
    "block_ids": "bertdata.sources.ids.BLOCK_IDS",
    "rows_of_ids": "bertdata.sources.ids._ROWS",
    "sample_bytes": "bertdata.write.vocabulary.SAMPLE_BYTES",
    "stretch_bytes": "bertdata.write.vocabulary._STRETCH_BYTES",
    "hashes_together": "bertdata.write.duplicates._TOGETHER",
    "most_listed": "bertdata.format.manifest.MOST_LISTED",
    "record_bytes": "bertdata.format.records.LARGEST_RECORD",
    "verified_together": "bertdata.format.verify._PIECE",
    "wait_for_manifest_s": "bertdata.format.dataset.PATIENCE_S",
    "threads_of_copies": "bertdata.remote.copies.THREADS",
    "first_wait_s": "bertdata.remote.access.FIRST_WAIT_S",
    "timeout_s": "bertdata.remote.access.TIMEOUT_S",
    "first_bytes": "bertdata.remote.access.FIRST_BYTES",
    "most_bytes": "bertdata.remote.access.MOST_BYTES",
    "block_tokens": "bertdata.read.order.BLOCK_TOKENS",
    "packed_together": "bertdata.read.pieces.PACKED_TOGETHER",
    "documents_at_once": "bertdata.read.stream._DOCUMENTS_AT_ONCE",
    "near_lines": "bertdata.tokenize.engine.NEAR_LINES",
    "far_lines": "bertdata.tokenize.engine.FAR_LINES",
    "hard_runs": "bertdata.tokenize.engine.HARD_RUNS",
    "pooled_ids": "bertdata.tokenize.engine.POOLED_IDS",
    "spelled_bytes": "bertdata.tokenize.engine.SPELLED_BYTES",
    "stable_slots": "bertdata.tokenize.engine.STABLE_SLOTS",
    "texts_together": "bertdata.tokenize.engine._TOGETHER",
    "longest_piece": "bertdata.tokenize.engine.LONGEST_PIECE",
    "classes": "bertdata.tokenize.rules.CLASSES",
    "kept_bytes": "bertdata.tokenize.source.MOST_KEPT",
    "bench_s": "bertdata.look.bench.SECONDS",
    "repeat_s": "bertrain.ranks.REPEAT_S",
    "stale_s": "bertrain.checkpoint.STALE_S",
    "warmup_steps": "bertrain.commands.doctor.WARMUP_STEPS",
    "timed_steps": "bertrain.commands.doctor.TIMED_STEPS",
    "demo_build": "bertrain.commands.demo.BUILD",
    "demo_rows": "bertrain.commands.demo.ROWS",
    "demo_steps": "bertrain.commands.demo.STEPS",
    "demo_training": "bertrain.commands.demo.TRAIN",
    "evaluated_places": "bertrain.evaluate.PLACES",
    "searched_repeats": "bertrain.lab.elastic.search.REPEATS",
    "pairs_places": "bertrain.commands.pairs.PLACES",
    "teacher_bytes": "bertrain.lab.distillation.teacher.LIMIT_BYTES",
    "teacher_units": "bertrain.lab.distillation.teacher.MOST_UNITS",
    "augmented_together": "bertrain.lab.augment.TEXTS",
    "augmented_places": "bertrain.lab.augment.PLACES",
    "most_vectors": "bertrain.lab.augment.MOST_VECTORS",
}


def limits(**values):
    """Change constants, until a `with` of what this returns ends."""
    stack = ExitStack()
    for name, value in values.items():
        stack.enter_context(patch(CONSTANTS[name], value))
    return stack
