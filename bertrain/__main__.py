"""The commands of the trainer. `bertrain pretrain …` is the same as `python -m bertrain.pretrain …`.

The module of a command is imported when the command runs, so `bertrain --help` is fast and does not need torch.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType, ModuleType


@contextlib.contextmanager
def leaving_at_interrupt() -> Iterator[None]:
    """End the process immediately on Ctrl-C, while only imports run.

    A KeyboardInterrupt is not enough: torch imports numpy from C++, which ignores it and continues with half of numpy.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        if os.environ.get("RANK", "0") == "0":
            os.write(2, b"interrupted; run the same command again\n")
        os._exit(130)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


with leaving_at_interrupt():
    import click
    from click.shell_completion import CompletionItem

    import bertdata
    from bertdata.support import install, one_sentence

COMMANDS = {
    "demo": ("commands.demo", "Run all steps once: from text to a trained model."),
    "pretrain": ("cli:pretrain", "Pre-train a masked language model on shards."),
    "evaluate": ("commands.evaluate", "Measure a checkpoint on held-out text, or on minimal pairs."),
    "finetune": ("lab.finetune", "Fine-tune a checkpoint on labelled text, over several seeds."),
    "augment": ("lab.augment", "Add copies with replaced words to labelled text."),
    "suite": ("lab.suite", "Fine-tune a checkpoint for the tasks of GLUE, SuperGLUE or CLUE."),
    "search": ("lab.elastic.search", "Find the best sub-network within a latency limit."),
    "extract": ("lab.elastic.extract", "Write a sub-network as a separate checkpoint."),
    "merge": ("commands.merge", "Write the mean of the weights of several checkpoints."),
    "transplant": ("lab.transplant", "Give a trained model a different vocabulary."),
    "teacher": ("lab.distillation.teacher", "Store a teacher's predictions once, for students."),
    "doctor": ("cli:doctor", "Print the phases of a run, and check it before it starts."),
    "trace": ("commands.trace", "Print the documents of a batch of a past run."),
    "plot": ("commands.plot", "Draw the curves of runs to a picture or a page."),
}
"""Name → (module with the command `main`, or module:command; help)."""


def imported(module: str) -> ModuleType:
    """Import a module of this package. If a package is missing, print one line and exit."""
    try:
        with one_sentence(), leaving_at_interrupt():  # importing torch takes seconds
            return importlib.import_module(f"bertrain.{module}")
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package == "bertrain":
            raise
        sys.exit(f"Error: this command needs {package}, which is not installed; {install('train')}")


class _Commands(click.Group):
    """The commands of COMMANDS, each imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, command = COMMANDS[name][0].partition(":")
        try:
            return getattr(imported(module), command or "main")
        except SystemExit:
            if ctx.resilient_parsing:  # the shell completes a command line
                return None
            raise

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete options, and command names without importing the commands."""
        names = [CompletionItem(name, help=line) for name, (_, line) in COMMANDS.items() if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


_NAMES = dict.fromkeys(COMMANDS, click.Command(""))  # click suggests one of these for an unknown name


@click.command(cls=_Commands, commands=_NAMES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(bertdata.__version__, prog_name="bertrain")
def main() -> None:
    """Train BERT-style encoders on the shards that bertdata made.

    On several processes: torchrun --nproc-per-node 2 -m bertrain pretrain ...
    """


if __name__ == "__main__":
    main()
