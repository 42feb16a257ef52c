"""Faults of the product, to inject one at a time: `mutate.py faults` reports whether they are found.

The first line of a fault is what should find it, and what is wrong; the second is the file. Lines with - are a text of
the file, and those with + the text in its place.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A change of one file; `finder` is a test, or a campaign of crash.py and one of its commands."""

    finder: str
    what: str
    file: str
    old: str
    new: str

    def inject(self, source: str) -> str:
        """Return the source of the file with the fault. Raises AssertionError if the old text is not there."""
        assert self.old in source, f"{self.file} does not contain {self.old!r}; correct tools/injected.py"
        return source.replace(self.old, self.new)


def _read(text: str) -> list[Fault]:
    faults = []
    for block in text.strip("\n").split("\n\n"):
        header, file, *lines = block.split("\n")
        old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        faults.append(Fault(*header.split(": ", 1), file, old, new))
    return faults


CRASH = _read("""
states build: sync of a record
bertdata/files.py
-os.fsync(file.fileno())
+pass

states build: sync of a new directory
bertdata/files.py
-        fsync_directory(directory.parent)

states build: sync of the names of records
bertdata/files.py
-        os.replace(self._path(last), self.directory / last)
-        fsync_directory(self.directory)
+        os.replace(self._path(last), self.directory / last)

states build: sync of an array
bertdata/format/arrays.py
-beside.submit(os.fsync, self._file.fileno())
+beside.submit(int)

states build: sync before the last name of a stage
bertdata/files.py
-        if names:
+        if not names:

states overwrite: sync of the old manifest's new name
bertdata/write/staging.py
-            fsync_directory(directory)
-        if old :=
+        if old :=

states export: sync of an exported file
bertdata/write/exchange.py
-sync(file)
+pass

states export: sync of temporary names of an export
bertdata/write/exchange.py
-        fsync_directory(directory)  # the next
+        #

states export: the last name of a stage comes first
bertdata/files.py
-*names, last = self._files
+last, *names = self._files

states pull: sync of a pulled file
bertdata/remote/copies.py
-        stage.publish()
+        path.with_name(path.name + TEMPORARY).replace(path)
+        fsync_directory(path.parent)

states pull: sync of a pull's lock
bertdata/remote/copies.py
-            fsync_directory(target)  #
+            #

states pull-plain: sync of the name of a pulled file
bertdata/remote/copies.py
-        stage.publish()
+        __import__("bertdata.files").files.sync(copy)
+        path.with_name(path.name + TEMPORARY).replace(path)

states teacher: the record of a unit of answers comes first
bertrain/lab/distillation/answers.py
-        stage.write(f"{unit}.json", sealed_record(record))
+        write_record(directory / f"{unit}.json", record)

states merge: sync of a checkpoint's files
bertrain/checkpoint.py
-os.fsync(file.fileno())
+pass

states merge: sync of a checkpoint's name
bertrain/checkpoint.py
-        fsync_directory(target.parent)

states pretrain: sync of the log
bertrain/checkpoint.py
-            with suppress(FileNotFoundError), naming(log), open(log, "rb") as file:  # the next entry writes it
-                os.fsync(file.fileno())

states build: temporary name of a record
bertdata/files.py
-(name + TEMPORARY)
+name

states merge: a checkpoint appears at once
bertrain/checkpoint.py
-os.replace(temporary, target)
+shutil.copytree(temporary, target)

states build: the manifest last
bertdata/write/staging.py
-        prepare_directory(directory, origins)
+        stage.publish()
+        stage.publish = lambda: None
+        prepare_directory(directory, origins)

states overwrite: the old manifest until the new one is there
bertdata/write/staging.py
-        stage.publish()
-    (directory / REPLACED).unlink(missing_ok=True)
+        (directory / REPLACED).unlink(missing_ok=True)
+        stage.publish()

states teacher: the plan of answers goes last
bertrain/lab/distillation/answers.py
-    write_record(directory / CACHE, header
+    (directory / PLAN).unlink()
+    write_record(directory / CACHE, header

states build: where a killed publication moved a file
bertdata/write/staging.py
- or (may_be_moved and exists(f"{directory}/{name}"))

states build: a build is not continued next to its manifest
bertdata/write/staging.py
-if not overwrite and not (staging / PLAN).exists():
+if not overwrite:

calls export: an error of the system is one sentence
bertdata/cli.py
-    except (MemoryError, RuntimeError, OSError) as error:
+    except (MemoryError, RuntimeError) as error:

calls build: an error of a write ends the command
bertdata/files.py
-self.open(name).write(content)
+with suppress(OSError):
+            os.write(self.open(name).fileno(), content)

states pull: the lock of a pull
bertdata/remote/copies.py
-with locked(target / LOCK, f"{target} is being filled", "wait for it"):
+if True:

states pretrain: how many checkpoints stay
bertrain/checkpoint.py
-others[self.keep - 1 :]
+others[self.keep :]
""")
"""A missing sync, name, check, lock or bound."""

GPU = _read("""
tests/test_gpu_dry.py::test_a_step_needs_no_number[bert-base-windows]: a number of a tensor is read in the step
bertrain/objectives.py
-        return classification(
+        assert piece["targets"].max().item() >= 0
+        return classification(

tests/test_gpu_dry.py::test_a_forward_pass_on_a_gpu[bert-base-windows]: a tensor on the CPU
bertrain/models/encoder.py
-    return states.gather(
+    states = states + torch.zeros(states.shape[-1], device="cpu")
+    return states.gather(

tests/test_gpu_dry.py::test_a_forward_pass_on_a_gpu[bert-base-packed]: a mask of all pairs of tokens
bertrain/models/encoder.py
-    is_supported = value.dtype
+    is_supported = length < 64 and value.dtype

tests/test_gpu_dry.py::test_a_step_needs_no_number[bert-base-windows]: a shape that follows from numbers
bertrain/objectives.py
-    logits = logits.float()
+    logits = logits.float()
+    logits, targets = logits[targets != IGNORE_INDEX], targets[targets != IGNORE_INDEX]

tests/test_gpu_dry.py::test_the_kernel_of_gpus_gives_what_masks_give[bert-True-64]: a second graph
bertrain/models/encoder.py
-        return self._head(
+        torch._dynamo.graph_break()
+        return self._head(

tests/test_gpu_dry.py::test_compiled_ranks_learn_what_one_does[packed]: the gradients of the other rank are left out
bertrain/trainer.py
-        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
+        future = dist.all_reduce(bucket.buffer().clone(), async_op=True).get_future()
+        return future.then(lambda done: bucket.buffer())

tests/test_step.py::test_a_run_goes_on_after_a_skipped_step[adamw]: a NaN in a gradient reaches the weights
bertrain/trainer.py
-self.skipped = 1 - self.norm.isfinite().float()
+self.skipped = torch.zeros_like(self.norm)

tests/test_gpu_dry.py::test_the_kernel_of_gpus_gives_what_masks_give[modernbert-True-64]: a window one token too wide
bertrain/models/encoder.py
-window_size=(reach, reach)
+window_size=(reach + (reach > 0),) * 2

tests/test_gpu_dry.py::test_the_kernel_of_gpus_gives_what_masks_give[bert-True-64]: bounds of documents in another dtype
bertrain/models/encoder.py
-dtype=torch.int32)
+dtype=torch.int64)

tests/test_gpu_dry.py::test_compiled_ranks_learn_what_one_does[packed]: a barrier on one rank
bertrain/trainer.py
-        prepared = self.learner.prepare(piece)  # outside
+        if self._ranks.rank:
+            dist.barrier()
+        prepared = self.learner.prepare(piece)  # outside
""")
"""What would be wrong on a GPU, and the test on a CPU that should find it."""
