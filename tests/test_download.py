"""Downloads, against a file server on this machine that can also break off, lie, and be gone."""

import gzip
import hashlib
import io
import pickle
import socket
import struct
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from longhorizon import cli_data, console, data
from longhorizon.data import cifar, download, mnist, sets
from longhorizon.data.download import Remote, Source
from longhorizon.data.error import DataError

pytestmark = pytest.mark.usefixtures("no_proxy")


@pytest.fixture
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "TIMEOUT", 5.0)


@dataclass
class Server:
    """What is served, how, and what was asked."""

    files: dict[str, bytes] = field(default_factory=dict)
    break_after: list[int] = field(default_factory=list)  # bytes sent by the next answers before they break off
    ranges: bool = True  # whether it can go on in the middle
    lengths: bool = True  # whether it says how long a file is
    length: str = ""  # what it says instead
    reset: bool = False  # whether it breaks off by a reset
    fail_with: list[int] = field(default_factory=list)  # status of the next answers
    delay: float = 0.0  # seconds before it answers
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # path, range
    url: str = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        name, wanted = request.path.lstrip("/"), request.headers.get("Range")
        self.asked.append((name, wanted))
        time.sleep(self.delay)
        if name not in self.files or self.fail_with:
            request.send_error(self.fail_with.pop(0) if self.fail_with else 404)
            return
        content, start = self.files[name], 0
        if wanted and self.ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                request.send_error(416)
                return
        body = content[start:]
        request.send_response(206 if wanted and self.ranges else 200)
        if self.lengths:
            request.send_header("Content-Length", self.length or str(len(body)))
        request.end_headers()
        broken = bool(self.break_after)
        if broken:
            body = body[: self.break_after.pop(0)]
        request.wfile.write(body)
        if broken and self.reset:
            time.sleep(0.2)  # until it has arrived; a reset throws away what has not
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.wfile.close()
            request.rfile.close()
            request.connection.close()


@pytest.fixture
def server():
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            state.answer(self)

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, args=(0.02,))
    thread.start()
    yield state
    http.shutdown()
    thread.join()
    http.server_close()


CONTENT = bytes(range(256)) * 5000  # more than one chunk


def remote_of(server: Server, content: bytes = CONTENT, name: str = "file.bin") -> Remote:
    server.files.setdefault(name, content)
    return Remote((f"{server.url}/{name}",), name, hashlib.md5(content).hexdigest(), (name,))


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.suffix in (".part", ".lock"))


# One file


def test_a_file_arrives_with_progress(server, tmp_path):
    seen = []
    path = download.fetch(remote_of(server), tmp_path / "new", lambda *args: seen.append(args))
    assert path.read_bytes() == CONTENT
    assert leftovers(tmp_path) == []
    assert len(seen) > 1
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1] == ("file.bin", len(CONTENT), len(CONTENT))


def test_a_length_may_be_unknown(server, tmp_path):
    server.lengths = False
    seen = []
    assert download.fetch(remote_of(server), tmp_path, lambda *args: seen.append(args)).read_bytes() == CONTENT
    assert seen[-1] == ("file.bin", len(CONTENT), None)


def test_a_broken_connection_is_resumed(server, tmp_path):
    server.break_after = [1000, 500]
    assert download.fetch(remote_of(server), tmp_path).read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked] == [None, "bytes=1000-", "bytes=1500-"]


def test_a_broken_connection_is_resumed_by_the_next_call(server, tmp_path):
    remote = remote_of(server)
    server.break_after = [1000, 500, 250]
    with pytest.raises(OSError, match=f"broke after 1750 of {len(CONTENT)} bytes; the next call goes on"):
        download.fetch(remote, tmp_path)
    assert not (tmp_path / "file.bin").exists()  # never half of it
    assert leftovers(tmp_path) == ["file.bin.part"]
    assert download.fetch(remote, tmp_path).read_bytes() == CONTENT
    assert server.asked[-1] == ("file.bin", "bytes=1750-")
    assert leftovers(tmp_path) == []


def test_what_came_before_a_reset_is_kept(server, tmp_path):
    server.break_after, server.reset = [100_000], True
    assert download.fetch(remote_of(server), tmp_path).read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked] == [None, "bytes=100000-"]


def test_an_address_that_gave_nothing_is_asked_again(server, tmp_path):
    remote = remote_of(server)
    server.break_after, server.reset = [0], True
    assert download.fetch(remote, tmp_path / "reset").read_bytes() == CONTENT
    server.fail_with = [503]
    assert download.fetch(remote, tmp_path / "busy").read_bytes() == CONTENT
    server.fail_with = [503, 503]
    with pytest.raises(OSError, match="503"):
        download.fetch(remote, tmp_path / "busier")
    assert len(server.asked) == 6
    assert server.fail_with == []


@pytest.mark.parametrize("length", ["many", "-5", ""])
def test_a_length_may_be_nonsense(server, tmp_path, length):
    server.length = length
    assert download.fetch(remote_of(server), tmp_path).read_bytes() == CONTENT


def test_a_server_without_ranges_begins_again(server, tmp_path):
    server.ranges, server.break_after = False, [1000]
    assert download.fetch(remote_of(server), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("left", [b"something else", b"x" * (len(CONTENT) + 1)], ids=["other", "longer"])
def test_what_an_earlier_call_left_may_be_useless(server, tmp_path, left):
    (tmp_path / "file.bin.part").write_bytes(left)
    assert download.fetch(remote_of(server), tmp_path).read_bytes() == CONTENT


def test_a_complete_part_needs_no_server(tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT)  # killed before it could be renamed
    remote = Remote(("http://127.0.0.1:9/",), "file.bin", hashlib.md5(CONTENT).hexdigest(), ())
    assert download.fetch(remote, tmp_path).read_bytes() == CONTENT


def test_a_wrong_md5_is_named_and_leaves_nothing(server, tmp_path):
    remote = replace(remote_of(server), md5="0" * 32)
    with pytest.raises(OSError, match=f"file.bin: what came has md5 {hashlib.md5(CONTENT).hexdigest()}, expected 0000"):
        download.fetch(remote, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(server.asked) == 1


def test_mirrors_are_tried_in_turn(server, tmp_path):
    remote = remote_of(server)
    server.files["bad"] = b"<html>"
    urls = ("http://127.0.0.1:9/x", f"{server.url}/none", f"{server.url}/bad", *remote.urls)
    assert download.fetch(replace(remote, urls=urls), tmp_path).read_bytes() == CONTENT
    with pytest.raises(OSError, match=r"127\.0\.0\.1:9/x: .*refused.*; .*none: .*404.*; .*bad: what came has md5"):
        download.fetch(replace(remote, urls=urls[:-1], name="other"), tmp_path)


# A whole set


def serve_mnist(server: Server, monkeypatch) -> Source:
    """MNIST, four files of it, from our server."""
    remotes = []
    for name in mnist.FILES:
        count = 6 if name.startswith("train") else 4
        shape = (count, 28, 28) if "images" in name else (count,)
        array = (np.arange(np.prod(shape)) % 10).astype(np.uint8)
        header = bytes((0, 0, 8, len(shape))) + b"".join(n.to_bytes(4, "big") for n in shape)
        packed = gzip.compress(header + array.tobytes(), mtime=0)
        remotes.append(replace(remote_of(server, packed, f"{name}.gz"), provides=(name,)))
    source = replace(mnist.SOURCE, remotes=tuple(remotes), md5={r.name: r.md5 for r in remotes})
    monkeypatch.setitem(sets._ON_DISK, "mnist", (source, mnist.read))
    return source


def serve_cifar(server: Server, monkeypatch, extra: dict[str, bytes] | None = None, leave_out: str = "") -> Source:
    """CIFAR-10, an archive of six files, from our server."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as tar:
        for name in cifar.SOURCE_10.files:
            content = {"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2]}
            content["data"][0, 0] = 1
            members = {f"cifar-10-batches-py/{name}": pickle.dumps(content, 2)} if name != leave_out else {}
            for path, body in (members | (extra or {})).items():
                info = tarfile.TarInfo(path)
                info.size = len(body)
                tar.addfile(info, io.BytesIO(body))
    archive = cifar.SOURCE_10.remotes[0]
    remote = replace(
        remote_of(server, written.getvalue(), archive.name), provides=archive.provides, is_archive=archive.is_archive
    )
    source = replace(cifar.SOURCE_10, remotes=(remote,))
    monkeypatch.setitem(sets._ON_DISK, "cifar10", (source, cifar.read_10))
    return source


def test_a_missing_set_is_downloaded_once(server, tmp_path, monkeypatch):
    serve_mnist(server, monkeypatch)
    seen = []
    read = data.load("mnist", tmp_path / "root", progress=lambda *args: seen.append(args))
    assert (len(read.train_images), len(read.test_images)) == (6, 4)
    assert {name for name, _, _ in seen} == {f"{name}.gz" for name in mnist.FILES}
    assert len(server.asked) == 4
    assert len(data.load("mnist", tmp_path / "root", verify=True).train_images) == 6
    assert len(server.asked) == 4
    assert leftovers(tmp_path) == []


def test_only_what_is_missing_is_downloaded(server, tmp_path, monkeypatch):
    serve_mnist(server, monkeypatch)
    data.load("mnist", tmp_path)
    server.asked.clear()
    (tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz").unlink()
    data.load("mnist", tmp_path)
    assert [name for name, _ in server.asked] == ["t10k-labels-idx1-ubyte.gz"]


def test_an_archive_is_downloaded_and_unpacked(server, tmp_path, monkeypatch):
    serve_cifar(server, monkeypatch, extra={"cifar-10-batches-py/other": b"?", "../outside": b"?", "/absolute": b"?"})
    read = data.load("cifar10", tmp_path / "root")
    assert (len(read.train_images), len(read.test_images)) == (10, 2)
    everything = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert everything == sorted(f"root/cifar-10-batches-py/{name}" for name in cifar.SOURCE_10.files)  # nothing else


def test_an_archive_that_is_there_is_not_downloaded(server, tmp_path, monkeypatch):
    source = serve_cifar(server, monkeypatch)
    name = source.remotes[0].name
    (tmp_path / name).write_bytes(server.files[name])  # killed while it was unpacked
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1.part").write_bytes(b"half")
    assert len(data.load("cifar10", tmp_path).train_images) == 10
    assert server.asked == []
    assert leftovers(tmp_path) == []


def test_an_archive_that_lacks_a_file_is_named(server, tmp_path, monkeypatch):
    serve_cifar(server, monkeypatch, leave_out="data_batch_2")
    with pytest.raises(DataError, match=r"cifar-10-python\.tar\.gz lacks cifar-10-batches-py/data_batch_2"):
        data.load("cifar10", tmp_path)


@pytest.mark.parametrize("content", [b"<html>", gzip.compress(CONTENT), b""], ids=["page", "no tar", "empty"])
def test_an_archive_that_is_none_is_named(tmp_path, content):
    (tmp_path / "x.tar.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.tar\.gz (cannot be unpacked|lacks)"):
        download.unpack(tmp_path / "x.tar.gz", ["a"], tmp_path / "folder")


def test_a_truncated_archive_is_named(server, tmp_path, monkeypatch):
    source = serve_cifar(server, monkeypatch)
    content = server.files[source.remotes[0].name]
    (tmp_path / "x.tar.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"x\.tar\.gz cannot be unpacked"):
        download.unpack(tmp_path / "x.tar.gz", cifar.SOURCE_10.files, tmp_path / "cifar-10-batches-py")


def test_a_wrong_md5_of_a_set_is_one_sentence(server, tmp_path, monkeypatch):
    source = serve_cifar(server, monkeypatch)
    server.files[source.remotes[0].name] = b"<html>not here</html>"
    with pytest.raises(DataError, match=r"CIFAR-10 is missing: .* what came has md5 .*, expected") as error:
        data.load("cifar10", tmp_path)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "cifar-10-batches-py").exists()


def test_no_network_is_one_sentence(tmp_path, monkeypatch):
    remote = replace(cifar.SOURCE_10.remotes[0], urls=("http://127.0.0.1:9/cifar-10-python.tar.gz",))
    monkeypatch.setitem(sets._ON_DISK, "cifar10", (replace(cifar.SOURCE_10, remotes=(remote,)), cifar.read_10))
    with pytest.raises(DataError) as error:
        data.load("cifar10", tmp_path)
    message = str(error.value)
    assert message.startswith(f"CIFAR-10 is missing: {tmp_path / 'cifar-10-batches-py'} lacks data_batch_1, ")
    assert "refused" in message
    assert "fetch http://127.0.0.1:9/cifar-10-python.tar.gz and unpack it" in message
    assert "LONGHORIZON_DATA" in message
    assert "\n" not in message
    assert leftovers(tmp_path) == []


def test_files_that_came_before_the_failure_are_not_called_missing(server, tmp_path, monkeypatch):
    serve_mnist(server, monkeypatch)
    del server.files["t10k-images-idx3-ubyte.gz"]
    with pytest.raises(
        data.MissingDataError, match="lacks t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte, and"
    ) as error:
        data.load("mnist", tmp_path)
    assert "train-images" not in str(error.value)


def test_a_root_that_cannot_be_made_is_named(server, tmp_path, monkeypatch):
    serve_mnist(server, monkeypatch)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"MNIST is missing: .*Not a directory"):
        data.load("mnist", tmp_path / "file" / "root")


def obtain_it(source: Source, root: Path) -> int:
    return len(list(download.obtain(source, root).iterdir()))


def test_several_at_once_download_once(server, tmp_path, monkeypatch):
    source = serve_cifar(server, monkeypatch)
    server.delay = 0.1
    with ThreadPoolExecutor(4) as pool:  # the lock belongs to an open file: between threads as between processes
        done = [pool.submit(obtain_it, source, tmp_path) for _ in range(4)]
        assert [d.result() for d in done] == [6] * 4
    assert len(server.asked) == 1
    assert leftovers(tmp_path) == []


def test_a_lock_may_vanish_while_it_is_looked_at(tmp_path, monkeypatch):
    lock, stat, seen = tmp_path / "lock", Path.stat, []

    def vanishing(self, **options):
        if self == lock and not seen:
            seen.append(self)
            lock.unlink()  # by the process that held it
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", vanishing)
    with download._alone(lock):
        assert lock.is_file()
    assert seen
    assert not lock.exists()


# What a person sees


def test_lines_when_not_a_terminal(server, tmp_path, monkeypatch, capsys):
    serve_mnist(server, monkeypatch)
    with console.arriving() as progress:
        data.load("mnist", tmp_path, progress=progress)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{name}.gz" for name in mnist.FILES]
    assert all(line.endswith(" kB") for line in lines)


def test_a_long_download_says_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr(console.ArrivingLines, "every", 0.0)
    with console.arriving() as progress:
        progress("a.gz", 500_000, 12_000_000)
        progress("a.gz", 2_500_000, None)
    assert capsys.readouterr().err.splitlines() == ["a.gz: 500.0 kB of 12.0 MB", "a.gz: 2.5 MB"]


def test_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(console.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with console.arriving() as progress:
        progress("a.gz", 1_000_000, 2_000_000)
        progress("a.gz", 2_000_000, 2_000_000)
    said = capsys.readouterr().err
    assert "a.gz" in said
    assert "━" in said
    assert "2.0/2.0 MB" in said


# The command


@pytest.fixture
def command(tmp_path):
    def call(*words):
        done = CliRunner().invoke(cli_data.data, [*words, "--data-root", str(tmp_path)])
        return done.exit_code, done.output

    return call


def test_the_command_downloads_and_verifies(server, tmp_path, monkeypatch, command):
    serve_mnist(server, monkeypatch)
    code, said = command("MNIST")
    assert code == 1
    assert "--download would fetch it" in said
    assert "--data-root" in said
    code, said = command("MNIST", "--download")
    assert code == 0
    assert "t10k-labels-idx1-ubyte.gz: " in said  # progress
    assert said.endswith("mnist: 6 training and 4 test images\n")
    code, said = command("mnist", "--verify")
    assert code == 0
    assert "md5 of train-images-idx3-ubyte.gz: " in said
    assert said.endswith("mnist: 6 training and 4 test images, as published\n")
    path = tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), 1))
    assert command("mnist")[0] == 0
    for words in (["mnist", "--verify"], ["--verify"]):
        code, said = command(*words)
        assert code == 1
        assert f"mnist: {path} has md5 " in said


def test_the_command_without_a_name_is_content_with_what_is_there(command):
    code, said = command()
    assert code == 0
    assert "digits: 1540 training" in said
    assert said.count(" is missing: ") == 4
    assert said.count(";\n    fetch http") == said.count(";\n    or say where they are ") == 4


# What is in the package


@pytest.mark.parametrize("source", [source for source, _ in sets._ON_DISK.values()], ids=lambda s: s.title)
def test_every_file_has_an_address_and_an_md5(source):
    assert {name for remote in source.remotes for name in remote.provides} == set(source.files)
    for remote in source.remotes:
        assert len(remote.md5) == 32
        assert all(url.startswith("http") and url.endswith(remote.name) for url in remote.urls)
    assert all(name in source.md5 for name in source.files)
