"""What the processes of the tests of several processes do; each job returns what JSON holds, the same in every process."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autosym
from autosym.evidence import laplace, whole
from autosym.nn import nets
from autosym.runtime import processes
from searched import pictures

FORKED = multiprocessing.get_context("forkserver")  # each process a fork of one that has imported torch already
FORKED.set_forkserver_preload(["autosym"])


def problem(count=37, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 1, 4, 4, generator=generator).to(dtype)
    y = torch.randint(3, (count,), generator=generator)
    torch.manual_seed(1)
    net = nets.build("f-fc+conv", (1, 4, 4), 3, width=2, channels=(1, 2), strides=(1, 2), hidden=2).to(dtype)
    return net, x, y


def gradients(net, data, **options):
    at = laplace.at(net, data, **options)
    prior = autosym.Prior(at.names, 0.7)
    value = at(prior).log_evidence
    value.backward()
    return {
        "evidence": value.item(),
        "gradient": prior.log_precision.grad.tolist(),
        "samples": at.samples,
        "classes seen": at.classes_seen,
    }


def evidence():
    net, x, y = problem()
    batches = [(x[i : i + 5], y[i : i + 5]) for i in range(0, len(x), 5)]
    return {
        "exact": gradients(net, (x, y)),
        "sampled": gradients(net, (x, y), sampled=True, seed=3),
        "subset": gradients(net, (x, y), sampled=True, subset=20, seed=3),
        "small batches": gradients(net, (x, y), batch_size=3),
        "a list of batches": gradients(net, batches),
        "a loader": gradients(net, DataLoader(TensorDataset(x, y), 6)),
        "two samples": gradients(net, (x[:2], y[:2])),
    }


def whole_evidence():
    """By every route, of the whole network."""
    net, x, y = problem()
    at = laplace.at(net, (x, y))
    prior = autosym.Prior(at.names, 0.7)
    routes = {how: whole.at(net, (x, y), at, prior, how=how) for how in ("weights", "rows", "probes")}
    return {how: [w.evidence.log_evidence.item(), *w.gamma.tolist()] for how, w in routes.items()}


def discovered(folder=None):
    """A search whose runs processes share."""
    torch.set_num_threads(1)
    form = {"width": 4, "channels": (1, 2), "strides": (2, 2), "hidden": 2}
    options = {"network": form, "epochs": 3, "seeds": 2, "batch_size": 16, "resume": folder}
    answer = autosym.discover("f-fc+conv", pictures(30), "translations", **options)
    weights = sum(t.double().sum().item() for t in answer.fit.weights.values())
    return {**answer.as_dict(), "seconds": 0, "weights": weights}


def wrapped():
    """As a user of DDP has them: a wrapped model, and a loader that shows each process a padded part."""
    net, x, y = problem()
    dataset = TensorDataset(x, y)
    if dist.is_initialized():
        net, sampler = nn.parallel.DistributedDataParallel(net), DistributedSampler(dataset)
        assert sampler.total_size > len(dataset)
        loader = DataLoader(dataset, 4, sampler=sampler)
    else:
        loader = DataLoader(dataset, 4)
    return gradients(net, loader)


def fitted(folder=None):
    net, x, y = problem()
    net.register_buffer("mark", torch.arange(3.0))
    if dist.is_initialized() and dist.get_rank():
        with torch.no_grad():
            for tensor in (next(net.parameters()), net.mark):
                tensor.add_(1)  # of the first process all get the same
    options = {"checkpoint": f"{folder}/run.safetensors", "history": f"{folder}/history.jsonl"} if folder else {}
    noisy = lambda x, generator: x + 0.1 * torch.randn(x.shape, dtype=x.dtype, generator=generator)  # noqa: E731
    fit = autosym.fit(net, (x, y), epochs=6, batch_size=9, burn_in=1, every=2, augment=noisy, clip=1.0, **options)
    return {
        "evidence": fit.evidence.log_evidence.item(),
        "precision": list(fit.prior.precision().values()),
        "losses": [line["loss"] for line in fit.history],
        "weights": [float(p.detach().sum()) for p in fit.model.parameters()],
        "buffers": fit.model.mark.tolist(),
        "end": [fit.epoch, fit.chosen_by == "whole"],
    }


def sharded_fit():
    """A loader of its own for each process, whose batches are a third (or half) of the global one."""
    net, x, y = problem(36)
    dataset = TensorDataset(x, y)
    parts = dist.get_world_size() if dist.is_initialized() else 1
    sampler = DistributedSampler(dataset, shuffle=False) if parts > 1 else None
    fit = autosym.fit(net, DataLoader(dataset, 12 // parts, sampler=sampler), epochs=3, burn_in=0, every=1)
    return {"losses": [line["loss"] for line in fit.history], "precision": list(fit.prior.precision().values())}


def last():
    return dist.get_rank() == dist.get_world_size() - 1


def batched(x, y, size=6):
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


def message(work, *arguments, **options):
    """What an error says; None where there is none."""
    try:
        work(*arguments, **options)
    except (ValueError, processes.Lost) as error:
        return f"{type(error).__name__}: {error}"
    return None


def faulty_evidence():
    """What is wrong is in the last process only."""
    net, x, y = problem(36)
    wrong_label, not_finite, data = y.clone(), x.clone(), batched(x, y)
    if last():
        wrong_label[1], not_finite[1] = 7, torch.nan
        data.append(data[0])
    return {
        "label": message(laplace.at, net, (x, wrong_label)),
        "nan": message(laplace.at, net, (not_finite, y)),
        "extra batch": message(laplace.at, net, data),
        "mended": message(laplace.at, net, (x, y)),
    }


def extra_batch():
    net, x, y = problem(36)
    return {"error": message(autosym.fit, net, batched(x, y) + batched(x, y)[:1] * last(), epochs=3, burn_in=0)}


def one_nan():
    """In a batch of the last process, where others are already waiting for its gradient."""
    net, x, y = problem(36)
    x[20] = torch.nan if last() else 0.0
    return {"error": message(autosym.fit, net, batched(x, y), epochs=3)}


def killed_in_evidence():
    """The last process ends without a word, while the others wait for its sums."""
    net, x, y = problem()
    if last():
        net.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    return {"error": message(laplace.at, net, (x, y))}


def killed(folder):
    """The last process ends without a word, in the second epoch."""
    net, x, y = problem()

    def augment(x, generator):
        augment.calls += 1
        if augment.calls == 2 and last():
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    augment.calls = 0
    options = {"checkpoint": f"{folder}/run.safetensors", "checkpoint_seconds": 0}
    return {"error": message(autosym.fit, net, (x, y), epochs=50, batch_size=9, augment=augment, **options)}


FAULTY = (faulty_evidence, extra_batch, one_nan, killed_in_evidence, killed)
JOBS = {job.__name__: job for job in (evidence, whole_evidence, wrapped, fitted, sharded_fit, discovered, *FAULTY)}


def _work(rank, parts, folder, name, arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{name}", rank=rank, world_size=parts)
    result = JOBS[name](*arguments)
    (Path(folder) / f"{name}-{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def run(name, parts, folder, *arguments, join=True):
    """The results of a job in ``parts`` processes, by rank; None of one that ended without any."""
    context = mp.start_processes(_work, (parts, str(folder), name, arguments), parts, join=False, start_method="forkserver")
    for process in context.processes:
        process.join(300)
        process.kill()
    files = [Path(folder) / f"{name}-{rank}.json" for rank in range(parts)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]
