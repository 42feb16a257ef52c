"""The trainer on a disk that is full in the write of a checkpoint: `main([step, *arguments of bertrain.pretrain])`."""

import errno
import os

from bertrain import pretrain
from support.disk import step_of_index, syncing


def main(arguments):
    step, *rest = arguments

    def full(path):
        if step_of_index(path) == int(step):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with syncing(full):
        pretrain.main(rest)
