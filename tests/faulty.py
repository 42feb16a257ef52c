"""The trainer with a fault in the write of a checkpoint: `main([fault, step, *arguments of bertrain.pretrain])`."""

import errno
import os
import signal

from bertrain import checkpoint, pretrain


def main(arguments):
    fault, step, *rest = arguments
    write = checkpoint.write_file

    def faulty(path, content):
        if path.parent.name == f".step-{int(step):08d}.tmp" and path.name == checkpoint.INDEX:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, content)

    checkpoint.write_file = faulty
    pretrain.main(rest)
