"""Files that outlive a crash: a whole one is written aside and renamed, a journal is read up to its last whole line."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def write_aside(path: Path, content: bytes | str | Callable[[BinaryIO], object]) -> None:
    """Write a whole file: whoever reads it finds all of what was there or all of this, after a power cut too.

    Args:
        path: the file; until this one is whole, it is `NAME.part` beside it, which goes if it cannot be written.
        content: what is in it, or what writes that.
    """
    partial = path.with_name(path.name + ".part")
    try:
        with open(partial, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except Exception:
        with suppress(OSError):
            partial.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make what was renamed in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def whole_lines(path: Path, begin: int = 0) -> list[bytes]:
    """The lines of a file from a byte on, without one at its end that is torn; none if there is no file."""
    if not path.exists():
        return []
    with open(path, "rb") as file:
        file.seek(begin)
        return file.read().split(b"\n")[:-1]
