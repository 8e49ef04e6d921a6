"""Readers of a user's images: every layout that is read, and every fault that is named."""

import io
import sys
import zipfile

import numpy as np
import pytest
import torch

from autosym.cli import pictures

Image = pytest.importorskip("PIL.Image")


def arrays(count=8, shape=(6, 5), dtype=np.uint8, classes=2):
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (count, *shape)) if dtype == np.uint8 else draw.normal(size=(count, *shape))
    return {"images": images.astype(dtype), "labels": np.arange(count) % classes}


@pytest.fixture
def npz(tmp_path):
    def save(**changes):
        content = {**arrays(), **changes}
        path = tmp_path / "data.npz"
        np.savez(path, **{key: value for key, value in content.items() if value is not None})
        return path

    return save


@pytest.fixture
def folder(tmp_path):
    """Two classes of three grey 6x5 images."""
    root = tmp_path / "data"
    for label, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        for i in range(3):
            Image.fromarray(np.full((6, 5), 40 * i + 100 * label, np.uint8)).save(root / name / f"{i}.png")
    return root


# ---- arrays


def test_arrays_of_bytes(npz):
    path = npz()
    found = pictures.read(path)
    content = arrays()
    assert found.images.shape == (8, 1, 6, 5)
    torch.testing.assert_close(found.images[:, 0], torch.tensor(content["images"] / 255).float())
    assert found.labels.tolist() == content["labels"].tolist()
    assert found.classes == ("0", "1")
    assert found.notes == ()


@pytest.mark.parametrize(("image_key", "label_key"), [("x", "y"), ("X", "Y"), ("images", "y")])
def test_keys(npz, image_key, label_key):
    content = arrays()
    path = npz(**{"images": None, "labels": None, image_key: content["images"], label_key: content["labels"]})
    assert torch.equal(pictures.read(path).labels, torch.tensor(content["labels"]))


@pytest.mark.parametrize(
    ("shape", "channels", "size"),
    [((6, 5, 3), 3, (6, 5)), ((3, 6, 5), 3, (6, 5)), ((6, 5, 1), 1, (6, 5)), ((1, 6, 5), 1, (6, 5)), ((2, 8, 8), 2, (8, 8))],
)
def test_channels_first_and_last(npz, shape, channels, size):
    content = arrays(shape=shape, dtype=np.float64)
    found = pictures.read(npz(images=content["images"])).images
    expected = content["images"] if shape[0] == channels else np.moveaxis(content["images"], 3, 1)
    assert found.shape == (8, channels, *size)
    torch.testing.assert_close(found, torch.tensor(expected).float())


def test_labels_that_leave_out_values_are_the_classes_that_occur(npz):
    found = pictures.read(npz(labels=np.array([1, 7] * 4)))
    assert found.classes == ("1", "7")
    assert found.labels.tolist() == [0, 1] * 4
    assert "labels 1, 7 are the 2 classes" in found.notes[0]
    assert pictures.read(npz(labels=np.array([[0], [1]] * 4))).labels.tolist() == [0, 1] * 4


def test_a_chosen_number_of_classes(npz):
    found = pictures.read(npz(labels=np.array([0, 2] * 4)), classes=4)
    assert found.classes == ("0", "1", "2", "3")
    assert found.labels.tolist() == [0, 2] * 4


def test_arrays_are_resized(npz):
    found = pictures.read(npz(images=np.full((8, 6, 5), 51, np.uint8)), size=(4, 8))
    assert found.images.shape == (8, 1, 4, 8)
    torch.testing.assert_close(found.images, torch.full((8, 1, 4, 8), 0.2))


def test_images_that_become_smaller_are_antialiased():
    """Every pixel counts, those between the four that are nearest to the new ones too; larger images are bilinear."""
    spikes = 16.0 * torch.eye(64).reshape(64, 1, 8, 8)
    smaller = pictures.resized(spikes, (2, 2)).sum((1, 2, 3))
    assert smaller.min() > 0.5
    assert smaller.max() < 1.5
    larger = torch.nn.functional.interpolate(spikes, (11, 9), mode="bilinear", align_corners=False)
    torch.testing.assert_close(pictures.resized(spikes, (11, 9)), larger)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": None}, "holds labels: it needs one of images, x, X"),
        ({"labels": None}, "needs one of labels, y, Y"),
        ({"y": np.zeros(8, int)}, "needs one of labels"),
        ({"images": np.zeros((8, 30), np.uint8)}, r"\(8, 30\) are not \(N, H, W\)"),
        ({"images": np.zeros((0, 6, 5), np.uint8), "labels": np.zeros(0, int)}, "with N of 1 or more"),
        ({"images": np.zeros((8, 3, 3, 3), np.uint8)}, "channels first or last"),
        ({"images": np.zeros((8, 6, 5), complex)}, "complex128, not numbers"),
        ({"labels": np.zeros(7, int)}, r"labels \(7,\) are not one label for each of the 8 images"),
        ({"labels": np.eye(8, dtype=int)}, "not one label for each"),
        ({"labels": np.arange(8) / 2}, r"float64, not integers: store class indices, labels.astype\(int\)"),
        ({"labels": np.array(["a", "b"] * 4)}, "<U1, not integers"),
        ({"labels": np.array([-1, 1] * 4)}, "run from -1 to 1, but must be 0 or more"),
        ({"labels": np.zeros(8, int)}, "has one class, 0"),
        ({"labels": np.arange(8)}, "8 different values for 8 images"),
        ({"labels": np.array([0] * 7 + [1])}, "only one image of 1"),
    ],
)
def test_arrays_that_are_refused(npz, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        pictures.read(npz(**changes))
    assert "data.npz" in str(caught.value)


def test_values_that_are_not_finite_name_the_images(npz):
    images = arrays(dtype=np.float32)["images"]
    images[2, 0, 0], images[5, 1, 1] = np.nan, np.inf
    with pytest.raises(ValueError, match="images 2, 5 hold NaN or Inf"):
        pictures.read(npz(images=images))


def test_labels_beyond_the_chosen_classes_are_refused(npz):
    with pytest.raises(ValueError, match=r"labels run from 0 to 1, but must be in 0..0"):
        pictures.read(npz(), classes=1)


def test_pickles_are_refused_and_never_run(tmp_path):
    path = tmp_path / "evil.npz"

    class Evil:
        def __reduce__(self):
            return (tmp_path.joinpath("ran").touch, ())

    np.savez(path, images=np.array([Evil()], dtype=object), labels=np.zeros(1, int))
    with pytest.raises(ValueError, match=r"array of objects\. It is refused, as it is a pickle"):
        pictures.read(path)
    assert not (tmp_path / "ran").exists()


def test_an_array_that_claims_more_than_it_holds_is_refused_before_memory_is_taken(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (1 << 30, 64, 64)})
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images.npy", header.getvalue())
        archive.writestr("labels.npy", header.getvalue())
    with pytest.raises(ValueError, match="but holds fewer bytes"):
        pictures.read(path)


def test_arrays_that_are_too_large_are_refused_by_their_header(npz, monkeypatch):
    monkeypatch.setattr(pictures, "MOST_BYTES", 100)
    monkeypatch.setattr(np, "load", None)
    with pytest.raises(ValueError, match="GiB as floats"):
        pictures.read(npz())


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 cut short"])
def test_what_is_no_npz_is_refused(tmp_path, content):
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"x.npz is not a whole .npz file"):
        pictures.read(path)
    (tmp_path / "x.txt").touch()
    with pytest.raises(ValueError, match=r"neither an .npz file nor a folder"):
        pictures.read(tmp_path / "x.txt")
    with pytest.raises(FileNotFoundError, match="none does not exist"):
        pictures.read(tmp_path / "none")


# ---- folders


def test_a_folder_of_class_folders(folder):
    found = pictures.read(folder)
    assert found.classes == ("cat", "dog")
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.images.shape == (6, 1, 6, 5)
    expected = torch.tensor([0, 40, 80, 100, 140, 180]) / 255
    torch.testing.assert_close(found.images.mean((1, 2, 3)), expected)
    assert found.notes == ()


@pytest.mark.parametrize("suffix", ["png", "jpg", "JPEG", "webp", "bmp", "tif", "TIFF"])
def test_formats_and_colours(folder, suffix):
    pixels = np.zeros((6, 5, 3), np.uint8)
    pixels[:] = (250, 120, 10)
    Image.fromarray(pixels).save(folder / "dog" / f"9.{suffix}")
    found = pictures.read(folder)
    assert found.images.shape == (7, 3, 6, 5)
    torch.testing.assert_close(found.images[6].mean((1, 2)), torch.tensor([250, 120, 10]) / 255, atol=0.05, rtol=0)
    torch.testing.assert_close(found.images[1], torch.full((3, 6, 5), 40 / 255))
    assert "6 of 7 images are grey" in found.notes[0]


def test_sixteen_bits_and_turned_photographs(folder):
    for suffix in ("tif", "png"):
        Image.fromarray(np.full((6, 5), 65535, np.uint16)).save(folder / "cat" / f"9.{suffix}")
        assert float(pictures.read(folder).images[3].min()) == 1.0
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was on its side: stored 5 high and 6 wide, shown 6 high and 5 wide
    pixels = np.zeros((5, 6), np.uint8)
    pixels[:, 0] = 255
    Image.fromarray(pixels).save(folder / "cat" / "9.png", exif=exif)
    shown = pictures.read(folder).images[3, 0]
    assert shown.shape == (6, 5)
    assert shown[0].min() == 1
    assert shown[1:].max() == 0


def test_floats_of_tiff_files_are_read_as_they_are(folder):
    levels = {file: float(level) for level, file in enumerate(sorted(folder.glob("*/*.png")), -3)}
    for file, level in levels.items():
        Image.fromarray(np.full((6, 5), level, np.float32)).save(file.with_suffix(".tiff"))
    with pytest.raises(ValueError, match=r"0\.tiff holds floats, .*0\.png does not: store all in one way"):
        pictures.read(folder)
    for file in levels:
        file.unlink()
    assert pictures.read(folder).images.mean((1, 2, 3)).tolist() == list(levels.values())
    Image.fromarray(np.full((6, 5), np.nan, np.float32)).save(folder / "dog" / "2.tiff")
    with pytest.raises(ValueError, match=r"dog/2\.tiff holds NaN or Inf"):
        pictures.read(folder)


@pytest.mark.parametrize("orientation", ["upside", 2.5, (6, 6), 99, 0])
def test_an_orientation_that_is_none_turns_nothing(folder, monkeypatch, orientation):
    monkeypatch.setattr(Image.Image, "getexif", lambda _: {0x0112: orientation})
    assert pictures._header(folder / "cat" / "0.png").size == (6, 5)


def test_of_several_frames_the_first_is_read_and_that_is_said(folder):
    frames = [Image.fromarray(np.full((6, 5, 3), level, np.uint8)) for level in (0, 255)]
    frames[0].save(folder / "cat" / "9.webp", save_all=True, append_images=frames[1:])
    found = pictures.read(folder)
    assert float(found.images[3].max()) < 0.1
    assert any("1 files hold several frames, only the first was read" in note and "9.webp" in note for note in found.notes)


def test_a_folder_around_the_classes_is_named(folder, tmp_path):
    (tmp_path / "outer").mkdir()
    folder.rename(tmp_path / "outer" / "train")
    with pytest.raises(ValueError, match=r"outer/train holds folders and no image: .*name the inner folder, .*outer/train"):
        pictures.read(tmp_path / "outer")


def test_what_is_no_image_is_passed_over_and_said(folder):
    (folder / "cat" / "notes.txt").write_text("hello")
    (folder / "cat" / ".hidden").write_text("hello")
    (folder / "list.csv").write_text("hello")
    (note,) = pictures.read(folder).notes
    assert note.startswith("2 files")
    assert "notes.txt" in note
    assert "list.csv" in note


def test_mixed_sizes_name_two_files_and_are_resized_on_request(folder):
    Image.fromarray(np.full((8, 4), 200, np.uint8)).save(folder / "dog" / "9.png")
    with pytest.raises(ValueError, match=r"cat/0.png is 6x5, .*dog/9.png 8x4 .*--size HxW"):
        pictures.read(folder)
    found = pictures.read(folder, size=(4, 4))
    assert found.images.shape == (7, 1, 4, 4)
    torch.testing.assert_close(found.images[6], torch.full((1, 4, 4), 200 / 255))


@pytest.mark.parametrize("content", [b"", b"nothing", "cut"], ids=["empty", "text", "cut short"])
def test_a_broken_image_is_named(folder, content):
    path = folder / "dog" / "1.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 5)).astype(np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:50] if content == "cut" else content)
    with pytest.raises(ValueError, match=r"dog/1.png cannot be read as an image"):
        pictures.read(folder)


def test_folders_that_are_refused(folder, tmp_path):
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no image"):
        pictures.read(folder)
    (folder / "empty").rmdir()
    with pytest.raises(ValueError, match="their number cannot be chosen"):
        pictures.read(folder, classes=3)
    with pytest.raises(ValueError, match="has no folders in it"):
        pictures.read(folder / "cat")
    for file in (folder / "dog").iterdir():
        file.unlink()
    (folder / "dog").rmdir()
    with pytest.raises(ValueError, match="has one class, cat"):
        pictures.read(folder)


def test_an_image_of_too_many_pixels_is_refused_by_its_header(folder, monkeypatch):
    monkeypatch.setattr(pictures, "MOST_PIXELS", 29)
    with pytest.raises(ValueError, match=r"cat/0.png cannot be read as an image \(it is 6x5, more than 29 pixels\)"):
        pictures.read(folder)


def test_without_pillow_it_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"autosym\[images\]"):
        pictures.read(folder)
