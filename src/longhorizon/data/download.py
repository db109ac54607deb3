"""Getting the files of a data set: finding them on disk, or downloading them so that no half of one is ever seen.

A file arrives as `NAME.part`, goes on from there if the connection broke, is checked by md5, and is renamed when it
is complete. A second process that wants the same data set waits for the first.
"""

import fcntl
import hashlib
import http.client
import os
import shutil
import stat
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from longhorizon.data.error import DataError, MissingDataError
from longhorizon.data.root import VARIABLE
from longhorizon.files import sync_folder, write_aside

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in all if the server says

TIMEOUT = 30.0  # seconds without a byte
ATTEMPTS = 3  # at one address, each going on from where the last one ended
CHUNK = 1 << 20
TOLD_EVERY = 1 << 18  # bytes between two calls of `progress`


@dataclass(frozen=True)
class Remote:
    """A file to be had from elsewhere."""

    urls: tuple[str, ...]  # tried in turn
    name: str
    md5: str
    provides: tuple[str, ...]  # names in `Source.files`
    is_archive: bool = False  # a tar file whose members `provides` names


@dataclass(frozen=True)
class Source:
    """The files of a data set: where they lie under the data root, and where they come from."""

    title: str
    folders: tuple[str, ...]  # under the root, by preference
    files: tuple[str, ...]  # a file may also lie there as NAME.gz
    remotes: tuple[Remote, ...]
    md5: Mapping[str, str]  # of the files as they lie on disk


def find(folder: Path, name: str) -> Path:
    """The file on disk, compressed or not (its plain path if it is missing)."""
    packed = folder / f"{name}.gz"
    return packed if _is_file(packed) and not _is_file(folder / name) else folder / name


def missing(source: Source, folder: Path) -> list[str]:
    """The files that a folder lacks.

    Raises:
        DataError: if the folder may not be searched.
    """
    return [name for name in source.files if not _is_file(find(folder, name))]


def content_of(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        DataError: if it may not or cannot be read, which says nothing about what is in it.
    """
    with _readable(path):
        return path.read_bytes()


def locate(source: Source, root: Path) -> Path:
    """The folder that holds most of a data set: the first one if none holds anything."""
    return min((root / folder for folder in source.folders), key=lambda folder: len(missing(source, folder)))


def obtain(
    source: Source, root: Path, download: bool = True, verify: bool = False, progress: Progress | None = None
) -> Path:
    """The folder with all files of a data set, downloading those that are missing.

    Args:
        source: what is wanted.
        root: the data root.
        download: whether missing files may be downloaded.
        verify: check the md5 of files that were there already.
        progress: called with (file name, bytes so far, bytes in all or None) while something is downloaded, and with
            "md5 of " and the name while it is checked.

    Raises:
        MissingDataError: naming what is missing, where it was looked for, and how to get it.
        DataError: naming the file that is broken, or cannot be read.
    """
    folder = locate(source, root)
    lacking = missing(source, folder)
    if lacking and not download:
        raise MissingDataError(_sentence(source, folder, "download=True or --download would fetch it"))
    if lacking:
        try:
            root.mkdir(parents=True, exist_ok=True)
            with _alone(root / f".{source.title}.lock"):
                for remote in source.remotes:
                    # asked again each time: another process may have been faster
                    if set(remote.provides) & set(missing(source, folder)):
                        _get(remote, folder, progress)
        except OSError as error:
            raise MissingDataError(_sentence(source, folder, str(error))) from None
    if verify:
        for name in source.files:
            check_md5(find(folder, name), source.md5, progress)
    return folder


def check_md5(path: Path, expected: Mapping[str, str], progress: Progress | None = None) -> None:
    """Compare a file with what was published.

    Raises:
        DataError: if they differ.
    """
    with _readable(path):
        got = md5_of(path, progress)
    if got != expected[path.name]:
        raise DataError(
            f"{path} has md5 {got}, but the published file has {expected[path.name]}; delete it and it will be "
            "downloaded again, or leave out `verify` if it is meant to differ."
        )


def fetch(remote: Remote, folder: Path, progress: Progress | None = None) -> Path:
    """Download one file into a folder.

    Raises:
        OSError: if no address gave it, saying why for each.
    """
    path, part = folder / remote.name, folder / f"{remote.name}.part"
    folder.mkdir(parents=True, exist_ok=True)
    if path.is_file() and md5_of(path) == remote.md5:  # an archive that could not be unpacked the last time
        return path
    reasons = []
    for url in remote.urls:
        try:
            _complete(url, part, remote, progress)
        except (OSError, http.client.HTTPException) as error:
            reasons.append(f"{url}: {_reason(error)}")
            continue
        os.replace(part, path)
        sync_folder(folder)
        return path
    raise OSError("; ".join(reasons))


def md5_of(path: Path, progress: Progress | None = None) -> str:
    """The md5 of a file, in hexadecimal."""
    digest, done = hashlib.md5(), 0
    with path.open("rb") as file:
        total = os.fstat(file.fileno()).st_size
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(f"md5 of {path.name}", done, total)
    return digest.hexdigest()


def _get(remote: Remote, folder: Path, progress: Progress | None) -> None:
    if not remote.is_archive:
        fetch(remote, folder, progress)
        return
    archive = fetch(remote, folder.parent, progress)  # its members lie in a folder of their own
    unpack(archive, remote.provides, folder)
    archive.unlink(missing_ok=True)


def unpack(archive: Path, names: Sequence[str], folder: Path) -> None:
    """Take the named files, and nothing else, out of a tar archive into a folder.

    Raises:
        DataError: if the archive is broken or lacks one of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {f"{folder.name}/{name}": name for name in names}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = wanted.get(member.name.removeprefix("./"))
                content = tar.extractfile(member) if name is not None and member.isfile() else None
                if name is None or content is None:
                    continue
                write_aside(folder / name, partial(shutil.copyfileobj, content, length=CHUNK))
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"{archive} cannot be unpacked ({error}); delete it and it will be downloaded again.") from None
    sync_folder(folder)
    lacking = [name for name in names if not (folder / name).is_file()]
    if lacking:
        raise DataError(f"{archive} lacks {folder.name}/{lacking[0]}; delete it and it will be downloaded again.")


def _complete(url: str, part: Path, remote: Remote, progress: Progress | None) -> None:
    """Bring `part` to its full and right content."""
    if part.is_file() and part.stat().st_size > 0 and md5_of(part) == remote.md5:
        return
    for _ in range(2):  # what an earlier call left behind may be of another file: then once more from nothing
        resumed = part.is_file() and part.stat().st_size > 0
        _receive(url, part, remote.name, progress)
        got = md5_of(part)
        if got == remote.md5:
            return
        part.unlink()
        if not resumed:
            break
    raise OSError(f"what came has md5 {got}, expected {remote.md5}")


def _receive(url: str, part: Path, name: str, progress: Progress | None) -> None:
    """Append to `part` until the server has no more to send."""
    have, total = 0, None
    for attempt in range(1, ATTEMPTS + 1):
        have = part.stat().st_size if part.is_file() else 0
        request = urllib.request.Request(url, headers={"User-Agent": "longhorizon"})
        if have:
            request.add_header("Range", f"bytes={have}-")
        try:
            have, total = _transfer(request, part, have, name, progress)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416 and have:  # what we have is longer than the file
                part.unlink()
                continue
            if error.code < 500 or attempt > 1:
                raise
            continue
        except (OSError, http.client.HTTPException):
            now = part.stat().st_size if part.is_file() else 0
            if attempt == ATTEMPTS or (now == have and attempt > 1):  # no use going on if nothing comes
                raise
            continue
        if total is None or have == total:
            return
    raise OSError(f"the connection broke after {have} of {total} bytes; the next call goes on from there")


def _transfer(
    request: urllib.request.Request, part: Path, have: int, name: str, progress: Progress | None
) -> tuple[int, int | None]:
    """One request's bytes; returns how many there are now, and how many there should be."""
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        goes_on = have > 0 and response.status == 206
        have = have if goes_on else 0
        length = response.headers.get("Content-Length", "")
        total = have + int(length) if length.isdecimal() else None  # what is no number says nothing
        told = have
        with part.open("ab" if goes_on else "wb") as file:
            while chunk := response.read1(CHUNK):  # what is there: a full chunk would be lost with the connection
                file.write(chunk)
                have += len(chunk)
                if progress is not None and (have - told >= TOLD_EVERY or have == total):
                    progress(name, have, total)
                    told = have
            if progress is not None and told < have:
                progress(name, have, total)
            file.flush()
            os.fsync(file.fileno())
    return have, total


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait until no other process downloads the same data set."""
    while True:
        file = lock.open("w")
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                break
        except FileNotFoundError:
            pass
        file.close()  # whoever held it has removed it: take the next one
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        file.close()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None


def _is_file(path: Path) -> bool:
    with _readable(path):  # not Path.is_file: whether it sees that a folder may not be searched depends on Python
        try:
            return stat.S_ISREG(path.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.URLError) and not isinstance(error, urllib.error.HTTPError):
        return str(error.reason)
    return str(error) or type(error).__name__


def _sentence(source: Source, folder: Path, reason: str) -> str:
    lacking = missing(source, folder)  # now: part of it may have come
    if not lacking:
        return f"{source.title} in {folder} could not be completed: {reason}"
    needed = [remote for remote in source.remotes if set(remote.provides) & set(lacking)]
    urls = ", ".join(remote.urls[0] for remote in needed)
    unpacked = " and unpack it" if any(remote.is_archive for remote in needed) else ""
    return (
        f"{source.title} is missing: {folder} lacks {', '.join(lacking)}, and it was not downloaded ({reason}); "
        f"fetch {urls}{unpacked} so that they lie there; or say where they are with the environment variable "
        f"{VARIABLE} (or `root=`, on the command line --data-root)."
    )
