"""Checkpoints: one safetensors file, tensors with a JSON header, written atomically. Nothing is ever unpickled.

What is read is checked before it is used: format, version, names and shapes.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from autosym.bayes.likelihoods import Likelihood
from autosym.bayes.priors import Prior
from autosym.runtime import files, processes
from autosym.runtime.batching import Stream
from autosym.training.snapshots import Progress, Snapshot
from autosym.training.steps import Weights

FORMAT, VERSION = "autosym checkpoint", 5
VERSIONS = {FORMAT: VERSION, "autosym fit": 1}
STATES = {16: "a GPU", torch.Generator().get_state().numel(): "a CPU"}  # lengths of a random generator's state


def write(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any], kind: str = FORMAT) -> None:
    """Replace the checkpoint at ``path``, whole or not at all. ``state`` is anything that JSON holds."""
    header = {"format": kind, "version": str(VERSIONS[kind]), "state": json.dumps(state, allow_nan=False)}
    kept: dict[str, Tensor] = {}
    places: set[int] = set()  # tensors that share memory (tied weights, say) are written once for each name
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        kept[name] = own.clone() if own.untyped_storage().data_ptr() in places else own
        places.add(own.untyped_storage().data_ptr())
    files.write(path, save(kept, header))


def read(path: Path, kind: str = FORMAT) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and state of a checkpoint; a ValueError that says what is wrong with any other file.

    Nothing is allocated before the header has been compared with the size of the file.
    """
    with open(path, "rb") as file:
        start = file.read(9)  # of safetensors: the length of the header, whose first byte may be any, and the header's brace
    if start[8:] != b"{" and (start[:1] == b"\x80" or start[:4] == b"PK\x03\x04"):
        raise ValueError(f"{path} holds a pickle (torch.save?), which can run any code when it is read: it is refused")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != kind:
                raise ValueError(f"{path} is a safetensors file, but not an {kind}")
            version = header.get("version", "")
            if not version.isdecimal():
                raise ValueError(f"{path} is damaged, as its version is {version!r}: use an earlier one, or start anew")
            if int(version) > VERSIONS[kind]:
                raise ValueError(
                    f"{path} is of version {version}, newer than this autosym reads ({VERSIONS[kind]}): upgrade autosym"
                )
            if int(version) < VERSIONS[kind]:
                raise ValueError(
                    f"{path} was written by an older autosym (version {version}, this is {VERSIONS[kind]}): start anew"
                )
            return {name: file.get_tensor(name) for name in file.keys()}, _state(path, header.get("state", ""))  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or not a checkpoint ({error}): use an earlier one, or start anew") from error


def _state(path: Path, text: str) -> dict[str, Any]:
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, as its state is not JSON ({error}): use an earlier one, or start anew") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} is damaged, as its state is a {type(state).__name__}: use an earlier one, or start anew")
    return state


def load_into(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy the tensors of a checkpoint into those of a run. If a name or shape differs, refuse, and change nothing."""
    missing, unknown = sorted(set(targets) - set(tensors)), sorted(set(tensors) - set(targets))
    if missing or unknown:
        raise ValueError(f"{path} is of another model: it lacks {missing[:3]} and holds {unknown[:3]} that this one does not")
    for name, target in targets.items():
        if target.shape != tensors[name].shape or target.dtype != tensors[name].dtype:
            theirs, ours = ((tuple(t.shape), t.dtype) for t in (tensors[name], target))
            raise ValueError(f"{path} is of another model: {name} is {theirs} there, but {ours} here")
        if torch.isfinite(target).all() and not torch.isfinite(tensors[name]).all():
            raise ValueError(f"{path} is damaged: {name} is not finite there; use an earlier one, or start anew")
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(tensors[name])


@dataclass(frozen=True)
class State:
    """The whole state of a run between two epochs, as a checkpoint holds it."""

    model: nn.Module
    prior: Prior
    likelihood: Likelihood
    weights: Weights
    stream: Stream
    config: dict[str, Any]
    progress: Progress
    more: Mapping[str, Tensor] = field(default_factory=dict)  # state of other optimisers than that of the weights

    def snapshot(self, epoch: int, log_evidence: float | None) -> Snapshot:
        """A copy, in host memory, of all that training changes."""
        return Snapshot.of(self._changing(), self.prior, epoch, log_evidence, self.progress.low)

    def put_back(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot; random numbers go on."""
        snapshot.put_back(self._changing(), self.prior, self.weights.lr.device)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """What happens inside is undone at its end: weights, precisions, optimisers and random numbers."""
        before, generators = self.snapshot(0, None), {**self._generators(), "global": torch.default_generator}
        states = {name: generator.get_state() for name, generator in generators.items()}
        try:
            yield
        finally:
            self.put_back(before)
            for name, generator in generators.items():
                generator.set_state(states[name])

    def write(self, path: Path) -> None:
        """Write the state. With several processes, the first writes."""
        if not processes.first():
            return
        generators = {f"generator/{name}": generator.get_state() for name, generator in self._generators().items()}
        scales = {f"scales/{name}": tensor for name, tensor in self.prior.scales.items()}
        state = {"config": self.config, "mixture_bound": self.prior.mixture_bound, **self.progress.state()}
        tensors = {**self._tensors(), **scales, **generators, "generator/global": torch.get_rng_state()}
        write(path, tensors | self.progress.tensors(), state)

    def read(self, path: Path) -> None:
        """Go back to the state in the file."""
        tensors, state = read(path)
        generators = {**self._generators(), "global": torch.default_generator}
        lacking = [key for key in ("config", "lines", "mixture_bound") if key not in state]
        lacking += [f"generator/{name}" for name in generators if f"generator/{name}" not in tensors]
        if lacking or not isinstance(state["config"], dict) or not isinstance(state["lines"], list):
            raise ValueError(f"{path} is damaged, or of another kind of run: it lacks {lacking or 'its history'}; start anew")
        if state["config"] != self.config:
            other = {key: value for key, value in state["config"].items() if value != self.config.get(key)}
            raise ValueError(f"{path} is of a run with other settings, {other}: resume with the same, or start anew")
        theirs, ours = (t.numel() for t in (tensors["generator/noise"], self.stream.noise.get_state()))
        if theirs != ours and theirs in STATES:
            raise ValueError(
                f"{path} is of a run on {STATES[theirs]}, and this one is on {STATES[ours]}: resume it there, or start anew"
            )
        own = {name: t for name, t in tensors.items() if not name.startswith(("scales/", "generator/", "kept/"))}
        load_into(self._tensors(), own, path)
        device = self.weights.lr.device
        self.prior.scales = {n.removeprefix("scales/"): t.to(device) for n, t in tensors.items() if n.startswith("scales/")}
        self.prior.mixture_bound = state["mixture_bound"]
        self._load_progress(path, state, tensors)
        try:
            for name, generator in generators.items():
                generator.set_state(tensors[f"generator/{name}"])
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"{path} is damaged: its state of a random generator is none ({error}); start anew") from error

    def _load_progress(self, path: Path, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        now = self._changing()
        try:
            self.progress.load(state, tensors)
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: its snapshots are none ({error}); start anew") from error
        for snapshot in self.progress.snapshots.values():
            kept = {name: t for name, t in snapshot.tensors.items() if not name.startswith("scales/")}
            same = {name: t.shape for name, t in kept.items()} == {name: t.shape for name, t in now.items()}
            if not same or any(torch.isfinite(t).all() and not torch.isfinite(kept[name]).all() for name, t in now.items()):
                raise ValueError(f"{path} is damaged: its snapshot of epoch {snapshot.epoch} is none of this model; start anew")
        if {0, self.progress.good, self.progress.best} - set(self.progress.snapshots) and self.progress.start:
            raise ValueError(f"{path} is damaged: it lacks a snapshot; start anew")

    def _tensors(self) -> dict[str, Tensor]:
        fixed = {
            "weights": {"rates": self.weights.rates},
            "frames": {f"{name}.{key}": t for name, f in self.weights.frames.items() for key, t in f.state_dict().items()},
        }
        return self._changing() | {
            f"{part}/{name}": tensor for part, tensors in fixed.items() for name, tensor in tensors.items()
        }

    def _changing(self) -> dict[str, Tensor]:
        parts = {
            "model": self.model.state_dict(),
            "prior": self.prior.state_dict(),
            "likelihood": self.likelihood.hyperparameters(),
            "first": self.weights.first,
            "second": self.weights.second,
            "steps": {"weights": self.weights.steps},
            "more": dict(self.more),
        }
        return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}

    def _generators(self) -> dict[str, torch.Generator]:
        own = {"shuffle": self.stream.shuffle, "noise": self.stream.noise}
        loader = getattr(self.stream.data, "generator", None)
        return {**own, **({"loader": loader} if isinstance(loader, torch.Generator) else {})}


class Keeper:
    """Writes the state of a run to a file from time to time, or, without a file, never."""

    def __init__(self, state: State, path: str | Path | None, seconds: float):
        self.state, self.path, self.seconds = state, Path(path) if path else None, seconds
        self.saved = time.perf_counter()

    def begin(self, resume: bool) -> None:
        """Go back to the state of the file, if there is one to resume."""
        if self.path and resume and self.path.exists():
            self.state.read(self.path)
        if self.path and not self.state.progress.lines:
            self.state.write(self.path)  # over that of an earlier run, which a resumed one must not go on from
        self.saved = time.perf_counter()

    def keep(self, last: bool) -> None:
        """At the end of an epoch: write, if it is time, or the ``last``."""
        if self.path and (last or time.perf_counter() - self.saved > self.seconds):
            self.state.write(self.path)
            self.saved = time.perf_counter()
