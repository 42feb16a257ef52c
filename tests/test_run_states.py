"""After stops, kills, full disks, damage, copies and later phases in any order, a run ends like an undisturbed one."""

import itertools
import os
import shutil
import signal
from contextlib import nullcontext

import hypothesis
import pytest
from forks import differing_entries, parts, without_times
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from support.disk import before_rename, contents, full_at, put
from support.runs import QUIET, at_step, entries, last_checkpoint, refused_run, resumed_from, steps_of, train

STEPS = 4  # of each phase
FILES = st.sampled_from(["model.safetensors", "optimizer.pt", "trainer.json", "config.json", "checkpoint.json"])
DAMAGES = st.sampled_from([lambda path: put(path, path.read_bytes()[:-1] + b"?"), os.remove])
BAD_LINES = b'17\n\xff\xfe\n{"step": null}\n[1]\n{"loss": 1.0}\n' + b"[" * 99_999 + b"\n"
ALONE = {}  # options → how a run with them ends that was left alone


def end_of(out):
    """What a run logged of its steps, and what is in each file of its last checkpoint."""
    log = [without_times(entry) | {"sources": None} for entry in steps_of(entries(out))]  # only there if several
    return log, {path.name: parts(path) for path in last_checkpoint(out).iterdir()}


class Machine(RuleBasedStateMachine):
    """saved: the steps of checkpoints that must be there, and complete. Of the test: one, two, new."""

    @initialize(save_every=st.integers(1, 3), log_every=st.sampled_from([1, 3]), keep=st.sampled_from([2, 9]))
    def begin(self, **options):
        self.options = QUIET | options | {"schedule": "constant", "warmup": 0}
        self.phases, self.saved, self.num_damaged, self.out = [{"steps": STEPS}], [], 0, next(self.new)

    def next_saves(self):
        steps = range(max(self.saved, default=0) + 1, STEPS * len(self.phases) + 1)
        return [step for step in steps if step % self.options["save_every"] == 0 or step % STEPS == 0]

    def train(self, saves, context=None):
        """Runs the command once. saves: the steps that it saves."""
        with context or nullcontext():
            train(self.one, self.out, phase=self.phases, **self.options)
        assert resumed_from(self.out) == (f"step-{self.saved[-1]:08d}" if self.saved else "none")
        self.saved = [*self.saved, *saves][-self.options["keep"] :]

    @precondition(lambda self: self.options["log_every"] == 1)  # as the step at which it stops has an entry
    @rule(ahead=st.integers(1, STEPS), number=st.sampled_from([signal.SIGTERM, signal.SIGUSR1]))
    def stop(self, ahead, number):
        last, saves = max(self.saved, default=0) + ahead, self.next_saves()
        saves = [step for step in saves if step < last] + [last] if last <= max(saves, default=0) else saves
        with pytest.MonkeyPatch.context() as patch:
            at_step(patch, "next_batch", last - 1, lambda: os.kill(os.getpid(), number))
            self.train(saves)

    @precondition(lambda self: self.next_saves())
    @rule(data=st.data())
    def kill(self, data):
        """Between the writing of a checkpoint and its publication: the disk as it is then, in another place."""
        step, out = data.draw(st.sampled_from(self.next_saves())), next(self.new)
        name, saves = f"step-{step:08d}", [each for each in self.next_saves() if each < step]
        self.train(saves, before_rename(name, lambda: shutil.copytree(self.out, out, symlinks=True)))
        self.out = out
        (out / ".last.tmp").unlink(missing_ok=True)  # of a kill before
        (out / ".last.tmp").symlink_to("nowhere")
        put(out / "log.jsonl", BAD_LINES + (out / "log.jsonl").read_bytes() + b'{"step": 4, "lo')

    @precondition(lambda self: self.next_saves()[:-1])
    @rule(data=st.data())
    def fill_the_disk(self, data):
        step = data.draw(st.sampled_from(self.next_saves()[:-1]))
        self.train([each for each in self.next_saves() if each != step], full_at(step))

    @precondition(lambda self: self.saved)
    @rule(name=FILES, damage=DAMAGES)
    def damage(self, name, damage):
        """Damages the newest complete checkpoint. If no complete one is left, the command is refused."""
        path = self.out / f"step-{self.saved[-1]:08d}" / name
        whole = path.read_bytes()
        damage(path)
        if len(self.saved) > 1:
            self.saved.pop()
            self.num_damaged += 1
        else:
            before = contents(self.out)
            refused_run(self.one, self.out, phase=self.phases, **self.options, kind="damaged", option="out")
            assert contents(self.out) == before
            put(path, whole)

    @precondition(lambda self: self.saved and self.next_saves())
    @rule(symlinks=st.booleans())
    def copy(self, symlinks):
        self.out = shutil.copytree(self.out, next(self.new), symlinks=symlinks, ignore_dangling_symlinks=True)

    @precondition(lambda self: len(self.phases) < 3)
    @rule(more=st.sampled_from([{"length": 48}, {"global_batch_size": 4, "length": 16}, {"data": None}]))
    def finish_and_add_a_phase(self, more):
        self.train(self.next_saves())
        self.phases = [*self.phases, {"steps": STEPS} | ({"data": self.two} if "data" in more else more)]

    def teardown(self):
        self.train(self.next_saves())
        options = repr([self.phases, self.options])
        if options not in ALONE:
            train(self.one, out := next(self.new), phase=self.phases, **self.options)
            ALONE[options] = end_of(out)
        (log, files), alone = end_of(self.out), ALONE[options]
        assert (differing_entries(log, alone[0]), files) == ("", alone[1])
        assert [int(path.name[5:]) for path in sorted(self.out.glob("step-*"))] == self.saved
        assert (len([*self.out.glob("damaged-*")]), [*self.out.glob(".*.tmp")]) == (self.num_damaged, [])
        assert (self.out / "last").readlink().name == last_checkpoint(self.out).name


@pytest.mark.slow
def test_a_run_ends_as_one_that_was_left_alone(dataset, other, tmp_path):
    new = (tmp_path / f"run-{number}" for number in itertools.count())
    machine = type("Here", (Machine,), {"one": str(dataset.path), "two": str(other.path), "new": new})
    quick = {"deadline": None, "stateful_step_count": 8, "phases": [hypothesis.Phase.generate]}
    settings = hypothesis.settings(max_examples=6, suppress_health_check=[*hypothesis.HealthCheck], **quick)
    run_state_machine_as_test(machine, settings=settings)
