"""Files that were cut off, flipped, foreign or made to ask for memory: always a ValueError or OSError that names the file.

Deterministic: every change is drawn from a seed. All is read under a limit of memory, so that a file that asks for more is seen.
"""

import gzip
import json
import pickle
import random
import resource
import shutil
import struct
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autosym
import files
from autosym.cli import exported, own_images, pictures
from autosym.nn import nets
from autosym.papers import datasets
from autosym.report import run_files
from autosym.report.writing import write_run
from autosym.training import checkpoint
from autosym.training.fitting import fit

SPARE = 2**30  # bytes of addresses beyond those in use when a file is read


@contextmanager
def little_memory():
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def problem():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), (torch.randn(12, 1, 4, 4), torch.arange(12) % 3)


def resume(path):
    model, data = problem()
    fit(model, data, epochs=1, checkpoint=path, resume=True)


def load_fit(path):
    folder = path.parent / "fit"
    folder.mkdir(exist_ok=True)
    shutil.copy(path, folder / "fit.safetensors")
    autosym.load(folder, problem()[0])


def in_place_of(name, read):
    """Read a run with one of its files replaced."""

    def reader(path):
        folder = path.parent / "other"
        if not folder.exists():
            shutil.copytree(path.parent / "run", folder)
        for older, newer in (("history.jsonl", "report.json"), ("checkpoint.safetensors", "fit.safetensors")):
            if name == older:  # which is read where there is no newer one
                (folder / newer).unlink(missing_ok=True)
        (folder / name).write_bytes(path.read_bytes())
        read(folder)

    return reader


def draw_report(folder):
    write_run(folder, folder / "report.html")


# name: (its file among those that are made, how it is read, how many changes of it are tried)
READERS = {
    "checkpoint": ("c.safetensors", checkpoint.read, 150),
    "saved fit": ("fit.safetensors", load_fit, 100),
    "resumed run": ("c.safetensors", resume, 60),
    "arrays": ("a.npz", pictures.read, 150),
    "compressed arrays": ("z.npz", pictures.read, 150),
    "program": ("m.pt2", exported.load, 150),
    "idx": ("idx", lambda path: datasets._idx(path, (28, 28), 60_000), 100),
    "zipped idx": ("idx.gz", lambda path: datasets._idx(path, (28, 28), 60_000), 100),
    "cifar": ("cifar.bin", lambda path: datasets._cifar_pair([path]), 100),
    "result of a report": ("run/result.json", in_place_of("result.json", draw_report), 24),
    "report": ("run/report.json", in_place_of("report.json", draw_report), 24),
    "history": ("run/history.jsonl", in_place_of("history.jsonl", draw_report), 24),
    "result of an audit": ("run/result.json", in_place_of("result.json", own_images._read_run), 100),
    "fit of an audit": ("run/fit.safetensors", in_place_of("fit.safetensors", own_images._read_run), 80),
    "checkpoint of an audit": ("run/checkpoint.safetensors", in_place_of("checkpoint.safetensors", own_images._read_run), 80),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One sound file of every kind."""
    pytest.importorskip("jinja2")
    folder = tmp_path_factory.mktemp("sound")
    model, samples = problem()
    fit(model, samples, epochs=1, checkpoint=folder / "c.safetensors").save(folder)
    draw = np.random.default_rng(0)
    arrays = {"images": draw.integers(0, 256, (8, 8, 8), dtype=np.uint8), "labels": np.arange(8) % 2}
    np.savez(folder / "a.npz", **arrays)
    np.savez_compressed(folder / "z.npz", **arrays)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 2)).eval()
    torch.export.save(torch.export.export(net, (torch.randn(2, 1, 8, 8),)), folder / "m.pt2")
    (folder / "idx").write_bytes(files.idx(torch.randint(256, (5, 28, 28), dtype=torch.uint8)))
    (folder / "idx.gz").write_bytes(gzip.compress((folder / "idx").read_bytes(), 1))
    (folder / "cifar.bin").write_bytes(bytes([3] + [7] * 3072) * 3)
    own_images.train(own_images.Run(str(folder / "a.npz"), epochs=1), folder / "run")
    return folder


def changed(content, draw):
    """Cut off, flipped bits, other bytes near the start, bytes put in or taken out, or a number made huge."""
    kind, content = draw.randrange(6), bytearray(content)
    place = draw.randrange(len(content))
    if kind == 0:
        del content[place:]
    elif kind == 1:
        for _ in range(draw.randrange(1, 8)):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif kind == 2:
        for _ in range(draw.randrange(1, 4)):
            content[draw.randrange(min(len(content), 400))] = draw.randrange(256)
    elif kind == 3:
        content[place:place] = draw.randbytes(draw.randrange(1, 40))
    elif kind == 4:
        del content[place : place + draw.randrange(1, 200)]
    else:
        content[place : place + 8] = b"\xff" * len(content[place : place + 8])
    return bytes(content)


STRANGE = [None, True, -1, 10**30, 1e308, "x", [], {}, [1], {"a": 1}, "<script>", [[[]]]]


def rewritten(content, draw):
    """JSON with a value or two taken out, or replaced by something else."""
    tree = json.loads(content)

    def places(value):
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            yield value, key
            yield from places(value[key])

    for _ in range(draw.randrange(1, 3)):
        holder, key = draw.choice(list(places(tree)))
        if draw.random() < 0.3:
            del holder[key]
        else:
            holder[key] = draw.choice(STRANGE)
    return json.dumps(tree).encode()


def assert_read_or_named(read, path):
    """Returns whether it was refused."""
    try:
        with little_memory():
            read(path)
    except (ValueError, OSError) as error:
        assert str(path.parent) in str(error), f"{type(error).__name__} does not name its file: {error}"  # noqa: PT017
        return True
    return False


@pytest.mark.fault(23)
@pytest.mark.parametrize("kind", READERS)
def test_changed_files_are_read_or_refused_by_name(kind, made, tmp_path):
    name, read, tries = READERS[kind]
    content, refused = (made / name).read_bytes(), 0
    if name.startswith("run/"):
        shutil.copytree(made / "run", tmp_path / "run")
    path = tmp_path / f"changed{Path(name).suffix}"
    path.write_bytes(content)
    assert not assert_read_or_named(read, path), "the control: as it was it is read"
    for seed in range(tries):
        draw = random.Random(seed)
        path.write_bytes((rewritten if name.endswith(".json") and seed % 2 else changed)(content, draw))
        refused += assert_read_or_named(read, path)
    assert refused > tries / 10, "the changes are felt"


# ---- other formats


FOREIGN = {
    "empty": b"",
    "text": b"hello",
    "zeros": bytes(5000),
    "pickle": pickle.dumps({"a": [1, 2]}),
    "png": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "gzip": gzip.compress(b"nothing", 1),
    "json": b'{"a": 1}',
    "deep json": b"[" * 100_000,
    "long number": b'{"symmetry": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.fault(23)
@pytest.mark.parametrize("kind", READERS)
def test_files_of_other_formats_are_refused_by_name(kind, made, tmp_path):
    name, read, _ = READERS[kind]
    if name.startswith("run/"):
        shutil.copytree(made / "run", tmp_path / "run")
    path = tmp_path / f"foreign{Path(name).suffix}"
    others = {k: (made / n).read_bytes() for k, (n, *_) in READERS.items() if n != name and "idx" not in n and "cifar" not in n}
    for form, content in {**FOREIGN, **others}.items():
        path.write_bytes(content)
        alike = name.endswith(("json", "jsonl")) or (form, kind) == (
            "empty",
            "history",
        )  # may be read as one with nothing in it
        alike |= "arrays" in form and "arrays" in kind
        alike |= "checkpoint" in form and "checkpoint" in kind
        assert assert_read_or_named(read, path) or alike, form


# ---- more than there is


def huge_tensor(path):
    """A header that announces 4 TiB."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def huge_header(path):
    path.write_bytes(struct.pack("<Q", 2**62) + b"{}")


def huge_array(path, size):
    """An .npy in a zip whose directory says that it is as large as its header does."""
    entry = {"descr": "|u1", "fortran_order": False, "shape": (size, 8, 8)}
    with zipfile.ZipFile(path, "w") as archive, archive.open("images.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, entry)
        file.write(bytes(64))
    content = path.read_bytes()
    info = zipfile.ZipFile(path).getinfo("images.npy")
    end = content.rindex(b"PK\x01\x02")
    declared = struct.pack("<I", min(64 * size + 128, 2**32 - 2))
    path.write_bytes(content[: end + 24] + declared + content[end + 28 :])
    assert zipfile.ZipFile(path).getinfo("images.npy").file_size > info.file_size


def bomb(path):
    """A compressed program: a thousand times as large when it is unpacked."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/models/model.json", bytes(2**20))
        with archive.open("m/data/weights/weight_0", "w") as file:
            for _ in range(4):
                file.write(bytes(2**24))


def overlapping(path):
    """Many names for the same stored bytes."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/models/model.json", "{}")
        archive.writestr("m/data/weights/weight_0", bytes(2**20))
        first = archive.getinfo("m/data/weights/weight_0")
        for i in range(1, 2000):
            other = zipfile.ZipInfo(f"m/data/weights/weight_{i}")
            other.header_offset, other.file_size, other.compress_size, other.CRC = first.header_offset, 2**20, 2**20, first.CRC
            archive.filelist.append(other)
            archive.NameToInfo[other.filename] = other
        archive._didModify = True


def huge_file(path):
    with open(path, "wb") as file:
        file.truncate(2**40)  # without blocks on the disk


def huge_idx(path):
    path.write_bytes(b"".join(n.to_bytes(4, "big") for n in (0x803, 2**32 - 1, 28, 28)))


HUGE = {
    "tensor": ("x.safetensors", huge_tensor, checkpoint.read),
    "header": ("x.safetensors", huge_header, checkpoint.read),
    "array": ("x.npz", lambda path: huge_array(path, 2**24), pictures.read),
    "array of a terabyte": ("x.npz", lambda path: huge_array(path, 2**34), pictures.read),
    "compressed program": ("x.pt2", bomb, exported.load),
    "overlapping program": ("x.pt2", overlapping, exported.load),
    "cifar": ("data_batch_1.bin", huge_file, lambda path: datasets._cifar_pair([path])),
    "idx": ("x.idx", huge_idx, lambda path: datasets._idx(path, (28, 28), 60_000)),
}


@pytest.mark.fault(23)
@pytest.mark.parametrize("kind", HUGE)
def test_announced_sizes_are_checked_before_memory_is_taken(kind, tmp_path):
    name, make, read = HUGE[kind]
    make(tmp_path / name)
    assert assert_read_or_named(read, tmp_path / name)


NETWORKS = [
    ("width", 10**9),
    ("in_shape", [1, 2**20, 2**20]),
    ("hidden", 10**12),
    ("classes", 10**15),
    ("channels", [10**6] * 3),
]
SMALLER = [("width", 60), ("in_shape", [1, 512, 512]), ("hidden", 10**5), ("classes", 10**5), ("channels", [40] * 3)]


@pytest.mark.fault(23)
@pytest.mark.parametrize(("key", "value"), [*NETWORKS, *SMALLER])  # there is memory for the smaller ones
def test_a_result_cannot_ask_for_a_huge_network(key, value, made, tmp_path):
    shutil.copytree(made / "run", tmp_path / "run")
    path = tmp_path / "run" / "result.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "network": {**result["network"], key: value}}))
    with Largest() as largest:
        assert assert_read_or_named(own_images._read_run, tmp_path / "run")
    assert largest.made < 10**5, "it is refused before memory is taken, not as there is none"


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor had that was made on a real device."""

    made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.is_meta:
            self.made = max(self.made, result.numel())
        return result


@pytest.mark.fault(23)
def test_a_result_cannot_ask_for_many_blocks(made, tmp_path):
    """Without weights to speak of, but each of them is several modules."""
    shutil.copytree(made / "run", tmp_path / "run")
    path = tmp_path / "run" / "result.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "network": {**result["network"], "channels": [1] * 500, "strides": [1] * 500}}))
    with pytest.raises(ValueError, match=r"result.json .*it has 500 blocks, but .* tensors"):
        own_images._read_run(tmp_path / "run")


@pytest.mark.fault(23)
def test_few_weights_cannot_ask_for_a_huge_basis(made, tmp_path):
    """Anchors are fitted to dense weights on all positions: here 300 times 4 MiB."""
    network = {"name": "s-fc", "in_shape": [1, 1024, 1024], "classes": 2, "width": 300, "channels": [1], "strides": [1]}
    network |= {"hidden": 1, "grid_anchors": 2e-6}
    shutil.copytree(made / "run", tmp_path / "run")
    (tmp_path / "run" / "fit.safetensors").unlink()
    path, kept = tmp_path / "run" / "result.json", tmp_path / "run" / "checkpoint.safetensors"
    with torch.device("meta"):
        weights = nets.build(**network).state_dict()
    assert sum(tensor.numel() for tensor in weights.values()) < 10**5
    checkpoint.write(kept, {f"model/{n}": torch.zeros(t.shape) for n, t in weights.items()}, checkpoint.read(kept)[1])
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "network": network}))
    with pytest.raises(ValueError, match=r"result.json.*its network takes \d+ numbers, more than"), Largest() as largest:
        own_images._read_run(tmp_path / "run")
    assert largest.made < 10**6


@pytest.mark.fault(23)
def test_the_network_of_a_sound_run_is_built_after_the_check(made):
    with Largest() as largest:
        network, _ = own_images._read_run(made / "run")
    assert largest.made >= max(parameter.numel() for parameter in network.parameters()), "the control: it is seen"


def test_the_limit_of_memory_is_felt():
    """The control: without a check before it, an allocation fails."""
    with little_memory(), pytest.raises((MemoryError, RuntimeError)):
        torch.empty(2**33, dtype=torch.uint8)


@pytest.mark.fault(23)
def test_a_checkpoint_whose_state_lacks_something_is_named(tmp_path):
    model, samples = problem()
    fit(model, samples, epochs=1, checkpoint=tmp_path / "c")
    tensors, state = checkpoint.read(tmp_path / "c")
    for key in ("config", "lines", "mixture_bound"):
        checkpoint.write(tmp_path / "c", tensors, {k: v for k, v in state.items() if k != key})
        with pytest.raises(ValueError, match=rf"c is damaged.* it lacks \['{key}'\]"):
            resume(tmp_path / "c")
    for name in ("generator/shuffle", "generator/global"):
        checkpoint.write(tmp_path / "c", {k: v for k, v in tensors.items() if k != name}, state)
        with pytest.raises(ValueError, match=rf"it lacks \['{name}'\]"):
            resume(tmp_path / "c")
        checkpoint.write(tmp_path / "c", {**tensors, name: torch.zeros(3, dtype=torch.uint8)}, state)
        with pytest.raises(ValueError, match="its state of a random generator is none"):
            resume(tmp_path / "c")
    checkpoint.write(tmp_path / "c", {**tensors, "generator/noise": torch.zeros(16, dtype=torch.uint8)}, state)  # as of a GPU
    with pytest.raises(ValueError, match="is of a run on a GPU, and this one is on a CPU"):
        resume(tmp_path / "c")
    for header in ({"version": "x"}, {"state": "[]"}, {"state": "{"}, {"state": None, "version": None}):
        whole = {"format": checkpoint.FORMAT, "version": str(checkpoint.VERSION), "state": "{}", **header}
        save_file({}, tmp_path / "c", {k: v for k, v in whole.items() if v is not None})
        with pytest.raises(ValueError, match=r"c is damaged, as its (version|state) is"):
            checkpoint.read(tmp_path / "c")


@pytest.mark.fault(23)
def test_a_history_that_is_none_is_named(tmp_path):
    (tmp_path / "result.json").write_text('{"symmetry": []}')
    (tmp_path / "history.jsonl").write_text('{"loss": 1}\n')
    with pytest.raises(ValueError, match=r"history.jsonl is not a history"):
        run_files.load(tmp_path)
