"""A user's own images: an ``.npz`` of arrays, or a folder of class folders of PNG, JPEG, WebP, BMP or TIFF files.

Nothing is unpickled, and sizes are checked before memory is taken. An error names the file that is wrong. ``notes`` say what was done
to the images, e.g. grey images read as coloured, or files skipped.
"""

import math
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from autosym.papers import datasets
from autosym.runtime.batching import rows_not_finite

IMAGE_KEYS, LABEL_KEYS = ("images", "x", "X"), ("labels", "y", "Y")
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
MOST_BYTES = 32 * 2**30  # of all images as floats
MOST_PIXELS = 2**26  # of one file
MOST_DEFLATED = 1032  # bytes that one compressed byte can expand to, at most


@dataclass(frozen=True)
class Pictures:
    """Images (N, C, H, W) in float32, bytes as 0 to 1; labels (N,) in int64; the name of every class."""

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()


def read(path: Path, size: tuple[int, int] | None = None, classes: int | None = None) -> Pictures:
    """The images of an ``.npz`` or of a folder, resized to ``size`` (height, width) if it is given, with at least two classes.

    ``classes`` is the number of classes, if some of them may not occur in the integer labels.
    """
    if path.is_dir():
        if classes is not None:
            raise ValueError(f"{path} is a folder and its subfolders are the classes: their number cannot be chosen")
        found = _read_folder(path, size)
    elif path.suffix == ".npz" and path.is_file():
        found = _read_npz(path, classes)
        found = replace(found, images=resized(found.images, size)) if size else found
    elif path.exists():
        raise ValueError(f"{path} is neither an .npz file nor a folder of class folders")
    else:
        raise FileNotFoundError(f"{path} does not exist: name an .npz file of images and labels, or a folder of class folders")
    counts = torch.bincount(found.labels, minlength=len(found.classes)).tolist()
    if sum(count > 0 for count in counts) < 2:
        raise ValueError(f"{path} has one class, {found.classes[int(found.labels[0])]}: add images of a second one")
    few = [name for name, count in zip(found.classes, counts, strict=True) if count == 1]
    if few:
        raise ValueError(f"{path} has only one image of {_some(few)}: a class needs at least two")
    return found


def resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Images (N, C, H, W) as (N, C, *size); unchanged if they have this size."""
    return images if tuple(images.shape[2:]) == tuple(size) else datasets.resized(images, size)


# ---- arrays


def _read_npz(path: Path, classes: int | None) -> Pictures:
    shapes = _shapes(path)
    image_key, label_key = (_key(path, shapes, keys) for keys in (IMAGE_KEYS, LABEL_KEYS))
    shape, dtype = shapes[image_key]
    _check_images(path, image_key, shape, dtype)
    labels_shape, labels_dtype = shapes[label_key]
    if labels_shape not in ((shape[0],), (shape[0], 1)):
        raise ValueError(f"{path}: {label_key} {labels_shape} are not one label for each of the {shape[0]} {image_key}")
    if labels_dtype.kind not in "iub":
        hint = "np.unique(labels, return_inverse=True)[1]"
        if labels_dtype.kind == "f":
            hint = "labels.astype(int); numbers to predict are asked about in Python, by autosym.fit(model, data, 'gaussian')"
        raise ValueError(f"{path}: {label_key} are {labels_dtype}, not integers: store class indices, {hint}")
    with _whole(path), np.load(path, allow_pickle=False) as arrays:
        pixels, classes_of = arrays[image_key], arrays[label_key]
    images = _as_floats(path, image_key, pixels)
    labels = torch.from_numpy(classes_of.reshape(-1).astype(np.int64))
    return _with_classes(path, label_key, images, labels, classes)


def _with_classes(path: Path, key: str, images: Tensor, labels: Tensor, classes: int | None) -> Pictures:
    """The images with class indices. Each value that occurs is a class, unless ``classes`` gives their number."""
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or (classes is not None and high >= classes):
        wanted = "0 or more" if classes is None else f"in 0..{classes - 1}"
        raise ValueError(f"{path}: {key} run from {low} to {high}, but must be {wanted}")
    if classes is not None:
        return Pictures(images, labels, tuple(map(str, range(classes))))
    values, indices = labels.unique(return_inverse=True)
    if len(values) > len(labels) // 2:
        raise ValueError(
            f"{path}: {key} hold {len(values)} different values for {len(labels)} images: too few of each (are they classes?)"
        )
    names = tuple(map(str, values.tolist()))
    whole = high + 1 == len(values)
    note = f"labels {_some(names)} are the {len(names)} classes: other values do not occur"
    return Pictures(images, indices, names, () if whole else (note,))


def _shapes(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and type of every array, from the headers alone; arrays of objects are pickles and are refused."""
    shapes = {}
    objects = None
    with _whole(path), zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as file:
                version = np.lib.format.read_magic(file)
                header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = header(file)
            if dtype.hasobject:
                objects = name
                continue
            entry = archive.getinfo(name)
            held = min(entry.file_size, MOST_DEFLATED * min(entry.compress_size, path.stat().st_size))
            if math.prod(shape) * dtype.itemsize > held:
                raise ValueError(f"{name} claims the shape {shape}, but holds fewer bytes")
            shapes[name.removesuffix(".npy")] = shape, dtype
    if objects is not None:
        raise ValueError(
            f"{path}: {objects} is an array of objects. It is refused, as it is a pickle and can run any code when it is read. Store "
            "images of one size as one array of numbers"
        )
    return shapes


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Any error of the zip and npy readers becomes one that names the file."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path} is not a whole .npz file ({error}): write it by numpy.savez") from error


def _key(path: Path, shapes: dict[str, Any], keys: Sequence[str]) -> str:
    found = [key for key in keys if key in shapes]
    if len(found) != 1:
        raise ValueError(f"{path} holds {', '.join(shapes) or 'nothing'}: it needs one of {', '.join(keys)}")
    return found[0]


def _check_images(path: Path, key: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    if dtype.kind not in "iufb":
        raise ValueError(f"{path}: {key} are {dtype}, not numbers")
    if len(shape) not in (3, 4) or 0 in shape:
        raise ValueError(f"{path}: {key} of shape {shape} are not (N, H, W), (N, H, W, C) or (N, C, H, W) with N of 1 or more")
    _check_bytes(path, shape)


def _check_bytes(path: Path, shape: Sequence[int]) -> None:
    size = 4 * math.prod(shape)
    if size > MOST_BYTES:
        raise ValueError(
            f"{path}: images {tuple(shape)} take {size / 2**30:.0f} GiB as floats, more than {MOST_BYTES / 2**30:.0f}: store "
            "fewer or smaller images (in a folder, --size makes them smaller)"
        )


def _as_floats(path: Path, key: str, array: np.ndarray) -> Tensor:
    """(N, C, H, W) in float32. The channels are the first or the last axis of an image, whichever is smaller."""
    scale = 255.0 if array.dtype == np.uint8 else 1.0
    images = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)).div_(scale)
    if images.dim() == 3:
        images = images[:, None]
    elif images.shape[3] == images.shape[1]:
        raise ValueError(
            f"{path}: {key} {tuple(images.shape)} could have channels first or last: store them as (N, H, W), or resize"
        )
    elif images.shape[3] < images.shape[1]:
        images = images.permute(0, 3, 1, 2).contiguous()
    if bad := rows_not_finite(images):
        raise ValueError(f"{path}: {key} {_some(bad)} hold NaN or Inf: drop or mend them")
    return images


# ---- folders


def _read_folder(path: Path, size: tuple[int, int] | None) -> Pictures:
    files, classes, notes = _list(path)
    headers = [_header(file) for file, _ in files]
    first = headers[0].size
    other = next((i for i, header in enumerate(headers) if header.size != first), None)
    if size is None and other is not None:
        (a, _), (b, _) = files[0], files[other]
        raise ValueError(
            f"images are of different sizes: {a} is {first[0]}x{first[1]}, {b} {headers[other].size[0]}x{headers[other].size[1]} (height x "
            "width); resize all to one size by --size HxW"
        )
    coloured = [header.coloured for header in headers]
    channels = 3 if any(coloured) else 1
    if any(coloured) and not all(coloured):
        notes.append(f"{coloured.count(False)} of {len(files)} images are grey: they were read as coloured, like the others")
    real = [header.real for header in headers]
    if any(real) and not all(real):
        raise ValueError(
            f"{files[real.index(True)][0]} holds floats, {files[real.index(False)][0]} does not: store all in one way"
        )
    moving = [file for (file, _), header in zip(files, headers, strict=True) if header.moves]
    if moving:
        notes.append(f"{len(moving)} files hold several frames, only the first was read: {_some(moving)}")
    shape = (len(files), channels, *(size or first))
    _check_bytes(path, shape)
    images = torch.empty(shape)
    for place, (file, _) in zip(images, files, strict=True):
        place.copy_(resized(_decode(file, channels)[None], shape[2:])[0])
    if bad := rows_not_finite(images):
        raise ValueError(f"{files[bad[0]][0]} holds NaN or Inf: mend or remove it")
    return Pictures(images, torch.tensor([label for _, label in files]), tuple(classes), tuple(notes))


def _list(path: Path) -> tuple[list[tuple[Path, int]], list[str], list[str]]:
    """Every image with its class, the classes, and a note about files that are not images."""
    folders = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not folders:
        raise ValueError(
            f"{path} has no folders in it: put the images of every class in a folder of its own, named like the class"
        )
    files: list[tuple[Path, int]] = []
    passed = []
    for label, folder in enumerate(folders):
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
        own = [entry for entry in entries if entry.suffix.lower() in SUFFIXES and entry.is_file()]
        if not own and any(entry.is_dir() for entry in entries):
            raise ValueError(f"{folder} holds folders and no image: if those are the classes, name the inner folder, {folder}")
        if not own:
            raise ValueError(f"{folder} holds no image ({', '.join(sorted(SUFFIXES))}): fill or remove the folder")
        files += [(entry, label) for entry in own]
        passed += [entry for entry in entries if entry not in own]
    passed += [entry for entry in sorted(path.iterdir()) if entry.is_file() and not entry.name.startswith(".")]
    notes = [f"{len(passed)} files are not images in class folders and were skipped: {_some(passed)}"] if passed else []
    return files, [folder.name for folder in folders], notes


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """The image of a file; any error of its decoder, now or later, becomes one that names the file."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("folders of images are read by Pillow: pip install 'autosym[images]'") from error
    try:
        with Image.open(file, formats=FORMATS) as image:
            yield image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{file} cannot be read as an image ({error}): mend or remove it") from error


class _Header(NamedTuple):
    size: tuple[int, int]  # (height, width), as shown
    coloured: bool
    moves: bool  # several frames
    real: bool  # floats


def _header(file: Path) -> _Header:
    """What is known of a file before its pixels take memory. A huge image is refused."""
    with _opened(file) as image:
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise ValueError(f"it is {height}x{width}, more than {MOST_PIXELS} pixels")
        turned = image.getexif().get(0x0112) in (5, 6, 7, 8)  # taken with the camera on its side
        size, coloured = (width, height) if turned else (height, width), not image.mode.startswith(("1", "L", "I", "F"))
        return _Header(size, coloured, getattr(image, "n_frames", 1) > 1, image.mode == "F")


def _decode(file: Path, channels: int) -> Tensor:
    """(C, H, W) in 0 to 1, floats as they are; rotated as its EXIF data say; transparency is dropped."""
    from PIL import ImageOps

    with _opened(file) as image:
        scale = 65535 if image.mode.startswith("I") else 1 if image.mode == "F" else 255  # 16 bits, floats, 8 bits
        shown = ImageOps.exif_transpose(image)
        shown = shown.convert("RGB" if channels == 3 else "L") if scale == 255 else shown
        pixels = torch.from_numpy(np.asarray(shown, dtype=np.float32) / scale)
    return pixels.permute(2, 0, 1) if pixels.dim() == 3 else pixels.expand(channels, -1, -1)


def _some(things: Sequence[Any]) -> str:
    """The first few, and how many more."""
    shown = ", ".join(map(str, things[:5]))
    return shown if len(things) <= 5 else f"{shown} and {len(things) - 5} more"
