import io
import math
import os
import sys
import tarfile
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from autosym import data
from files import idx, mnist_parts, write_cifar10, write_mnist

REAL = os.environ.get("AUTOSYM_DATA")


def drawn(count=40):
    """Images without a zero pixel: where they are on the canvas is plain to see."""
    return torch.rand(count, 3, 4) + 0.5


def test_digits_are_the_embedded_ones():
    pytest.importorskip("sklearn")
    images, labels = data.digits()
    assert images.shape == (1797, 8, 8)
    assert labels.shape == (1797,)
    assert images.dtype == torch.float32
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    assert labels.unique().tolist() == list(range(10))
    assert labels.bincount().min() > 170


def test_digits_can_come_from_a_file(monkeypatch, tmp_path):
    np.savez(tmp_path / "digits.npz", images=np.full((2, 8, 8), 0.5), labels=np.array([3, 4]))
    monkeypatch.setenv("AUTOSYM_DIGITS", str(tmp_path / "digits.npz"))
    images, labels = data.digits()
    assert images.dtype == torch.float32
    assert images.shape == (2, 8, 8)
    assert labels.tolist() == [3, 4]


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"scikit-learn: pip install 'autosym\[data\]'"):
        data.digits()


def test_without_jitter_the_image_is_in_its_quadrant_and_nowhere_else():
    images = drawn()
    canvas, quadrant = data.in_quadrants(images, 0, seed=0)
    assert canvas.shape == (40, 1, 6, 8)
    assert quadrant.unique().tolist() == [0, 1, 2, 3]
    for image, place, q in zip(images, canvas[:, 0], quadrant.tolist(), strict=True):
        rows, columns = [(0, 0), (0, 4), (3, 0), (3, 4)][q]  # numbered by rows
        torch.testing.assert_close(place[rows : rows + 3, columns : columns + 4], image, rtol=0, atol=0)
        assert torch.count_nonzero(place) == image.numel()


@pytest.mark.parametrize("jitter", [1, 2])
def test_jitter_is_a_circular_roll_of_at_most_so_many_pixels(jitter):
    images = drawn(200)
    still, quadrant = data.in_quadrants(images, 0, seed=3)
    moved, same = data.in_quadrants(images, jitter, seed=3)
    assert torch.equal(quadrant, same), "the jitter does not change the quadrants of a seed"
    shifts = range(-jitter, jitter + 1)
    seen = set()
    for before, after in zip(still, moved, strict=True):
        found = [(d, r) for d in shifts for r in shifts if torch.equal(before.roll((d, r), (1, 2)), after)]
        assert len(found) == 1
        seen.update(found)
    assert len(seen) == len(shifts) ** 2, "every roll occurs"


def test_placing_is_deterministic_by_seed():
    images = drawn()
    canvas, quadrant = data.in_quadrants(images, 2, seed=1)
    torch.manual_seed(99)
    again, same = data.in_quadrants(images, 2, seed=1)
    assert torch.equal(canvas, again)
    assert torch.equal(quadrant, same)
    other, different = data.in_quadrants(images, 2, seed=2)
    assert not torch.equal(canvas, other)
    assert not torch.equal(quadrant, different)


def test_images_are_left_as_they_were():
    images = drawn()
    before = images.clone()
    data.in_quadrants(images, 2, seed=0)
    assert torch.equal(images, before)


def test_split_is_disjoint_and_complete():
    train, test = data.split(50, 12, seed=0)
    assert (len(train), len(test)) == (38, 12)
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(50))
    assert test.tolist() != sorted(test.tolist()), "a random part, not the first"


def test_split_is_deterministic_by_seed():
    first, again, other = data.split(50, 12, seed=0), data.split(50, 12, seed=0), data.split(50, 12, seed=1)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[1], other[1])


def test_shifting_is_a_roll_by_any_number_of_rows_and_columns():
    images = drawn(200)
    moved = data.shifted(images, seed=0)
    rolls = [(r, c) for r in range(3) for c in range(4)]
    found = [
        [k for k in rolls if torch.equal(before.roll(k, (0, 1)), after)] for before, after in zip(images, moved, strict=True)
    ]
    assert all(len(ks) == 1 for ks in found)
    assert {ks[0] for ks in found} == set(rolls)


# Files: MNIST


def assert_is(pairs, tensors):
    for got, expected in zip((*pairs[0], *pairs[1]), tensors, strict=True):
        assert got.dtype == (torch.int64 if got.ndim == 1 else torch.uint8)
        assert torch.equal(got, expected.to(got.dtype))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", [".", "MNIST/raw", "mnist"])
def test_mnist_is_read_from_its_files(tmp_path, place, zipped):
    parts = mnist_parts()
    write_mnist(tmp_path / place, parts, zipped)
    assert_is(data.mnist(tmp_path, download=False), parts.values())


def test_the_folder_is_the_argument_or_the_variable_or_the_cache(tmp_path, monkeypatch):
    parts = [mnist_parts() for _ in range(3)]
    for part, folder in zip(parts, ("argument", "variable", "home/.cache/autosym"), strict=True):
        write_mnist(tmp_path / folder, part)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AUTOSYM_DATA", str(tmp_path / "variable"))
    assert_is(data.mnist(tmp_path / "argument"), parts[0].values())
    assert_is(data.mnist(str(tmp_path / "argument")), parts[0].values())
    assert_is(data.mnist(), parts[1].values())
    monkeypatch.delenv("AUTOSYM_DATA")
    assert_is(data.mnist(), parts[2].values())


IMAGES, LABELS, *_ = data.MNIST_MD5
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
        data.mnist(tmp_path, download=False)
    assert str(tmp_path / name.removesuffix(".gz")) in str(error.value)


@pytest.mark.parametrize(
    "spoil", [lambda b: b[:-20], lambda b: b[:-8] + b"\0" * 8, lambda b: b"none", lambda b: b[:10] + b"\xff" * 20]
)
def test_a_broken_gzip_file_is_named(tmp_path, spoil):
    write_mnist(tmp_path, mnist_parts())
    (tmp_path / IMAGES).write_bytes(spoil((tmp_path / IMAGES).read_bytes()))
    with pytest.raises(ValueError, match=f"{IMAGES}: not a whole gzip file"):
        data.mnist(tmp_path, download=False)


# Files: CIFAR-10


@pytest.mark.parametrize("place", [".", "cifar-10-batches-bin", "cifar10"])
def test_cifar10_is_read_from_its_files(tmp_path, place):
    expected = write_cifar10(tmp_path / place)
    assert_is(data.cifar10(tmp_path, download=False), expected)


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
        data.cifar10(tmp_path, download=False)


def test_a_cifar10_file_of_too_many_images_is_not_read(tmp_path):
    write_cifar10(tmp_path)
    with (tmp_path / "test_batch.bin").open("wb") as file:
        file.truncate(10_001 * 3073)  # sparse: takes no room
    with pytest.raises(ValueError, match=r"test_batch\.bin: 30733073 bytes"):
        data.cifar10(tmp_path, download=False)


@pytest.mark.parametrize("place", ["cifar-10-batches-py", "."])
def test_pickles_are_refused_and_never_opened(tmp_path, place):
    """The python version of CIFAR-10, with a pickle that runs a command, as itself or under the names of the binary one."""
    (tmp_path / place).mkdir(exist_ok=True)
    attack = f"cos\nsystem\n(S'touch {tmp_path}/executed'\ntR.".encode()
    for name in data.CIFAR10_FILES:
        (tmp_path / place / (name if place == "." else name.removesuffix(".bin"))).write_bytes(attack)
    with pytest.raises((FileNotFoundError, ValueError), match=r"take the binary version|bytes are not"):
        data.cifar10(tmp_path, download=False)
    assert not (tmp_path / "executed").exists()
    os.system(attack.split(b"'")[1].decode())
    assert (tmp_path / "executed").exists(), "the attack would have been seen"


# Downloads


def pooch_of(monkeypatch, retrieve):
    module = types.ModuleType("pooch")
    module.retrieve = retrieve
    monkeypatch.setitem(sys.modules, "pooch", module)


@pytest.mark.parametrize(("read", "name"), [(data.mnist, "t10k-labels-idx1-ubyte.gz"), (data.cifar10, "test_batch.bin")])
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
    assert ("take the binary version" in message()) == (read is data.cifar10)


def test_only_files_that_are_missing_are_named_and_downloaded(tmp_path, monkeypatch):
    parts = mnist_parts()
    write_mnist(tmp_path / "mirror", parts)
    write_mnist(tmp_path / "here", parts)
    (tmp_path / "here" / LABELS).unlink()
    with pytest.raises(FileNotFoundError) as error:
        data.mnist(tmp_path / "here", download=False)
    assert [name in str(error.value) for name in parts] == [False, True, False, False]
    asked = []

    def retrieve(url, known_hash, fname, path):
        asked.append((url, known_hash))
        path.mkdir(parents=True)
        (path / fname).write_bytes((tmp_path / "mirror" / fname).read_bytes())
        return str(path / fname)

    pooch_of(monkeypatch, retrieve)
    assert_is(data.mnist(tmp_path / "here"), parts.values())
    assert asked == [(f"https://ossci-datasets.s3.amazonaws.com/mnist/{LABELS}", "md5:d53e105ee54ea40749a09fcbcd1e9432")]
    assert_is(data.mnist(tmp_path / "here"), parts.values())
    assert len(asked) == 1, "what has been downloaded is kept"


def test_the_archive_of_cifar10_is_unpacked_and_nothing_else_of_it(tmp_path, monkeypatch):
    expected = write_cifar10(tmp_path / "mirror")

    def retrieve(url, known_hash, fname, path):
        assert (url, known_hash) == (data.CIFAR10_URL, "md5:c32a1d4ab5d03f1284b67883e8d87530")
        path.mkdir(parents=True)
        with tarfile.open(path / fname, "w:gz") as tar:
            for name in data.CIFAR10_FILES:
                tar.add(tmp_path / "mirror" / name, f"cifar-10-batches-bin/{name}")
            tar.addfile(tarfile.TarInfo("../outside"), io.BytesIO())
        return str(path / fname)

    pooch_of(monkeypatch, retrieve)
    assert_is(data.cifar10(tmp_path / "here"), expected)
    assert sorted(p.name for p in (tmp_path / "here").rglob("*") if p.is_file()) == sorted(
        [*data.CIFAR10_FILES, "cifar-10-binary.tar.gz"]
    )
    assert not (tmp_path / "outside").exists()
    pooch_of(monkeypatch, None)
    assert_is(data.cifar10(tmp_path / "here"), expected)


@pytest.mark.skipif(not REAL or not (Path(REAL) / "MNIST").is_dir(), reason="MNIST is not in $AUTOSYM_DATA")
def test_real_mnist():
    (x, y), (x_test, y_test) = data.mnist(download=False)
    assert x.shape == (60_000, 28, 28)
    assert x_test.shape == (10_000, 28, 28)
    assert y.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert y_test.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    floats = data.as_floats(x)
    assert (float(floats.mean()), float(floats.std())) == pytest.approx(data.MNIST, abs=1e-4)
    places, quadrant = data.quadrants(data.as_floats(x_test), 0)
    assert places.shape == (10_000, 1, 32, 32)
    ink = torch.stack(
        [places[quadrant == q, 0].mean(0).unflatten(0, (2, 16)).unflatten(2, (2, 16)).sum((1, 3)) for q in range(4)]
    )
    assert (ink.flatten(1) / ink.sum((1, 2))[:, None]).diagonal().min() > 0.999, "a digit's ink is in its quadrant"


@pytest.mark.skipif(
    not REAL or not (Path(REAL) / "cifar-10-batches-bin").is_dir(), reason="the binary CIFAR-10 is not in $AUTOSYM_DATA"
)
def test_real_cifar10():
    (x, y), (x_test, y_test) = data.cifar10(download=False)
    assert x.shape == (50_000, 3, 32, 32)
    assert x_test.shape == (10_000, 3, 32, 32)
    assert y.bincount().tolist() == [5000] * 10
    assert y_test.bincount().tolist() == [1000] * 10
    floats = data.as_floats(x)
    assert floats.mean((0, 2, 3)).tolist() == pytest.approx(data.CIFAR10[0], abs=2e-4)
    assert floats.std((0, 2, 3)).tolist() == pytest.approx(data.CIFAR10[1], abs=2e-4)
    assert y[:4].tolist() == [6, 9, 9, 4], "frog, truck, truck, deer"


# Variants


def pictures(count=30, channels=2, height=6, width=8):
    return torch.rand(count, channels, height, width, dtype=torch.float64) + 0.5


def test_bytes_become_floats_and_are_normalised():
    images = torch.randint(256, (4, 5, 6), dtype=torch.uint8)
    images[0, 0, :2] = torch.tensor([0, 255])
    floats = data.as_floats(images)
    assert floats.shape == (4, 1, 5, 6)
    assert floats[0, 0, 0, :2].tolist() == [0.0, 1.0]
    assert torch.equal(floats[:, 0], images.float() / 255)
    assert torch.equal(data.as_floats(images[:, None].expand(4, 3, 5, 6)), floats.expand(4, 3, 5, 6))
    torch.testing.assert_close(data.normalised(floats, *data.MNIST), (floats - 0.1307) / 0.3081)
    colours, (mean, std) = pictures(channels=3), data.CIFAR10
    got = data.normalised(colours, mean, std)
    for c in range(3):
        torch.testing.assert_close(got[:, c], (colours[:, c] - mean[c]) / std[c])
    with pytest.raises(ValueError, match=r"do not suit the 1 channel"):
        data.normalised(floats, mean, std)
    with pytest.raises(ValueError, match="uint8"):
        data.as_floats(floats)


def test_quadrants_are_each_image_on_its_canvas_resized():
    images = pictures(40, height=7, width=9)
    got, quadrant = data.quadrants(images, seed=0, size=10)
    assert quadrant.unique().tolist() == [0, 1, 2, 3]
    for image, result, q in zip(images, got, quadrant.tolist(), strict=True):
        rows, columns = [(0, 0), (0, 9), (7, 0), (7, 9)][q]  # numbered by rows
        canvas = torch.zeros(1, 2, 14, 18, dtype=torch.float64)
        canvas[0, :, rows : rows + 7, columns : columns + 9] = image
        small = F.interpolate(canvas, (10, 10), mode="bilinear", align_corners=False, antialias=True)
        torch.testing.assert_close(result, small[0], rtol=0, atol=1e-14)


def test_quadrants_of_digits_are_32_pixels_wide_in_the_unit_range():
    got, _ = data.quadrants(torch.rand(8, 1, 28, 28), seed=0)
    assert got.shape == (8, 1, 32, 32)
    assert got.dtype == torch.float32
    assert got.min() >= 0
    assert got.max() <= 1


def test_resizing_is_bilinear_between_pixel_centres():
    images = pictures(3, height=28, width=28)
    up = F.interpolate(images, (32, 32), mode="bilinear", align_corners=False)
    torch.testing.assert_close(data.resized(images), up, rtol=0, atol=1e-12)
    ramp = torch.arange(8, dtype=torch.float64).expand(1, 1, 8, 8)
    torch.testing.assert_close(data.resized(ramp, 16)[0, 0, 3, 1:-1], torch.arange(14, dtype=torch.float64) / 2 + 0.25)
    spike = torch.zeros(1, 1, 16, 16, dtype=torch.float64)
    spike[0, 0, 8, 8] = 16.0
    assert float(data.resized(spike, 4).sum()) == pytest.approx(1.0, rel=1e-2), "antialiased: no pixel is skipped"


def seen_through(image, matrix):
    """Slow oracle of out(p) = image(A p): every pixel on its own, bilinear from its four neighbours, zero outside."""
    height, width = image.shape
    out = torch.zeros_like(image)
    for i in range(height):
        for j in range(width):
            x, y = j - (width - 1) / 2, i - (height - 1) / 2
            column = matrix[0][0] * x + matrix[0][1] * y + (width - 1) / 2
            row = matrix[1][0] * x + matrix[1][1] * y + (height - 1) / 2
            for r in (math.floor(row), math.floor(row) + 1):
                for c in (math.floor(column), math.floor(column) + 1):
                    if 0 <= r < height and 0 <= c < width:
                        out[i, j] += (1 - abs(row - r)) * (1 - abs(column - c)) * image[r, c]
    return out


@pytest.mark.parametrize("shape", [(6, 8), (7, 4), (5, 5)])
def test_turning_and_scaling_are_those_of_every_pixel(shape):
    images = pictures(4, 1, *shape)
    draws = 2 * torch.rand(4, generator=torch.Generator().manual_seed(3), dtype=torch.float64) - 1
    turned, scaled = data.rotated(images, 3, degrees=70.0), data.scaled(images, 3, factor=2.0)
    for image, draw, turn, scale in zip(images[:, 0], draws.tolist(), turned[:, 0], scaled[:, 0], strict=True):
        cos, sin = math.cos(math.radians(70 * draw)), math.sin(math.radians(70 * draw))
        torch.testing.assert_close(turn, seen_through(image, [[cos, -sin], [sin, cos]]), rtol=0, atol=1e-12)
        size = 2.0**draw  # above 1 the image grows
        torch.testing.assert_close(scale, seen_through(image, [[1 / size, 0], [0, 1 / size]]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("height", [6, 7])
def test_quarter_turns_are_those_of_rot90(height):
    images = pictures(4, height=height, width=height)
    got = data.turn(images, torch.tensor([90.0, -90.0, 180.0, 0.0], dtype=torch.float64))
    for image, result, k in zip(images, got, (1, -1, 2, 0), strict=True):
        torch.testing.assert_close(result, image.rot90(k, (1, 2)), rtol=0, atol=1e-12)


def test_a_quarter_turn_of_an_oblong_image_keeps_its_square_middle():
    images = pictures(2, height=4, width=8)
    got = data.turn(images, torch.full((2,), 90.0))
    torch.testing.assert_close(got[..., 2:6], images[..., 2:6].rot90(1, (2, 3)), rtol=0, atol=1e-12)
    assert got[..., [0, 1, 6, 7]].abs().max() < 1e-12


def test_angles_and_factors_fill_their_range():
    """A bright pixel to the right of the centre shows the angle, the width of a bright square the factor."""
    images = torch.zeros(4000, 1, 33, 33)
    images[:, :, 15:18, 25:28] = 1.0
    at = torch.arange(33.0) - 16
    angles = []
    for degrees in (180.0, 30.0):
        got = data.rotated(images, 1, degrees)[:, 0]
        x, y = (got * at).sum((1, 2)), (got * at[:, None]).sum((1, 2))
        angles.append(torch.atan2(-y, x).rad2deg())
    assert angles[0].abs().max() > 178
    assert angles[0].histc(6, -180, 180).min() > 550
    assert 29.5 < angles[1].abs().max() < 30.5
    assert angles[1].histc(6, -30.5, 30.5).min() > 550
    images[:, :, 11:22, 11:22] = 1.0
    images[:, :, :, 25:] = 0.0
    widths = data.scaled(images, 1)[:, 0, 16].sum(1)  # of a square of 11
    assert 5 < widths.min() < 6
    assert 21 < widths.max() < 23


def test_translation_moves_pixels_and_fills_with_zeros():
    images = pictures(400, 2, 5, 7)
    moved = data.translated(images, 0, pixels=2)
    padded = F.pad(images, (2, 2, 2, 2))
    windows = {(r, c): padded[:, :, 2 - r : 7 - r, 2 - c : 9 - c] for r in range(-2, 3) for c in range(-2, 3)}
    hits = torch.stack([(window == moved).flatten(1).all(1) for window in windows.values()])
    assert (hits.sum(0) == 1).all(), "each is one of the moves"
    assert hits.sum(1).min() > 2, "each move occurs"
    assert (data.translated(images, 0, pixels=50).flatten(1).sum(1) == 0).any(), "farther than the image is wide"
    assert torch.equal(data.translated(images, 0, pixels=0), images)


VARIANTS = {
    "quadrants": lambda x, seed: data.quadrants(x, seed)[0],
    "rotated": data.rotated,
    "scaled": data.scaled,
    "translated": lambda x, seed: data.translated(x, seed, pixels=2),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_are_deterministic_by_seed_and_leave_the_images(variant, monkeypatch):
    images = pictures()
    before = images.clone()
    first = VARIANTS[variant](images, 1)
    torch.manual_seed(99)
    assert torch.equal(first, VARIANTS[variant](images, 1))
    assert not torch.equal(first, VARIANTS[variant](images, 2))
    torch.testing.assert_close(VARIANTS[variant](images.float(), 1), first.float(), rtol=0, atol=1e-4)  # the same draws
    assert torch.equal(images, before)
    monkeypatch.setattr(data, "CHUNK", 7)
    torch.testing.assert_close(VARIANTS[variant](images, 1), first, rtol=0, atol=1e-14)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("images", [torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2, 4, 4), torch.zeros(0, 1, 4, 4)])
def test_variants_refuse_what_are_not_images(variant, images):
    with pytest.raises(ValueError, match=r"floats \(N, C, H, W\)"):
        VARIANTS[variant](images, 0)


# Augmentation


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("pad", [0, 2, 9])
def test_flip_and_crop_is_that_of_each_image(pad, dtype):
    x = torch.randint(1, 256, (60, 3, 5, 7)).to(dtype)
    got = data.flip_and_crop(x, torch.Generator().manual_seed(4), pad)
    assert got.dtype == dtype
    draw = torch.Generator().manual_seed(4)
    (down, right), flip = torch.randint(-pad, pad + 1, (2, 60), generator=draw), torch.randint(2, (60,), generator=draw)
    for n in range(60):
        padded = F.pad(x[n].flip(2) if flip[n] else x[n], (pad, pad, pad, pad))
        top, left = pad - int(down[n]), pad - int(right[n])
        assert torch.equal(got[n], padded[:, top : top + 5, left : left + 7])


def test_every_flip_and_crop_is_equally_likely_for_every_image():
    image = torch.rand(1, 1, 4, 5)
    got = data.flip_and_crop(image.expand(3600, -1, -1, -1), torch.Generator().manual_seed(0), pad=1)
    _, counts = got.flatten(1).unique(dim=0, return_counts=True)
    assert len(counts) == 2 * 3 * 3
    assert 130 < counts.min() <= counts.max() < 270, "200 each, up to five standard deviations"


def test_augmentation_goes_on_with_its_generator():
    x, generator = pictures(), torch.Generator().manual_seed(0)
    before = x.clone()
    first, second = data.flip_and_crop(x, generator), data.flip_and_crop(x, generator)
    assert not torch.equal(first, second)
    assert torch.equal(first, data.flip_and_crop(x, generator.manual_seed(0)))
    assert torch.equal(x, before)


def test_augmentation_never_looks_at_values():
    """On the meta device there are none: an operation that waits for the device, or one on the host, would fail."""
    x = torch.empty(8, 3, 32, 32, device="meta")
    out = data.flip_and_crop(x, torch.Generator())
    assert out.shape == x.shape
    assert out.is_meta
    with pytest.raises(RuntimeError):
        bool(out.any())
