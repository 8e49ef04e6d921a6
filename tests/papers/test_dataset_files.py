"""Files of MNIST and CIFAR-10: read, refused by name, downloaded where they are absent."""

import io
import os
import sys
import tarfile
import types
from pathlib import Path

import pytest
import torch

from autosym.papers import datasets
from files import idx, mnist_parts, write_cifar10, write_mnist

REAL = os.environ.get("AUTOSYM_DATA")


# ---- MNIST


def assert_is(pairs, tensors):
    for got, expected in zip((*pairs[0], *pairs[1]), tensors, strict=True):
        assert got.dtype == (torch.int64 if got.ndim == 1 else torch.uint8)
        assert torch.equal(got, expected.to(got.dtype))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", [".", "MNIST/raw", "mnist"])
def test_mnist_is_read_from_its_files(tmp_path, place, zipped):
    parts = mnist_parts()
    write_mnist(tmp_path / place, parts, zipped)
    assert_is(datasets.mnist(tmp_path, download=False), parts.values())


def test_the_folder_is_the_argument_or_the_variable_or_the_cache(tmp_path, monkeypatch):
    parts = [mnist_parts() for _ in range(3)]
    for part, folder in zip(parts, ("argument", "variable", "home/.cache/autosym"), strict=True):
        write_mnist(tmp_path / folder, part)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AUTOSYM_DATA", str(tmp_path / "variable"))
    assert_is(datasets.mnist(tmp_path / "argument"), parts[0].values())
    assert_is(datasets.mnist(str(tmp_path / "argument")), parts[0].values())
    assert_is(datasets.mnist(), parts[1].values())
    monkeypatch.delenv("AUTOSYM_DATA")
    assert_is(datasets.mnist(), parts[2].values())


IMAGES, LABELS, *_ = datasets.MNIST_MD5
FAULTS = {
    "magic": (IMAGES, lambda t: idx(t, magic=0x801), "magic number 0x00000801"),
    "float type": (IMAGES, lambda t: idx(t, magic=0xD03), "magic number"),
    "empty": (IMAGES, lambda t: b"", "magic number"),
    "size": (IMAGES, lambda t: idx(t[:, :, :27]), r"\(5, 28, 27\)"),
    "no image": (IMAGES, lambda t: idx(t[:0]), r"\(0, 28, 28\)"),
    "header cut": (IMAGES, lambda t: idx(t)[:14], "is not the shape"),
    "data cut": (IMAGES, lambda t: idx(t)[:-1], "3919 bytes of data where 3920"),
    "data to spare": (IMAGES, lambda t: idx(t) + b"0", "more bytes of data where 3920"),
    "a header that asks for terabytes": (IMAGES, lambda t: idx(t, count=2**32 - 1), r"\(4294967295, 28, 28\)"),
    "labels in the images' place": (LABELS, lambda t: idx(torch.zeros(5, 28, 28, dtype=torch.uint8)), "magic number"),
    "label": (LABELS, lambda t: idx(t * 0 + 10), "label 10 is not one of 0 to 9"),
    "a label too few": (LABELS, lambda t: idx(t[1:]), "4 labels for the 5 images"),
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_idx_file_is_named(tmp_path, fault, zipped):
    name, spoil, message = FAULTS[fault]
    parts = mnist_parts()
    write_mnist(tmp_path, parts, zipped, **{name: spoil(parts[name])})
    with pytest.raises(ValueError, match=message) as error:
        datasets.mnist(tmp_path, download=False)
    assert str(tmp_path / name.removesuffix(".gz")) in str(error.value)


@pytest.mark.parametrize(
    "spoil", [lambda b: b[:-20], lambda b: b[:-8] + b"\0" * 8, lambda b: b"none", lambda b: b[:10] + b"\xff" * 20]
)
def test_a_broken_gzip_file_is_named(tmp_path, spoil):
    write_mnist(tmp_path, mnist_parts())
    (tmp_path / IMAGES).write_bytes(spoil((tmp_path / IMAGES).read_bytes()))
    with pytest.raises(ValueError, match=f"{IMAGES}: not a whole gzip file"):
        datasets.mnist(tmp_path, download=False)


# Files: CIFAR-10


@pytest.mark.parametrize("place", [".", "cifar-10-batches-bin", "cifar10"])
def test_cifar10_is_read_from_its_files(tmp_path, place):
    expected = write_cifar10(tmp_path / place)
    assert_is(datasets.cifar10(tmp_path, download=False), expected)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda b: b[:-1], "9218 bytes are not 1 to 10000 images of 3073"),
        (lambda b: b + b"0", "9220 bytes are not"),
        (lambda b: b"", "0 bytes are not"),
        (lambda b: b"\x0a" + b[1:], "label 10 is not one of 0 to 9"),
    ],
)
def test_a_wrong_cifar10_file_is_named(tmp_path, spoil, message):
    write_cifar10(tmp_path)
    path = tmp_path / "data_batch_2.bin"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match=f"data_batch_2.bin: {message}"):
        datasets.cifar10(tmp_path, download=False)


def test_a_cifar10_file_of_too_many_images_is_not_read(tmp_path):
    write_cifar10(tmp_path)
    with (tmp_path / "test_batch.bin").open("wb") as file:
        file.truncate(10_001 * 3073)  # sparse: takes no room
    with pytest.raises(ValueError, match=r"test_batch\.bin: 30733073 bytes"):
        datasets.cifar10(tmp_path, download=False)


@pytest.mark.parametrize("place", ["cifar-10-batches-py", "."])
def test_pickles_are_refused_and_never_opened(tmp_path, place):
    """The python version of CIFAR-10, with a pickle that runs a command, as itself or under the names of the binary one."""
    (tmp_path / place).mkdir(exist_ok=True)
    attack = f"cos\nsystem\n(S'touch {tmp_path}/executed'\ntR.".encode()
    for name in datasets.CIFAR10_FILES:
        (tmp_path / place / (name if place == "." else name.removesuffix(".bin"))).write_bytes(attack)
    with pytest.raises((FileNotFoundError, ValueError), match=r"take the binary version|bytes are not"):
        datasets.cifar10(tmp_path, download=False)
    assert not (tmp_path / "executed").exists()
    os.system(attack.split(b"'")[1].decode())
    assert (tmp_path / "executed").exists(), "the attack would have been seen"


# Downloads


def pooch_of(monkeypatch, retrieve):
    module = types.ModuleType("pooch")
    module.retrieve = retrieve
    monkeypatch.setitem(sys.modules, "pooch", module)


@pytest.mark.parametrize(
    ("read", "name"), [(datasets.mnist, "t10k-labels-idx1-ubyte.gz"), (datasets.cifar10, "test_batch.bin")]
)
def test_missing_files_say_what_was_looked_for_where_and_what_to_do(tmp_path, monkeypatch, read, name):
    def offline(*_, **__):
        raise ConnectionError("no route to host")

    def message(**options):
        with pytest.raises(FileNotFoundError) as error:
            read(tmp_path / "none", **options)
        text = str(error.value)
        assert all(part in text for part in (name, str(tmp_path / "none"), "AUTOSYM_DATA", "--data-dir")), text
        return text

    assert "download=False" in message(download=False)
    pooch_of(monkeypatch, offline)
    assert "the download failed: no route to host" in message()
    monkeypatch.setitem(sys.modules, "pooch", None)
    assert "pip install 'autosym[data]'" in message()
    assert ("take the binary version" in message()) == (read is datasets.cifar10)


def test_only_files_that_are_missing_are_named_and_downloaded(tmp_path, monkeypatch):
    parts = mnist_parts()
    write_mnist(tmp_path / "mirror", parts)
    write_mnist(tmp_path / "here", parts)
    (tmp_path / "here" / LABELS).unlink()
    with pytest.raises(FileNotFoundError) as error:
        datasets.mnist(tmp_path / "here", download=False)
    assert [name in str(error.value) for name in parts] == [False, True, False, False]
    asked = []

    def retrieve(url, known_hash, fname, path):
        asked.append((url, known_hash))
        path.mkdir(parents=True)
        (path / fname).write_bytes((tmp_path / "mirror" / fname).read_bytes())
        return str(path / fname)

    pooch_of(monkeypatch, retrieve)
    assert_is(datasets.mnist(tmp_path / "here"), parts.values())
    assert asked == [(f"https://ossci-datasets.s3.amazonaws.com/mnist/{LABELS}", "md5:d53e105ee54ea40749a09fcbcd1e9432")]
    assert_is(datasets.mnist(tmp_path / "here"), parts.values())
    assert len(asked) == 1, "what has been downloaded is kept"


def test_the_archive_of_cifar10_is_unpacked_and_nothing_else_of_it(tmp_path, monkeypatch):
    expected = write_cifar10(tmp_path / "mirror")

    def retrieve(url, known_hash, fname, path):
        assert (url, known_hash) == (datasets.CIFAR10_URL, "md5:c32a1d4ab5d03f1284b67883e8d87530")
        path.mkdir(parents=True)
        with tarfile.open(path / fname, "w:gz") as tar:
            for name in datasets.CIFAR10_FILES:
                tar.add(tmp_path / "mirror" / name, f"cifar-10-batches-bin/{name}")
            tar.addfile(tarfile.TarInfo("../outside"), io.BytesIO())
        return str(path / fname)

    pooch_of(monkeypatch, retrieve)
    assert_is(datasets.cifar10(tmp_path / "here"), expected)
    assert sorted(p.name for p in (tmp_path / "here").rglob("*") if p.is_file()) == sorted(
        [*datasets.CIFAR10_FILES, "cifar-10-binary.tar.gz"]
    )
    assert not (tmp_path / "outside").exists()
    pooch_of(monkeypatch, None)
    assert_is(datasets.cifar10(tmp_path / "here"), expected)


@pytest.mark.skipif(not REAL or not (Path(REAL) / "MNIST").is_dir(), reason="MNIST is not in $AUTOSYM_DATA")
def test_real_mnist():
    (x, y), (x_test, y_test) = datasets.mnist(download=False)
    assert x.shape == (60_000, 28, 28)
    assert x_test.shape == (10_000, 28, 28)
    assert y.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert y_test.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    floats = datasets.as_floats(x)
    assert (float(floats.mean()), float(floats.std())) == pytest.approx(datasets.MNIST, abs=1e-4)
    places, quadrant = datasets.quadrants(datasets.as_floats(x_test), 0)
    assert places.shape == (10_000, 1, 32, 32)
    ink = torch.stack(
        [places[quadrant == q, 0].mean(0).unflatten(0, (2, 16)).unflatten(2, (2, 16)).sum((1, 3)) for q in range(4)]
    )
    assert (ink.flatten(1) / ink.sum((1, 2))[:, None]).diagonal().min() > 0.999, "a digit's ink is in its quadrant"


@pytest.mark.skipif(
    not REAL or not (Path(REAL) / "cifar-10-batches-bin").is_dir(), reason="the binary CIFAR-10 is not in $AUTOSYM_DATA"
)
def test_real_cifar10():
    (x, y), (x_test, y_test) = datasets.cifar10(download=False)
    assert x.shape == (50_000, 3, 32, 32)
    assert x_test.shape == (10_000, 3, 32, 32)
    assert y.bincount().tolist() == [5000] * 10
    assert y_test.bincount().tolist() == [1000] * 10
    floats = datasets.as_floats(x)
    assert floats.mean((0, 2, 3)).tolist() == pytest.approx(datasets.CIFAR10[0], abs=2e-4)
    assert floats.std((0, 2, 3)).tolist() == pytest.approx(datasets.CIFAR10[1], abs=2e-4)
    assert y[:4].tolist() == [6, 9, 9, 4], "frog, truck, truck, deer"
