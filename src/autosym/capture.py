"""CUDA graphs: a step that works in place on the same tensors is recorded once and replayed, without Python or launches between kernels."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor


def beside(work: Callable[[], list[Tensor]], x: Tensor) -> Callable[[], list[Tensor]]:
    """Begin ``work`` on x; the function returned ends it. While a graph is recorded it has a stream of its own, so that
    what comes between runs at the same time (small kernels do not fill a GPU), and so do the backward passes of both."""
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
        t.record_stream(user)  # memory is not used again before that stream is done with it
    return join


WARM_UP = 3  # real steps, taken before recording: libraries choose their algorithms and allocate workspaces


class Captured:
    """``step(*inputs)``, replayed as a CUDA graph where inputs are on a GPU and of the shapes that come first; else called as it is.

    What cannot be recorded (a step that waits for the device, or moves data) is called as it is too, after one warning.
    """

    def __init__(self, step: Callable[..., None], wanted: bool = True):
        self.step, self.wanted = step, wanted
        self.inputs: tuple[Tensor, ...] | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls = 0

    def __call__(self, *inputs: Tensor) -> None:
        if not self.wanted or not all(t.is_cuda for t in inputs):
            return self.step(*inputs)
        if self.inputs is None:
            self.inputs = tuple(torch.empty_like(t) for t in inputs)
        if any(t.shape != kept.shape or t.dtype != kept.dtype for t, kept in zip(inputs, self.inputs, strict=True)):
            return self.step(*inputs)  # the last batch of an epoch
        if self.graph is None:
            self.calls += 1
            if self.calls <= WARM_UP:
                return self._aside(*inputs)
            self._record(self.inputs)
        if self.graph is None:
            return self.step(*inputs)
        for kept, t in zip(self.inputs, inputs, strict=True):
            kept.copy_(t, non_blocking=True)
        self.graph.replay()

    def _aside(self, *inputs: Tensor) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step(*inputs)
        torch.cuda.current_stream().wait_stream(stream)

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        graph, noise = torch.cuda.CUDAGraph(), torch.cuda.get_rng_state()
        try:
            with torch.cuda.graph(graph):
                self.step(*inputs)
            self.graph = graph
        except RuntimeError as error:
            self.wanted = False
            device = inputs[0].device
            generator = torch.cuda.default_generators[device.index]
            generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())  # the old one stays in capture
            torch.cuda.set_rng_state(noise, device)
            warnings.warn(
                f"a training step could not be recorded as a CUDA graph ({str(error).splitlines()[0]}), so each is launched anew, which is "
                "slower: does the model wait for the device (.item(), .tolist()) or move data to it in forward()?",
                stacklevel=4,
            )
