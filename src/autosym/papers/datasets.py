"""Data of the experiments: readers of digits, MNIST and CIFAR-10, and the transformed variants of the papers.

A seed determines a variant. Two variants with the same seed share their draws: to combine variants, give each its own seed.
"""

import gzip
import math
import os
import tarfile
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from autosym.nn.warping import warped
from autosym.runtime import files

Pairs = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]

# Mean and standard deviation of the channels, as the papers normalise: ``normalised(x, *MNIST)``.
MNIST = (0.1307, 0.3081)
CIFAR10 = ((125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255))

MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
CIFAR10_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
CHUNK = 4096  # images transformed at a time, so that temporary memory stays small


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1797 embedded handwritten digits: images (N, 8, 8) in [0, 1] and labels (N,). No download.

    Without scikit-learn, set $AUTOSYM_DIGITS to an .npz file of them (``images``, ``labels``).
    """
    if "AUTOSYM_DIGITS" in os.environ:
        with np.load(os.environ["AUTOSYM_DIGITS"], allow_pickle=False) as file:
            return torch.tensor(file["images"], dtype=torch.float32), torch.tensor(file["labels"]).long()
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the embedded digits come with scikit-learn: pip install 'autosym[data]', or name an .npz by AUTOSYM_DIGITS"
        ) from error
    bunch = load_digits()
    return torch.tensor(bunch.images, dtype=torch.float32) / 16, torch.tensor(bunch.target)


def mnist(folder: str | Path | None = None, download: bool = True) -> Pairs:
    """MNIST, training and test: images (N, 28, 28) in uint8 and labels (N,) in int64, from the official IDX files.

    The files, with or without ``.gz``, may be in ``folder`` (or $AUTOSYM_DATA, or ~/.cache/autosym), its ``MNIST/raw`` or
    its ``mnist``. Missing files are downloaded to ``MNIST/raw`` and checked by MD5.
    """

    def fetch(root: Path, missing: Sequence[str]) -> None:
        for name in missing:
            _retrieve(MNIST_URL + name, MNIST_MD5[name], root / "MNIST" / "raw")

    places = (".", "MNIST/raw", "mnist")
    x, y, x_test, y_test = _files("MNIST", tuple(MNIST_MD5), places, folder, fetch if download else None)
    return _idx_pair(x, y, 60_000), _idx_pair(x_test, y_test, 10_000)


def cifar10(folder: str | Path | None = None, download: bool = True) -> Pairs:
    """CIFAR-10, training and test: images (N, 3, 32, 32) in uint8 and labels (N,) in int64, from the binary version.

    Its six ``.bin`` files may be in ``folder`` (or $AUTOSYM_DATA, or ~/.cache/autosym), its ``cifar-10-batches-bin`` or its
    ``cifar10``. Otherwise the archive is downloaded, checked by MD5 and unpacked. The python version is never read:
    its files are pickles, and a pickle can run any code when it is opened.
    """

    def fetch(root: Path, missing: Sequence[str]) -> None:
        archive = _retrieve(CIFAR10_URL, CIFAR10_MD5, root)
        with tarfile.open(archive) as tar:
            for name in missing:
                packed = tar.extractfile(f"cifar-10-batches-bin/{name}")
                assert packed is not None
                files.write(root / "cifar-10-batches-bin" / name, packed.read())

    places = (".", "cifar-10-batches-bin", "cifar10")
    hint = "; take the binary version: the python version is pickles, which can run any code when opened, and is not read"
    *train, test = _files("CIFAR-10", CIFAR10_FILES, places, folder, fetch if download else None, hint)
    return _cifar_pair(train), _cifar_pair([test])


def place(folder: str | Path | None = None) -> Path:
    """Where datasets are kept: ``folder``, else $AUTOSYM_DATA, else ~/.cache/autosym."""
    return Path(folder or os.environ.get("AUTOSYM_DATA") or "~/.cache/autosym").expanduser()


def _files(
    what: str,
    names: Sequence[str],
    places: Sequence[str],
    folder: str | Path | None,
    fetch: Callable[[Path, Sequence[str]], None] | None,
    hint: str = "",
) -> list[Path]:
    """The path of every name; ``fetch(root, missing)`` gets the missing ones."""
    root = place(folder)

    def look(name: str) -> Path | None:
        spots = (root / place / form for place in places for form in (name, name.removesuffix(".gz")))
        return next((spot for spot in spots if spot.is_file()), None)

    def missing() -> list[str]:
        return [name for name in names if look(name) is None]

    cause, reason = None, "download=False"
    if fetch and missing():
        try:
            fetch(root, missing())
        except (ImportError, OSError) as error:  # no pooch; no network, or a folder that cannot be written
            download = "pip install 'autosym[data]' to download" if isinstance(error, ImportError) else "the download failed"
            cause, reason = error, f"{download}: {error}"
    if missing():
        raise FileNotFoundError(
            f"{what}: no {', '.join(missing())} in {', '.join(str(root / place) for place in places)} ({reason}). "
            f"Name the folder that holds the official files by AUTOSYM_DATA or --data-dir{hint}"
        ) from cause
    return [path for path in map(look, names) if path]


def _retrieve(url: str, md5: str, folder: Path) -> Path:
    """The file of a URL in the folder, downloaded if it is missing; ValueError if its MD5 is wrong."""
    import pooch

    return Path(pooch.retrieve(url, known_hash=f"md5:{md5}", fname=url.rpartition("/")[2], path=folder))


def _idx(path: Path, shape: tuple[int, ...], most: int) -> Tensor:
    """The (N, *shape) bytes of an IDX file: bytes 0, 0, 8 (uint8), number of dimensions; each size as a big-endian int32; data.

    N is checked before the data are read, so that a file cannot ask for more memory than the dataset needs.
    """
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            header = file.read(4 * (2 + len(shape)))
            magic, count, *rest = (int.from_bytes(header[i : i + 4], "big") for i in range(0, 4 * (2 + len(shape)), 4))
            if magic != 0x800 + 1 + len(shape):
                raise ValueError(f"{path}: magic number {magic:#010x} of an IDX file is not {0x801 + len(shape):#010x}")
            if tuple(rest) != shape or not 1 <= count <= most:
                raise ValueError(f"{path}: {(count, *rest)} is not the shape {('1 to ' + str(most), *shape)}")
            size = count * math.prod(shape)
            content = bytearray(file.read(size + 1))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file ({error}); delete it and fetch it again") from error
    if len(content) != size:
        raise ValueError(f"{path}: {'more' if len(content) > size else len(content)} bytes of data where {size} were announced")
    return torch.frombuffer(content, dtype=torch.uint8).reshape(count, *shape)


def _idx_pair(images: Path, labels: Path, most: int) -> tuple[Tensor, Tensor]:
    x, y = _idx(images, (28, 28), most), _idx(labels, (), most)
    if len(x) != len(y):
        raise ValueError(f"{labels}: {len(y)} labels for the {len(x)} images of {images}")
    return x, _checked_labels(y, labels)


def _cifar_pair(paths: Sequence[Path]) -> tuple[Tensor, Tensor]:
    """Images and labels of binary batches: per image one byte of label, then 32 x 32 bytes of red, of green and of blue."""
    images, labels = [], []
    for path in paths:
        count, more = divmod(path.stat().st_size, 3073)
        if more or not 1 <= count <= 10_000:
            raise ValueError(f"{path}: {path.stat().st_size} bytes are not 1 to 10000 images of 3073; fetch it again")
        records = torch.from_numpy(np.fromfile(path, np.uint8)).reshape(count, 3073)
        labels.append(_checked_labels(records[:, 0], path))
        images.append(records[:, 1:].reshape(count, 3, 32, 32))
    return torch.cat(images), torch.cat(labels)


def _checked_labels(labels: Tensor, path: Path) -> Tensor:
    if labels.max() > 9:
        raise ValueError(f"{path}: label {int(labels.max())} is not one of 0 to 9")
    return labels.long()


def split(count: int, test: int, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of a random training and test part."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[test:], order[:test]


def as_floats(images: Tensor) -> Tensor:
    """Bytes (N, H, W) or (N, C, H, W) as float32 (N, C, H, W) in [0, 1]."""
    if images.dtype != torch.uint8 or images.ndim not in (3, 4):
        raise ValueError(f"images are uint8 (N, H, W) or (N, C, H, W), not {images.dtype} {tuple(images.shape)}")
    return (images if images.ndim == 4 else images[:, None]).float().div_(255)


def normalised(x: Tensor, mean: float | Sequence[float], std: float | Sequence[float]) -> Tensor:
    """(x - mean) / std of images (N, C, H, W), with one mean and deviation for all channels or one for each."""
    centre, scale = (x.new_tensor(value).reshape(-1, 1, 1) for value in (mean, std))
    if not {len(centre), len(scale)} <= {1, x.shape[1]}:
        raise ValueError(f"mean {mean} and std {std} do not suit the {x.shape[1]} channel(s) of the images")
    return (x - centre).div_(scale)


def flip_and_crop(x: Tensor, generator: torch.Generator, pad: int = 4) -> Tensor:
    """Augmentation of images (N, C, H, W): flipped left to right with probability 1/2, then moved by up to ``pad`` pixels.

    Each image has its own uniform draws. The move is a random crop of the image padded by zeros (the mean colour, if x is
    normalised). Pixels are moved, never interpolated. The generator is on the device of x, so that nothing waits for it.
    """
    move = torch.randint(-pad, pad + 1, (2, len(x)), generator=generator, device=x.device)
    flip = torch.randint(2, (len(x),), generator=generator, device=x.device)
    return _moved(x, move[0], move[1], flip.bool())


def quadrants(images: Tensor, seed: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Each image (N, C, H, W) in one of the four quadrants of a 2H x 2W canvas, resized to (N, C, size, size).

    Returns the canvases and the quadrants (N,), numbered by rows. Resizing is bilinear with antialiasing, as image
    libraries do: a pixel of the result averages all pixels it covers.
    """
    _check(images)
    quadrant = torch.randint(4, (len(images),), generator=torch.Generator().manual_seed(seed)).to(images.device)

    def place(x: Tensor, q: Tensor) -> Tensor:
        count, channels, height, width = x.shape
        canvas = x.new_zeros(count, channels, 2, height, 2, width)
        canvas[torch.arange(count, device=x.device), :, q // 2, :, q % 2] = x
        return _resize(canvas.reshape(count, channels, 2 * height, 2 * width), (size, size))

    return _chunked(place, (size, size), images, quadrant), quadrant


def resized(images: Tensor, size: int | tuple[int, int] = 32) -> Tensor:
    """Images (N, C, H, W) resized to (height, width) or a square: bilinear between pixel centres, antialiased if smaller."""
    _check(images)
    size = (size, size) if isinstance(size, int) else size
    return _chunked(lambda x: _resize(x, size), size, images)


def rotated(images: Tensor, seed: int, degrees: float = 180.0) -> Tensor:
    """Each image (N, C, H, W) turned by its own angle, uniform in +-``degrees``, as by ``turn``."""
    return turn(images, degrees * _uniform(images, seed))


def turn(images: Tensor, degrees: Tensor) -> Tensor:
    """Images (N, C, H, W) turned about their centres, counterclockwise as ``torch.rot90`` does, by angles (N,).

    out(p) = image(R p) with p from the centre, x to the right and y down, R = [[cos, -sin], [sin, cos]]; bilinear, zero
    outside the image. Height and width stay: what leaves the frame is lost.
    """
    angle = degrees.to(images).deg2rad()
    cos, sin = angle.cos(), angle.sin()
    return _warped(images, torch.stack([cos, -sin, sin, cos], 1).reshape(-1, 2, 2))


def scaled(images: Tensor, seed: int, factor: float = 2.0) -> Tensor:
    """Each image (N, C, H, W) magnified about its centre by its own s = exp(U(+-log factor)).

    out(p) = image(p / s); bilinear without antialiasing, zero outside the image. Height and width stay.
    """
    if factor <= 0:
        raise ValueError(f"factor is positive, not {factor}")
    inverse = (-math.log(factor) * _uniform(images, seed)).exp()
    return _warped(images, inverse[:, None, None] * torch.eye(2, dtype=inverse.dtype, device=inverse.device))


def translated(images: Tensor, seed: int, pixels: int = 8) -> Tensor:
    """Each image (N, C, H, W) moved by its own whole numbers of rows and columns, uniform in +-``pixels``; zero fill."""
    _check(images)
    move = torch.randint(-pixels, pixels + 1, (2, len(images)), generator=torch.Generator().manual_seed(seed))
    return _chunked(_moved, images.shape[2:], images, *move.to(images.device))


CHANGES: dict[str, Callable[[Tensor, int], Tensor]] = {  # of (images, seed)
    "regular": lambda images, _: images,
    "rotated": rotated,
    "full": rotated,
    "half": partial(rotated, degrees=90.0),
    "translated": translated,
    "scaled": scaled,
}


def in_quadrants(images: Tensor, jitter: int, seed: int) -> tuple[Tensor, Tensor]:
    """Each image (N, H, W) in one of the four quadrants of a (N, 1, 2H, 2W) canvas, rolled by up to ``jitter`` pixels.

    Returns the canvases and the quadrants (N,), numbered by rows. The roll is circular: a digit near the border wraps.
    """
    count, height, width = images.shape
    draw = torch.Generator().manual_seed(seed)
    quadrant = torch.randint(4, (count,), generator=draw)
    shift = torch.randint(-jitter, jitter + 1, (count, 2), generator=draw)
    canvas = F.pad(images[:, None], (0, width, 0, height))
    return _rolled(canvas, quadrant // 2 * height + shift[:, 0], quadrant % 2 * width + shift[:, 1]), quadrant


def turned(images: Tensor, seed: int) -> Tensor:
    """Each square image (N, H, H) turned by a random multiple of 90 degrees."""
    quarter_turns = torch.randint(4, (len(images),), generator=torch.Generator().manual_seed(seed))
    return torch.stack([image.rot90(int(k)) for image, k in zip(images, quarter_turns, strict=True)])


def shifted(images: Tensor, seed: int) -> Tensor:
    """Each image (N, H, W) rolled, circularly, by a random number of rows and columns."""
    draw = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randint(size, (len(images),), generator=draw) for size in images.shape[1:])
    return _rolled(images[:, None], rows, columns)[:, 0]


def _sources(x: Tensor, down: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Row (N, H) and column (N, W) that each pixel of images moved by (N,) and (N,) comes from; some are outside."""
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape[2:])
    return rows - down[:, None], columns - right[:, None]


def _picked(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """out[n, c, i, j] = x[n, c, rows[n, i], columns[n, j]]."""
    x = x.gather(2, rows[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
    return x.gather(3, columns[:, None, None, :].expand(-1, x.shape[1], x.shape[2], -1))


def _rolled(x: Tensor, down: Tensor, right: Tensor) -> Tensor:
    rows, columns = _sources(x, down.to(x.device), right.to(x.device))
    return _picked(x, rows % x.shape[2], columns % x.shape[3])


def _moved(x: Tensor, down: Tensor, right: Tensor, flip: Tensor | None = None) -> Tensor:
    """Images (N, C, H, W), flipped left to right if ``flip`` (N,), then moved by (N,) rows and columns; zero fill."""
    rows, columns = _sources(x, down, right)
    if flip is not None:
        columns = torch.where(flip[:, None], x.shape[3] - 1 - columns, columns)
    rows, columns = rows.clamp(-1, x.shape[2]), columns.clamp(-1, x.shape[3])  # everything outside falls on a border of zeros
    return _picked(F.pad(x, (1, 1, 1, 1)), rows + 1, columns + 1)


def _resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(x, size, mode="bilinear", align_corners=False, antialias=True)


def _warped(images: Tensor, maps: Tensor) -> Tensor:
    """out(p) = image(A p) with A (N, 2, 2) acting on (x, y) in pixels from the centre; bilinear, zero outside the image."""
    _check(images)
    return _chunked(partial(warped, unit=1.0), images.shape[2:], images, F.pad(maps.to(images), (0, 1)))


def _uniform(images: Tensor, seed: int) -> Tensor:
    """One number per image, uniform in [-1, 1), the same for every dtype and device of the images."""
    draw = torch.rand(len(images), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (2 * draw - 1).to(images.device)


def _chunked(transform: Callable[..., Tensor], size: Sequence[int], images: Tensor, *parameters: Tensor) -> Tensor:
    """``transform`` of images (N, C, H, W) and parameters (N, ...), CHUNK at a time, as (N, C, *size)."""
    out = images.new_empty(*images.shape[:2], *size)
    for place, *arguments in zip(*(tensor.split(CHUNK) for tensor in (out, images, *parameters)), strict=True):
        place.copy_(transform(*arguments))
    return out


def _check(images: Tensor) -> None:
    if images.ndim != 4 or not images.is_floating_point() or not images.numel():
        raise ValueError(f"images are floats (N, C, H, W), not {images.dtype} {tuple(images.shape)}; see datasets.as_floats")
