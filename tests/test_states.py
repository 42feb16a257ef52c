"""Any order of builds, parts, kills, pushes, pulls, damage and two writers at once: what is there is what a model says.

Two directories and two URLs of a store, which is a directory here. Every command runs in a fork, which may be killed
at any of its changes to the disk, or stopped there while another command runs.
"""

import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from support.data import SPECIALS, build, faults_of, make_text
from support.disk import contents, flip, visible, write, write_all
from support.limits import limits
from support.servers import directory_as_store
from support.sources import stopped

import bertdata
from bertdata import BertdataError, finish
from bertdata.remote.copies import pull, push

OPTIONS = {  # name → text, options of build
    "units": ("some", {"shard_size": 500}),
    "sentences": ("some", {"shard_size": 700, "sentences": "line", "validation": 0.4}),
    "other": ("other", {"shard_size": 500}),
    "trained": ("other", {"tokenizer": None, "vocab_size": 70, "documents": "line", "dedup": True}),
    "empty": ("blank", {}),
}
PLACES, URLS, STEPS = ("one", "two"), ("a", "b"), 40
WRITES = ("os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir")
COUNTS = Counter()  # steps by what came of them, of all machines
FAULTS = "damaged parts-missing unreadable not-found wrong-file-type not-a-dataset unfinished busy"
ANY_FAULT = {*FAULTS.split()}


# --------------------------------------------------------------------------------------------------- commands in forks


def end_at(number, signal_number):
    """From now on the change of this number ends this process, or stops it, just before it is made."""
    left = [number]

    def change():
        left[0] -= 1
        if left[0] == -1:
            os.kill(os.getpid(), signal_number)

    def hook(event, arguments):
        if event in WRITES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            change()

    sys.addaudithook(hook)
    os.fsync = lambda fd: change()


class Started:
    """A command in a fork. `end()` is "ok", "killed", "traceback" or the kind of its error, and what it says."""

    def __init__(self, work, number=None, how=signal.SIGKILL):
        self.answers, answers = multiprocessing.Pipe(duplex=False)
        self.pid = os.fork()
        if not self.pid:
            try:
                signal.alarm(60)
                if number is not None:
                    end_at(number, how)
                try:
                    answers.send(("ok", work()))
                except BertdataError as error:
                    answers.send((error.kind, str(error)))
            except BaseException:
                answers.send(("traceback", traceback.format_exc()))
            finally:
                os._exit(0)
        answers.close()

    def rest(self, limit_s):
        """Waits until it has stopped or ended; it may also wait for a lock."""
        for _ in range(int(limit_s * 500)):
            if os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG):
                return
            time.sleep(0.002)

    def go_on(self):
        os.kill(self.pid, signal.SIGCONT)

    def end(self):
        answer = None
        while not self.answers.poll(1):
            self.go_on()  # a slow one may stop only after `go_on`
        with self.answers, suppress(EOFError):
            answer = self.answers.recv()
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        assert status != -signal.SIGALRM, "a command hangs"
        assert answer or status == -signal.SIGKILL, status
        return answer or ("killed", None)


# ---------------------------------------------------------------------------------------------- what a command is to do


@dataclass(frozen=True)
class State:
    """What a directory, or a URL, has."""

    holds: str | None = None  # the published dataset, a name of OPTIONS; "?": its manifest cannot be read
    plan: str | None = None  # of an unfinished build
    finished: frozenset = frozenset()  # names of the records of units and parts
    is_pulling: bool = False  # a killed pull has left files, and no dataset
    is_torn: bool = False  # a build moves its files
    is_touched: bool = False  # somebody has damaged a file that is not of an unfinished build
    has_lost: bool = False  # an array of an unfinished build was removed


class World:
    """Undisturbed builds of OPTIONS, and what is in the directories."""

    def __init__(self, base, path_of):
        self.base, self.path_of = base, path_of
        texts = {"some": make_text(4, seed=3), "other": make_text(3, seed=4) * 2, "blank": "\n \n\n"}
        write_all(base, texts)
        write(base / "vocab.txt", *SPECIALS, ".", "the", "of", "stone", "river", "a", "##s")
        self.plans, self.trees, self.parts, self.documents, self.ids = {}, {}, {}, {}, {}
        for name in OPTIONS:
            self._learn(name)

    def _learn(self, name):
        out = self.base / "learn"
        with suppress(BertdataError):
            dataset = self.build(name, out).dataset
            self.documents[name] = [ids.tolist() for ids in dataset]
            self.ids[dataset.dataset_id] = name
            self.trees[name] = contents(out)
        shutil.rmtree(out, ignore_errors=True)
        if name == "trained":  # with --dedup, which has no parts
            stopped(self.base / OPTIONS[name][0], out, 0, **self.options(name))
        else:
            for part in ((0, 2), (1, 2)):
                self.build(name, out, part=part)
            self.parts[name] = contents(out)
        self.plans[name] = plan_in(out)
        shutil.rmtree(out)

    def options(self, name):
        return {"tokenizer": str(self.base / "vocab.txt"), "workers": 1, **OPTIONS[name][1]}

    def build(self, name, out, **more):
        return build(self.base / OPTIONS[name][0], out, **self.options(name), **more)

    def root(self, target):
        return self.base / "places" / target if target in PLACES else self.path_of(f"s3://{target}/data")

    def id_in(self, manifest):
        if not manifest.exists():
            return None
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            return self.ids.get(json.loads(manifest.read_bytes())["dataset_id"], "?")
        return "?"

    def seen(self, target):
        """The State of a directory or a URL, as far as files say it."""
        out, staging = self.root(target), self.root(target) / ".build"
        holds, plan = self.id_in(out / "manifest.json"), plan_in(out)
        names = os.listdir(staging) if staging.exists() else []
        others = {path.name for path in out.iterdir()} - {".build"} if out.exists() else set()
        return State(
            holds=holds,
            plan=next((name for name, each in self.plans.items() if each == plan), None),
            finished=frozenset(each for each in names if re.fullmatch(r"(part|unit)-.*\.json", each)),
            is_pulling=holds is None and not staging.exists() and bool(others),
            is_torn=holds is None and staging.exists() and bool(others),
        )


def plan_in(out):
    """The plan of an unfinished build in a directory, or None."""
    plan = out / ".build" / "plan.json"
    return json.loads(plan.read_bytes()) if plan.exists() else None


STOPS = st.one_of(st.none(), st.integers(0, 130))
TARGETS = st.sampled_from([*PLACES, *URLS])
NAMES, CONFIGS, SPOTS = st.sampled_from(PLACES), st.sampled_from(list(OPTIONS)), st.integers(0, 1 << 16)
PARTS = st.sampled_from([None, None, (0, 2), (1, 2)])
BUILDS = st.tuples(st.just("build"), NAMES, CONFIGS, st.sampled_from([True, True, False]), PARTS)
FINISHES = st.tuples(st.just("finish"), NAMES)
TRANSFERS = st.tuples(st.sampled_from(["push", "pull", "open"]), NAMES, st.sampled_from(URLS))
COMMANDS = st.one_of(BUILDS, BUILDS, TRANSFERS, FINISHES)


class Machine(RuleBasedStateMachine):
    world = None  # set by `run`

    def __init__(self):
        super().__init__()
        for folder in ("places", "store", "cache"):
            shutil.rmtree(self.world.base / folder, ignore_errors=True)
        (self.world.base / "places").mkdir()
        self.states = {name: State() for name in (*PLACES, *URLS)}

    # --------------------------------------------------------------------------------------------------- rules

    @rule(command=COMMANDS, stop=STOPS)
    def run_command(self, command, stop):
        target = self.target(command)
        before, files, expected = self.states[target], visible(self.world.root(target)), self.expected(command)
        kind, value = Started(lambda: self.work(command), stop).end()
        COUNTS[f"{command[0]} {kind}"] += 1
        assert kind in expected or kind == "killed", (command, before, kind, value, expected)
        after = self.settle(target, [command])
        if kind == "killed":
            self.require_kept(command, before, after)
        elif kind != "ok":
            self.require_refused(command, before, files, after)
        else:
            self.require_done(command, before, after, value)

    @rule(one=COMMANDS, other=COMMANDS, stop=st.integers(0, 130), pause=STOPS, same=st.booleans())
    def two_at_once(self, one, other, stop, pause, same):
        """Another command begins while one is stopped in its middle, and may stop until that one has ended."""
        if same:
            other = (other[0], one[1], *other[2:])
        if one[0] == other[0] == "push" and self.target(one) == self.target(other):
            return  # two pushes to one URL may mix their files; a pull finds that
        before, targets = dict(self.states), {self.target(one): [], self.target(other): []}
        for command in (one, other):
            targets[self.target(command)].append(command)
        first = Started(lambda: self.work(one), stop, signal.SIGSTOP)
        first.rest(60)
        second = Started(lambda: self.work(other), pause, signal.SIGSTOP)
        second.rest(0.3)
        if self.target(one) in PLACES and not any(state.is_touched for state in before.values()):
            with suppress(BertdataError):  # a reader has the old dataset or the new one
                documents = [ids.tolist() for ids in bertdata.open(self.world.root(self.target(one)))]
                assert documents in self.world.documents.values()
        first.go_on()
        first.rest(0.3)  # it may wait for a lock of the other
        second.go_on()
        ended = [first.end(), second.end()]
        kinds = [kind for kind, _ in ended]
        assert "traceback" not in kinds, ended
        COUNTS[f"two {' '.join(kinds)}"] += 1
        for target, commands in targets.items():
            self.settle(target, commands)
            done = [
                each
                for each, kind in zip((one, other), kinds, strict=True)
                if kind == "ok" and self.target(each) == target and not (each[0] == "build" and each[4])
            ]
            given = {self.gives(each, states) for each in commands for states in (before, self.states)}
            now, old = self.states[target].holds, before[target].holds
            assert now in given if done else now in {old, None, *given}, (target, kinds, before, now)
            if old and target in URLS:
                assert now == old, (target, kinds, before, now)

    @rule(name=TARGETS, spot=SPOTS, how=st.sampled_from(["flip", "lose"]))
    def damage(self, name, spot, how):
        """Flips a bit of a file, or removes one; of an unfinished build only arrays are removed."""
        root = self.world.root(name)
        hurt = [
            each
            for each in sorted(contents(root))
            if not each.startswith(".build/") or (how == "lose" and each.endswith(".npy"))
        ]
        if hurt:
            COUNTS["damage"] += 1
            one = hurt[spot % len(hurt)]
            if how == "lose":
                (root / one).unlink()
            elif size := (root / one).stat().st_size:
                flip(root / one, spot * 7919 % size, 1 << spot % 8)
            what = "has_lost" if one.startswith(".build/") else "is_touched"
            self.states[name] = replace(self.states[name], **{what: True})
            self.settle(name)

    @rule(names=st.sets(TARGETS, min_size=1), config=CONFIGS, is_whole=st.booleans())
    def put(self, names, config, is_whole):
        """A dataset, or all parts of one, or nothing, in some places at once; chance seldom makes them."""
        for name in names:
            shutil.rmtree(self.world.root(name), ignore_errors=True)
            self.states[name] = State()
            content = self.world.trees if is_whole or name in URLS else self.world.parts
            write_all(self.world.root(name), content.get(config, {}))
            self.settle(name)

    def teardown(self):
        """A build that was killed goes on to the same bytes; where a file was removed, the second time."""
        for name in PLACES:
            plan = self.states[name].plan
            if plan and plan != "empty":
                state = self.states[name]
                self.run_command(("build", name, plan, False, None), None)
                if state.is_touched or state.has_lost:
                    self.run_command(("build", name, plan, True, None), None)
                assert self.states[name].holds == plan, (name, self.states[name])

    # --------------------------------------------------------------------------------------- what rules are made of

    def target(self, command):
        return command[2] if command[0] in ("push", "open") else command[1]

    def work(self, command):
        """Does what a command says; its answer is how many units it did not make again."""
        what, name, *more = command
        out = self.world.root(name)
        if what == "build":
            config, overwrite, part = more
            report = self.world.build(config, out, overwrite=overwrite and part is None, part=part)
            return report.reused_units if report else None
        if what == "finish":
            finish(out)
        else:
            url = f"s3://{more[0]}/data"
            if what == "open":
                return [ids.tolist() for ids in bertdata.open(url)]
            push(out, url) if what == "push" else pull(url, out)
        return None

    def gives(self, command, states):
        """The dataset that a command puts where it writes."""
        what, name, *more = command
        if what == "build":
            return more[0]
        return states[name].plan if what == "finish" else states[name if what == "push" else more[0]].holds

    def expected(self, command):
        what, name, *more = command
        state = self.states[name]
        if what == "build":
            return self.of_build(state, *more)
        if what == "finish":
            has_parts = state.plan and {"part-1-of-2.json", "part-2-of-2.json"} <= state.finished
            can_end = has_parts or (state.holds and not state.plan)
            return self.of_build(state, state.plan, False, None) if can_end else {"parts-missing"}
        there = self.states[more[0]]
        if what == "open":
            return ANY_FAULT if there.holds in (None, "?") else {"ok"} | (ANY_FAULT if there.is_touched else set())
        return self.of_push(state, there) if what == "push" else self.of_pull(state, there, self.world.root(name))

    def of_build(self, state, config, overwrite, part):
        overwrite = overwrite and part is None
        if part and config == "trained":
            return {"conflict"}
        if state.is_pulling or (state.holds and not overwrite and not state.plan):
            return {"out-exists"}
        if state.plan not in (None, config) and not overwrite:
            return {"other-settings"}
        if config == "empty" and not part:
            return {"empty"}
        return {"ok", *ANY_FAULT} if state.plan == config and self.may_lack(state) else {"ok"}

    def may_lack(self, state):
        """Whether a file may be missing that a build has made; one that is being published has moved some."""
        return state.has_lost or (state.is_torn and state.is_touched)

    def of_push(self, here, there):
        if "?" in (here.holds, there.holds) or not here.holds:
            return ANY_FAULT
        fault = ANY_FAULT if here.is_touched else set()
        return {"ok" if there.holds in (None, here.holds) else "out-exists"} | fault

    def of_pull(self, here, there, out):
        if there.holds in (None, "?"):
            return ANY_FAULT
        fault = ANY_FAULT if there.is_touched or here.is_touched else set()
        if here.is_touched:  # without its manifest nothing says whose the files are
            fault = fault | {"out-exists"}
        is_of_another = not here.is_pulling and out.exists() and any(out.iterdir())
        if here.holds or is_of_another:
            return {"ok" if here.holds == there.holds else "out-exists"} | fault
        return {"ok", *["out-exists"] * here.is_pulling} | fault  # an earlier pull may have been of another dataset

    def settle(self, target, commands=()):
        """Looks at what is there now; a dataset must be whole, with origins or without, and read as the model says."""
        before, after, root = self.states[target], self.world.seen(target), self.world.root(target)
        found, expected = contents(root), self.world.trees.get(after.holds)
        if expected and (target in URLS or not (root / "origins").exists()):
            expected = {name: content for name, content in expected.items() if not name.startswith("origins/")}
        whole = expected is not None and found.items() >= expected.items()
        is_touched = before.is_touched and not whole
        after = replace(after, is_touched=is_touched, has_lost=before.has_lost and after.plan == before.plan)
        assert not after.holds or whole or is_touched, (target, commands, before, after)  # half taken for whole
        self.states[target] = after
        if target in PLACES:
            faults, documents = faults_of(root), None
            with suppress(BertdataError):
                documents = [ids.tolist() for ids in bertdata.open(root)]
            assert (faults == []) == whole, (target, after, faults)
            if whole or not after.holds:
                assert documents == self.world.documents.get(after.holds)
        return after

    def require_kept(self, command, before, after):
        """What a killed command leaves: nothing finished is lost, and only what it was to make is new."""
        new = self.gives(command, self.states | {self.target(command): before})
        assert after.holds in (before.holds, None, new), (command, before, after)
        if after.holds is None and before.holds:
            assert after.plan == new, (command, before, after)
        if after.plan and after.plan == before.plan and after.holds == before.holds:
            assert after.finished >= before.finished, (command, before, after)

    def require_refused(self, command, before, files, after):
        """A refused command publishes nothing. A refused build changes nothing but an unfinished one without units."""
        assert after.holds == before.holds
        if command[0] in ("build", "finish"):
            assert visible(self.world.root(command[1])) == files
            was_discarded = (command[0] == "build" and command[2] == "empty") or self.may_lack(before)
            kept = {each for each in before.finished if before.plan != "empty" or each.startswith("part")}
            assert after.finished >= kept or was_discarded, (command, before, after)

    def require_done(self, command, before, after, value):
        what, _, *more = command
        if what == "build" and more[2]:
            assert f"part-{more[2][0] + 1}-of-2.json" in after.finished
            assert after.finished >= (before.finished if before.plan == more[0] else frozenset())
            assert after.holds == before.holds
            return
        if what == "open":
            assert value == self.world.documents[before.holds]
        states = self.states | {self.target(command): before}
        assert after.holds == self.gives(command, states), (command, before, after)
        if what in ("build", "finish"):
            assert not (self.world.root(command[1]) / ".build").exists()
        if what == "build" and before.plan == more[0] and not self.may_lack(before):
            assert value == sum(each.startswith("unit") for each in before.finished)


# ------------------------------------------------------------------------------------------------------------ campaigns


def campaign(examples, seed, steps=STEPS):
    """Runs machines of at most so many steps each. Returns what was counted.

    The first machine of hypothesis is always the simplest one, which only builds. It is one more.
    """
    COUNTS.clear()
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="states-")))
        stack.enter_context(patch.dict(os.environ, BERTDATA_CACHE=str(base / "cache")))
        stack.enter_context(limits(wait_for_manifest_s=0.01, threads_of_copies=1))  # a kill is at the same place again
        Machine.world = World(base, stack.enter_context(directory_as_store(base / "store")))
        settings = hypothesis.settings(
            hypothesis.settings(),
            max_examples=examples + 1,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate],  # shrinking is long
        )
        machine = type("Seeded", (Machine,), {"_hypothesis_internal_use_seed": seed})
        run_state_machine_as_test(machine, settings=settings)
    return dict(COUNTS)


@pytest.mark.slow
def test_any_order_of_commands_kills_and_damage_is_what_the_model_says(request):
    """Some steps; with --steps many, which are counted after each thousand."""
    steps, seed = request.config.getoption("--steps"), request.config.getoption("--seed")
    counts = campaign(2, seed, steps=25)
    assert sum(counts.values()) > 30
    assert len(counts) > 8  # kinds of commands and of what came of them
    for number in range(steps // 1000):
        print(json.dumps({"seed": seed + number, "counts": campaign(1000 // STEPS, seed + number)}), flush=True)
