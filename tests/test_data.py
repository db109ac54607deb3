"""Readers, against small files made here in each set's own format; the real sets where LONGHORIZON_DATA says."""

import errno
import gzip
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from longhorizon import data
from longhorizon.data import cifar, digits, images, mnist, svhn
from longhorizon.data.error import DataError

RNG = np.random.default_rng(0)


def idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def make_mnist(root: Path, packed: bool) -> dict[str, np.ndarray]:
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    arrays = {}
    for name, count in (("train", 12), ("t10k", 7)):
        arrays[f"{name}-images-idx3-ubyte"] = RNG.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{name}-labels-idx1-ubyte"] = RNG.integers(0, 10, count, dtype=np.uint8)
    for name, array in arrays.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))
    return arrays


def make_cifar(root: Path, kind: int, protocol: int = 2, keys: type = str) -> dict[str, dict]:
    folder = root / ("cifar-10-batches-py" if kind == 10 else "cifar-100-python")
    folder.mkdir(parents=True)
    key = "labels" if kind == 10 else "fine_labels"
    contents = {}
    for name in (cifar.SOURCE_10 if kind == 10 else cifar.SOURCE_100).files:
        content = {
            "data": RNG.integers(0, 256, (5, 3072), dtype=np.uint8),
            key: [int(n) for n in RNG.integers(0, kind, 5)],
            "filenames": ["a.png"] * 5,
        }
        contents[name] = content
        written = content if keys is str else {k.encode(): v for k, v in content.items()}
        (folder / name).write_bytes(pickle.dumps(written, protocol))
    return contents


def make_svhn(root: Path, folder: str = "SVHN") -> dict[str, np.ndarray]:
    io = pytest.importorskip("scipy.io")
    (root / folder).mkdir(parents=True, exist_ok=True)
    arrays = {}
    for name, count in (("train", 6), ("test", 4)):
        X = RNG.integers(0, 256, (32, 32, 3, count), dtype=np.uint8)
        y = np.array([[10], [1], [9], [10], [5], [2]][:count], dtype=np.uint8)
        io.savemat(root / folder / f"{name}_32x32.mat", {"X": X, "y": y})
        arrays[f"{name}_X"], arrays[f"{name}_y"] = X, y
    return arrays


# Reading


@pytest.mark.parametrize("packed", [True, False])
def test_mnist_is_read(tmp_path, packed):
    made = make_mnist(tmp_path, packed)
    read = data.load("mnist", tmp_path, download=False)
    assert read.train_images.shape == (12, 1, 28, 28)
    assert np.array_equal(read.train_images[:, 0].numpy(), made["train-images-idx3-ubyte"])
    assert np.array_equal(read.test_labels.numpy(), made["t10k-labels-idx1-ubyte"])
    assert read.test_labels.dtype == torch.int64
    assert (read.classes, read.channels, read.size) == (10, 1, 28)


@pytest.mark.parametrize("kind", [10, 100])
@pytest.mark.parametrize(("protocol", "keys"), [(2, str), (2, bytes), (5, str)])
def test_cifar_is_read(tmp_path, kind, protocol, keys):
    made = make_cifar(tmp_path, kind, protocol, keys)
    read = data.load(f"CIFAR-{kind}", tmp_path, download=False)
    first = made["data_batch_1" if kind == 10 else "train"]
    assert len(read.train_images) == (25 if kind == 10 else 5)
    assert np.array_equal(read.train_images[:5].reshape(5, -1).numpy(), first["data"])
    assert read.train_labels[:5].tolist() == first["labels" if kind == 10 else "fine_labels"]
    assert read.classes == kind
    assert read.augment == data.Augment(pad=4, flip=True)


def test_cifar_channels_come_first(tmp_path):
    made = make_cifar(tmp_path, 10)
    green = made["test_batch"]["data"][0, 1024:2048].reshape(32, 32)  # the format: all red, all green, all blue
    assert np.array_equal(data.load("cifar10", tmp_path).test_images[0, 1].numpy(), green)


def test_cifar_is_found_where_others_put_it(tmp_path):
    make_cifar(tmp_path / "CIFAR10", 10)
    assert len(data.load("cifar10", tmp_path, download=False).test_images) == 5


@pytest.mark.parametrize("folder", ["SVHN", "."])
def test_svhn_is_read(tmp_path, folder):
    made = make_svhn(tmp_path, folder)
    read = data.load("svhn", tmp_path, download=False)
    assert read.train_labels.tolist() == [0, 1, 9, 0, 5, 2]  # 10 stands for the digit 0
    assert np.array_equal(read.train_images[3, 2].numpy(), made["train_X"][:, :, 2, 3])
    assert read.train_images.is_contiguous()


def test_digits_come_with_scikit_learn():
    pytest.importorskip("sklearn")
    read = data.load("digits")
    assert (len(read.train_images), len(read.test_images), read.size) == (1540, 257, 8)
    assert int(read.train_images.max()) == 240
    assert read.test_labels.bincount().min() > 15  # every digit is tested
    normal = data.to_device(read.train_images, read.train_labels, read.mean, read.std).batch(torch.arange(1540))[0]
    assert abs(float(normal.mean())) < 1e-5
    assert abs(float(normal.std()) - 1) < 1e-3


@pytest.mark.parametrize(("module", "call"), [("sklearn", digits.read), ("scipy", lambda: svhn.read_mat(Path("x")))])
def test_optional_packages_are_named(monkeypatch, module, call):
    for name in [n for n in sys.modules if n.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=r"longhorizon\[cli\]"):
        call()


def test_import_brings_neither_scipy_nor_sklearn():
    code = (
        "import sys; from longhorizon import data, models; print([m for m in ('scipy', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Broken files are named


def broken_mnist(tmp_path, name, change):
    make_mnist(tmp_path, packed=name.endswith(".gz"))
    path = tmp_path / "MNIST" / "raw" / name
    path.write_bytes(change(path.read_bytes()))
    return path


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("train-images-idx3-ubyte", lambda b: b[:-1], "promises 12 × 28 × 28 bytes and has 9407"),
        ("train-images-idx3-ubyte", lambda b: b + b"x", "has 9409"),
        ("t10k-labels-idx1-ubyte", lambda b: b[:6], "no idx file"),
        ("t10k-labels-idx1-ubyte", lambda b: b"<html>", "no idx file"),
        ("t10k-labels-idx1-ubyte", lambda b: b"", "no idx file"),
        ("train-labels-idx1-ubyte.gz", lambda b: b[:-5], "cannot be unpacked"),
        ("train-labels-idx1-ubyte.gz", lambda b: b[:15] + b"\xff\xff" + b[17:], "cannot be unpacked"),
        ("train-labels-idx1-ubyte.gz", lambda b: b"<html>", "cannot be unpacked"),
    ],
)
def test_broken_idx_files_are_named(tmp_path, name, change, says):
    path = broken_mnist(tmp_path, name, change)
    with pytest.raises(DataError, match=says) as error:
        data.load("mnist", tmp_path)
    assert str(path) in str(error.value)


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("changes", "blamed", "says"),
    [
        ({LABELS: np.zeros(7)}, LABELS, "holds 7 labels, and train-images-idx3-ubyte 12 images"),
        ({LABELS: np.full(12, 200)}, LABELS, "has the label 200: expected 0 to 9"),
        ({LABELS: np.zeros(0), IMAGES: np.zeros((0, 28, 28))}, IMAGES, "holds 0 × 28 × 28 pixels: expected some"),
        ({"t10k-images-idx3-ubyte": np.zeros((7, 32, 32))}, "t10k-images-idx3-ubyte", "images of 28 × 28"),
        ({IMAGES: np.zeros((12, 10, 10)), "t10k-images-idx3-ubyte": np.zeros((7, 10, 10))}, IMAGES, "12 × 10 × 10"),
    ],
)
def test_idx_files_with_other_content_are_named(tmp_path, changes, blamed, says):
    make_mnist(tmp_path, packed=False)
    for name, array in changes.items():
        (tmp_path / "MNIST" / "raw" / name).write_bytes(idx(array.astype(np.uint8)))
    with pytest.raises(DataError, match=says) as error:
        data.load("mnist", tmp_path)
    assert str(tmp_path / "MNIST" / "raw" / blamed) in str(error.value)


@pytest.mark.parametrize(
    ("name", "make"), [("mnist", lambda root: make_mnist(root, True)), ("cifar10", lambda root: make_cifar(root, 10))]
)
@pytest.mark.parametrize("verify", [False, True])
def test_a_file_that_may_not_be_read_is_not_called_broken(tmp_path, monkeypatch, name, make, verify):
    make(tmp_path)
    refuse_to(monkeypatch, "open" if verify else "read_bytes")
    with pytest.raises(DataError, match=r"(idx3-ubyte.gz|data_batch_1) cannot be read: Permission denied\.$") as error:
        data.load(name, tmp_path, verify=verify)
    assert "delete" not in str(error.value)


def test_a_mat_file_that_may_not_be_read_is_not_called_broken(tmp_path, monkeypatch):
    make_svhn(tmp_path)
    refuse_to(monkeypatch, "read_bytes")
    with pytest.raises(DataError, match=r"train_32x32.mat cannot be read: Permission denied\.$"):
        data.load("svhn", tmp_path)


def test_a_folder_that_may_not_be_searched_is_named(tmp_path, monkeypatch):
    make_mnist(tmp_path, packed=True)
    refuse_to(monkeypatch, "stat")
    with pytest.raises(DataError, match=r"MNIST/raw/.* cannot be read: Permission denied\.$"):
        data.load("mnist", tmp_path, download=False)


def refuse_to(monkeypatch, what: str) -> None:
    def refuse(self, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, what, refuse)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (lambda b: b[: len(b) // 2], "no CIFAR file"),
        (lambda b: b"", "no CIFAR file"),
        (lambda b: b"<html>", "no CIFAR file"),
        (lambda b: pickle.dumps([1, 2]), "'data' is NoneType"),
        (lambda b: pickle.dumps({"data": np.zeros((5, 3072)), "labels": [0] * 5}), "'data' is float64"),
        (lambda b: pickle.dumps({"data": np.zeros((5, 99), np.uint8), "labels": [0] * 5}), r"uint8 \(5, 99\)"),
        (lambda b: pickle.dumps({"data": np.zeros((5, 3072), np.uint8)}), "'labels' is NoneType"),
        (lambda b: pickle.dumps({"data": np.zeros((5, 3072), np.uint8), "labels": [0] * 4}), "4 labels"),
        (lambda b: pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}), "outside 0 to 9"),
        (lambda b: pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": ["cat"]}), "outside 0 to 9"),
    ],
)
def test_broken_cifar_files_are_named(tmp_path, content, says):
    make_cifar(tmp_path, 10)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(DataError, match=says) as error:
        data.load("cifar10", tmp_path)
    assert str(path) in str(error.value)


class Trap:
    def __init__(self, function, *arguments):
        self._made = function, arguments

    def __reduce__(self):
        return self._made


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("function", [os.system, eval, getattr, np.load, __import__], ids=lambda f: f.__name__)
def test_a_strangers_file_runs_no_code(tmp_path, protocol, function):
    make_cifar(tmp_path, 10)
    proof = tmp_path / "proof"
    trap = Trap(
        function, f"__import__('pathlib').Path({str(proof)!r}).touch()" if function is eval else f"touch {proof}"
    )
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    path.write_bytes(pickle.dumps({"data": trap, "labels": []}, protocol))
    with pytest.raises(DataError, match="it asks for"):
        data.load("cifar10", tmp_path)
    assert not proof.exists()


def test_the_trap_would_spring(tmp_path):
    proof = tmp_path / "proof"
    pickle.loads(pickle.dumps(Trap(os.system, f"touch {proof}")))
    assert proof.exists()


def test_bytes_are_decoded_as_latin1_only():
    import _codecs

    with pytest.raises(pickle.UnpicklingError, match="encoding 'zlib'"):
        cifar._latin1("x", "zlib")
    assert cifar._Unpickler.allowed["_codecs", "encode"]("é", "latin1") == _codecs.encode("é", "latin1")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: b[: len(b) // 2], "no MATLAB file"),
        (lambda b: b"", "no MATLAB file"),
        (lambda b: b"<html>" * 50, "no MATLAB file"),
    ],
)
def test_broken_mat_files_are_named(tmp_path, change, says):
    make_svhn(tmp_path)
    path = tmp_path / "SVHN" / "test_32x32.mat"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=says) as error:
        data.load("svhn", tmp_path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"X": np.zeros((32, 32, 3, 2), np.uint8)}, "lacks the variable y"),
        ({"y": np.zeros((2, 1))}, "lacks the variable X"),
        ({"X": np.zeros((32, 32, 3, 2)), "y": np.ones((2, 1))}, "X is float64"),
        ({"X": np.zeros((2, 32, 32, 3), np.uint8), "y": np.ones((2, 1))}, r"\(2, 32, 32, 3\)"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.ones((3, 1))}, "3 labels for 2 images"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.full((2, 1), 11)}, "1 to 10"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.full((2, 1), 0)}, "label 0: expected 1 to 10, 10 for the"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.full((2, 1), 1.5)}, "label 1.5"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.full((2, 1), np.nan)}, "label nan"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array(["a", "b"], object)}, "has the label"),
    ],
)
def test_mat_files_with_other_content_are_named(tmp_path, content, says):
    io = pytest.importorskip("scipy.io")
    io.savemat(tmp_path / "x.mat", content)
    with pytest.raises(DataError, match=says):
        svhn.read_mat(tmp_path / "x.mat")


# Where data is looked for


def test_the_root_is_argument_then_variable_then_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGHORIZON_DATA", str(tmp_path / "variable"))
    assert data.data_root(tmp_path / "argument") == tmp_path / "argument"
    assert data.data_root() == tmp_path / "variable"
    monkeypatch.delenv("LONGHORIZON_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data.data_root() == tmp_path / "cache" / "longhorizon" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data.data_root() == tmp_path / ".cache" / "longhorizon" / "data"


def test_the_variable_is_used(monkeypatch, tmp_path):
    make_mnist(tmp_path, packed=True)
    monkeypatch.setenv("LONGHORIZON_DATA", str(tmp_path))
    assert len(data.load("mnist", download=False).train_images) == 12


def test_missing_data_is_one_sentence(tmp_path):
    make_mnist(tmp_path, packed=True)
    (tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError) as error:
        data.load("mnist", tmp_path, download=False)
    message = str(error.value)
    assert f"{tmp_path / 'MNIST' / 'raw'} lacks t10k-labels-idx1-ubyte," in message
    assert "https://ossci-datasets.s3.amazonaws.com/mnist/t10k-labels-idx1-ubyte.gz" in message
    assert "train" not in message  # only what is missing
    assert "LONGHORIZON_DATA" in message
    assert "\n" not in message


def test_an_unknown_name_gets_a_hint():
    with pytest.raises(ValueError, match=r"unknown data set 'cifr10'\. Did you mean 'cifar10'"):
        data.load("cifr10")


def test_verify_compares_with_the_published_md5(tmp_path):
    make_mnist(tmp_path, packed=False)
    for load in (data.load, data.image_data, lambda name, **options: data.image_task(name, "lenet", **options)):
        with pytest.raises(DataError, match=r"train-images-idx3-ubyte has md5 .*, but the published file has 6bbc9ace"):
            load("mnist", root=tmp_path, verify=True)


# Images of one's own


def some_images(**changes):
    made = {
        "name": "mine",
        "train_images": torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8),
        "train_labels": torch.arange(6) % 4,
        "test_images": torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8),
        "test_labels": torch.zeros(2, dtype=torch.int64),
        "classes": 4,
    }
    return data.Images(**{**made, **changes})


def test_mean_and_std_are_computed():
    made = some_images()
    pixels = made.train_images.double() / 255
    assert torch.tensor(made.mean).allclose(pixels.mean((0, 2, 3)).float())
    assert torch.tensor(made.std).allclose(pixels.std((0, 2, 3), correction=0).float())
    assert some_images(mean=(0.5,) * 3, std=(0.1,) * 3).std == (0.1,) * 3


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"train_images": torch.zeros(6, 3, 8, 8)}, TypeError, "train_images is torch.float32"),
        ({"train_images": torch.zeros(6, 8, 8, dtype=torch.uint8)}, TypeError, r"shape \(6, 8, 8\)"),
        ({"test_labels": torch.zeros(3, dtype=torch.int64)}, TypeError, "test_labels is torch.int64 of shape"),
        ({"test_labels": torch.zeros(2)}, TypeError, "test_labels is torch.float32"),
        ({"test_labels": torch.tensor([0, 4])}, ValueError, "test_labels run from 0 to 4"),
        ({"test_images": torch.zeros(2, 3, 9, 9, dtype=torch.uint8)}, ValueError, "expected one shape"),
        ({"mean": (0.5,), "std": (0.1,)}, ValueError, "one each for 3 channels"),
        ({"train_images": torch.zeros(6, 3, 8, 8, dtype=torch.uint8)}, ValueError, "std above 0"),
        (
            {"train_images": torch.zeros(0, 3, 8, 8, dtype=torch.uint8), "train_labels": torch.zeros(0).long()},
            ValueError,
            "train_images is empty",
        ),
    ],
)
def test_images_that_do_not_fit_are_refused(changes, error, says):
    with pytest.raises(error, match=says):
        some_images(**changes)


# The real sets

REAL = {
    # name: training images, test images, how far the usual constants may be from the truth
    "mnist": (60_000, 10_000),
    "svhn": (73_257, 26_032),
    "cifar10": (50_000, 10_000),
    "cifar100": (50_000, 10_000),
}


@pytest.mark.slow
@pytest.mark.skipif("LONGHORIZON_DATA" not in os.environ, reason="LONGHORIZON_DATA is not set")
@pytest.mark.parametrize("name", REAL)
def test_real_sets(name):
    try:
        read = data.load(name, download=False)
    except DataError as error:
        if "is missing" in str(error):
            pytest.skip(str(error))
        raise
    assert (len(read.train_images), len(read.test_images)) == REAL[name]
    assert read.train_labels.unique().numel() == read.classes
    mean, std = images.channel_statistics(read.train_images)
    assert torch.tensor(mean).allclose(torch.tensor(read.mean), atol=1e-4)
    assert torch.tensor(std).allclose(torch.tensor(read.std), atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif("LONGHORIZON_DATA" not in os.environ, reason="LONGHORIZON_DATA is not set")
def test_real_mnist_has_the_md5_we_expect_packed_and_unpacked(tmp_path):
    folder = data.data_root() / "MNIST" / "raw"
    if not (folder / "train-images-idx3-ubyte.gz").is_file():
        pytest.skip("MNIST is not there")
    target = tmp_path / "MNIST" / "raw"
    target.mkdir(parents=True)
    for name in mnist.FILES:
        (target / name).write_bytes(gzip.decompress((folder / f"{name}.gz").read_bytes()))
    assert len(data.load("mnist", tmp_path, verify=True).train_images) == 60_000
