"""A script under accelerate, as its users write it: the evidence of a prepared model on a prepared loader."""

import json
import sys

from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import workers

accelerator = Accelerator(cpu=True)
net, x, y = workers.problem()
net, loader = accelerator.prepare(net, DataLoader(TensorDataset(x, y), 5))
found = workers.gradients(net, loader)
if accelerator.is_main_process:
    json.dump(found | {"processes": accelerator.num_processes}, open(sys.argv[1], "w"))  # noqa: SIM115
accelerator.wait_for_everyone()
net, loader = accelerator.free_memory(net, loader)  # the wrapped model holds the group of processes,
accelerator.end_training()  # and a process that ends while a group lives may abort
