"""Reads networks saved by ``torch.export.save`` (.pt2). Nothing is unpickled; only torch's own operators run.

``torch.export.load`` unpickles (example inputs, some constants), evaluates strings (symbolic sizes, guards) and resolves any name under
``torch``. So it is given a checked copy of the archive, which holds only numbers and a graph of ``aten`` operators.
"""

import io
import json
import logging
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HOW = "save it by torch.export.save(torch.export.export(model.eval(), (images,)), 'model.pt2')"
PLAIN = re.compile(r"(archive_format|archive_version|byteorder|\.data/\w+|data/weights/weight_\d+|data/constants/tensor_\d+)")
CONFIGS = re.compile(r"data/(weights|constants)/model_(weights|constants)_config\.json")
OPERATOR = re.compile(
    r"torch\.ops\.aten\.(?!from_file)\w+\.\w+|_operator\.(getitem|add|sub|mul|truediv|floordiv|mod|pow|neg|pos|abs|eq|ne|lt|le|gt|ge|and_|or_|not_)"
    r"|torch\.sym_\w+"
)
SYMBOL = re.compile(
    r"Symbol\('[su]\d+'(, (positive|integer|nonnegative)=True)*\)|Integer|IntTrueDiv|FloorDiv"
    r"|PythonMod|Mod|Mul|Add|PowByNatural|Pow|Max|Min|[su]?\d+"
)


class Program(nn.Module):
    """An exported network as a module that takes one tensor. It takes batches of any size, also if exported with a fixed one."""

    def __init__(self, program: torch.export.ExportedProgram, path: Path):
        super().__init__()
        inputs = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in program.graph_signature.user_inputs]
        if len(inputs) != 1 or not isinstance(inputs[0].meta["val"], Tensor) or inputs[0].meta["val"].dim() != 4:
            raise ValueError(f"{path} does not take one batch of images (N, C, H, W), so it cannot be audited")
        example = inputs[0].meta["val"]
        self.batch = example.shape[0] if isinstance(example.shape[0], int) else None
        self.in_shape = tuple(size if isinstance(size, int) else None for size in example.shape[1:])
        self.dtype, self.path = example.dtype, path
        self._run = (
            program.module(),
        )  # in a tuple, so that it is not a submodule: it was exported in eval mode and cannot change modes

    def forward(self, x: Tensor) -> Tensor:
        if any(size not in (None, given) for size, given in zip(self.in_shape, x.shape[1:], strict=True)):
            other = self.in_shape[0] not in (None, x.shape[1])
            how = "give images with as many channels" if other else "resize them by --size HxW"
            raise ValueError(f"the network takes images {self.in_shape}, but these are {tuple(x.shape[1:])}: {how}")
        (run,), outputs = self._run, []
        for part in x.to(self.dtype).split(self.batch or len(x)):
            whole = part if self.batch is None else torch.cat([part, part[:1].expand(self.batch - len(part), *part.shape[1:])])
            try:
                y = run(whole)
            except RuntimeError as error:  # shapes that do not match, or a tensor larger than the memory
                raise ValueError(f"{self.path} cannot be run on these images ({str(error).splitlines()[0]}): {HOW}") from error
            if not isinstance(y, Tensor):
                raise ValueError(f"the network returns a {type(y).__name__}, not a tensor: export one that returns its logits")
            outputs.append(y[: len(part)])
        return torch.cat(outputs)


def load(path: Path) -> Program:
    """The network in an exported program. Pickles (``torch.save``, TorchScript), custom operators and compiled code are refused."""
    with open(path, "rb") as file:
        start = file.read(4)
    if start[:2] != b"PK":
        raise ValueError(f"{path} is not an exported program: {HOW}")
    cleaned = io.BytesIO()
    try:
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(cleaned, "w") as copy:
            for name, content in _checked(path, archive):
                copy.writestr(name, content)
    except (
        zipfile.BadZipFile,
        UnicodeDecodeError,
        EOFError,
        OSError,
        LookupError,
        TypeError,
        AttributeError,
        RuntimeError,
    ) as error:
        raise ValueError(f"{path} is broken, or no exported program ({error}): {HOW}") from error
    cleaned.seek(0)
    logger = logging.getLogger("torch.export")
    level = logger.level
    logger.setLevel(logging.ERROR)  # its warnings are long tracebacks; the error below says enough
    try:
        program = torch.export.load(cleaned)
    except (ValueError, RuntimeError, AssertionError, TypeError, AttributeError, LookupError, OverflowError) as error:
        raise ValueError(f"{path} cannot be read by torch {torch.__version__}: broken, or of another version? {HOW}") from error
    finally:
        logger.setLevel(level)
    return Program(program, path)


def _checked(path: Path, archive: zipfile.ZipFile) -> Iterator[tuple[str, bytes]]:
    """The checked parts of an archive. The example inputs are a pickle: they are replaced by nothing."""
    names = archive.namelist()
    if not any(name.endswith("/models/model.json") for name in names):
        kind = (
            "a pickle (torch.save, or TorchScript), which can run any code when it is read"
            if _pickled(names)
            else "something else"
        )
        raise ValueError(f"{path} is not an exported program but {kind}: {HOW}")
    sizes = [entry.file_size for entry in archive.infolist()]
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()) or sum(sizes) > path.stat().st_size:
        raise ValueError(
            f"{path} is refused: it is compressed, or claims to hold more than its size; torch never writes such files"
        )
    for name in names:
        part = name.partition("/")[2]
        if part == "data/sample_inputs/model.pt":
            yield name, b""
        elif part == "models/model.json":
            yield name, _checked_graph(path, _json(path, archive.read(name)))
        elif CONFIGS.fullmatch(part):
            for payload in _json(path, archive.read(name))["config"].values():
                if payload["use_pickle"] or not PLAIN.fullmatch(f"{part.rpartition('/')[0]}/{payload['path_name']}"):
                    raise ValueError(
                        f"{path} holds a pickled object, {payload['path_name']}, which can run any code: it is refused"
                    )
            yield name, archive.read(name)
        elif PLAIN.fullmatch(part):
            yield name, archive.read(name)
        else:
            raise ValueError(f"{path} holds {part}, which a plain network does not have (compiled code? a pickle?): {HOW}")


def _json(path: Path, content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is broken, or no exported program ({error}): {HOW}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is broken, or no exported program (a {type(found).__name__} for a graph): {HOW}")
    return found


def _pickled(names: list[str]) -> bool:
    return any(name.endswith(".pkl") for name in names)


def _checked_graph(path: Path, program: dict[str, Any]) -> bytes:
    for key, value in _strings(program):
        if key == "target" and not OPERATOR.fullmatch(value):
            raise ValueError(f"{path} calls {value}, which is not one of torch's own operators: it is refused")
        if key == "expr_str" and re.sub(r"[\s(),+*/-]", "", SYMBOL.sub("", value)):
            raise ValueError(f"{path} has a size of {value!r}, which is not arithmetic: it is refused")
    return json.dumps({**program, "guards_code": []}).encode()


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every string in a tree of JSON, with the key it is under."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _strings(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part, key)
