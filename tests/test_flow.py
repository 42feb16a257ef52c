"""How many files of the trainer a run goes through: before its first step, from a batch to its loss, in a save."""

import sys
import threading
from pathlib import Path

from support.commands import succeeds
from support.data import ROOT
from support.runs import QUIET, flags

from bertrain.data import Stream
from bertrain.pretrain import Pretraining, main
from bertrain.trainer import Trainer

STAGES = {
    Trainer.step.__code__: "step",
    Pretraining.save.__code__: "save",
    Pretraining._evaluate.__code__: "save",
}
MOST = {"begin": 22, "step": 10, "save": 12}


class Profile:
    """The files of bertrain that are called in each stage of a run."""

    def __init__(self):
        self.files = {name: set() for name in MOST}
        self._stages = ["begin"]

    def __call__(self, frame, event, _):
        code = frame.f_code
        if code is Stream.next_batch.__code__ and "begin" in self._stages:
            self._stages.remove("begin")
        if event == "call" and code in STAGES:
            self._stages.append(STAGES[code])
        if event == "return" and code in STAGES:
            self._stages.remove(STAGES[code])
        path = Path(code.co_filename)
        if event == "call" and path.is_relative_to(ROOT / "bertrain"):
            writes = threading.current_thread() is not threading.main_thread()
            for stage in ["save"] if writes else self._stages:
                self.files[stage].add(str(path.relative_to(ROOT)))


def test_a_run_goes_through_few_files(dataset, tmp_path):
    profile = Profile()
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        options = {"steps": 2, "save_every": 1, "eval_every": 1}
        succeeds(main, *flags(dataset.path, tmp_path / "run", **QUIET | options))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert {name: len(files) for name, files in profile.files.items() if len(files) > MOST[name]} == {}, profile.files
    assert all(profile.files.values())
