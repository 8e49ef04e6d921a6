"""CUDA graphs: a step that works in place on the same tensors is recorded once, then replayed without Python between its kernels."""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WARM_UP = 3  # real steps, taken before recording: libraries choose their algorithms and allocate workspaces


def beside(work: Callable[[], list[Tensor]], x: Tensor) -> Callable[[], list[Tensor]]:
    """Begin ``work`` on x; calling what is returned waits for its results.

    While a graph is recorded, ``work`` has a stream of its own. What comes in between then runs at the same time, and so do the backward
    passes of both: small kernels do not fill a GPU.
    """
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        outputs = work()
        return lambda: outputs
    here, there = torch.cuda.current_stream(x.device), torch.cuda.Stream(x.device)
    there.wait_stream(here)
    with torch.cuda.stream(there):
        outputs = work()

    def join() -> list[Tensor]:
        here.wait_stream(there)
        return outputs

    for t, user in ((x, there), *((t, here) for t in outputs)):
        t.record_stream(user)  # its memory is not reused before that stream has finished
    return join


class Captured:
    """``step(*inputs)``, replayed as a CUDA graph where inputs are on a GPU; else, or if ``wanted`` is False, called as it is.

    There is one graph for each of the first two shapes (of a whole batch, and of the last one of an epoch). What cannot be recorded (a
    step that waits for the device, or moves data) is called as it is, after one warning.
    """

    def __init__(self, step: Callable[..., None], wanted: bool = True):
        self.step, self.wanted = step, wanted
        self.calls: dict[tuple, int] = {}
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}

    def __call__(self, *inputs: Tensor) -> None:
        if not self.wanted or not all(t.is_cuda for t in inputs):
            return self.step(*inputs)
        kind = tuple((t.shape, t.dtype) for t in inputs)
        if kind not in self.graphs:
            self.calls[kind] = self.calls.get(kind, 0) + 1
            if self.calls[kind] <= WARM_UP or len(self.graphs) == 2:
                return _aside(self.step, *inputs)
            self._record(kind, inputs)
        if kind not in self.graphs:
            return self.step(*inputs)
        graph, kept = self.graphs[kind]
        for own, t in zip(kept, inputs, strict=True):
            own.copy_(t)
        graph.replay()

    def _record(self, kind: tuple, inputs: tuple[Tensor, ...]) -> None:
        device, kept = inputs[0].device, tuple(torch.empty_like(t) for t in inputs)
        graph, noise = torch.cuda.CUDAGraph(), torch.cuda.get_rng_state(device)
        try:
            with torch.cuda.graph(graph):
                self.step(*kept)
            self.graphs[kind] = (graph, kept)
        except RuntimeError as error:
            self.wanted = False
            cause = error.__context__ or error  # if the step raised, the end of recording raises again
            generator = torch.cuda.default_generators[device.index]
            generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())  # the old one stays in capture
            torch.cuda.set_rng_state(noise, device)
            warnings.warn(
                f"a training step could not be recorded as a CUDA graph ({str(cause).splitlines()[0]}), so each is launched "
                "anew, which is slower: does the model wait for the device (.item(), .tolist()) or move data to it in forward()?",
                stacklevel=4,
            )


class Adam:
    """Adam, as a step that may be recorded as a CUDA graph: its ``rate`` is a tensor."""

    def __init__(self, parameters: Sequence[Tensor]):
        self.parameters, device = list(parameters), parameters[0].device if parameters else None
        self.rate, self.steps = torch.zeros((), device=device), torch.zeros((), dtype=torch.float64, device=device)
        self.first, self.second = ([torch.zeros_like(p) for p in self.parameters] for _ in range(2))

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], first: float = 0.1, second: float = 0.001) -> None:
        """One step, by moments of which the parts ``first`` and ``second`` are new."""
        self.steps += 1
        for p, g, m, v in zip(self.parameters, gradients, self.first, self.second, strict=True):
            m.lerp_(g, first)
            v.lerp_(g.square(), second)
            rate = self.rate / (1 - (1 - first) ** self.steps)
            p.sub_((rate * m / ((v / (1 - (1 - second) ** self.steps)).sqrt() + 1e-8)).to(p))


def _aside(step: Callable[..., None], *inputs: Tensor) -> None:
    """Call in a side stream: CUDA asks for this before a step is recorded."""
    here, there = torch.cuda.current_stream(), torch.cuda.Stream()
    there.wait_stream(here)
    with torch.cuda.stream(there):
        step(*inputs)
    here.wait_stream(there)
