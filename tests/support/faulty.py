"""The trainer on a disk that is full in the write of a checkpoint: `main([step, *arguments of bertrain.pretrain])`."""

import errno

from bertrain import checkpoint, pretrain


def main(arguments):
    step, *rest = arguments
    write = checkpoint.write_file

    def faulty(path, content):
        if path.parent.name == f".step-{int(step):08d}.tmp" and path.name == checkpoint.INDEX:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, content)

    checkpoint.write_file = faulty
    pretrain.main(rest)
