"""Several processes that train one model: each takes its part of the batch, and gradients are averaged.

Gradients are averaged explicitly, by one all-reduce after the backward pass. PyTorch's DistributedDataParallel relies
on a model being called through `forward`; a registration algorithm is called through `both`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from carlreg.errors import CarlError, DependencyError, InputError
from carlreg.training.batches import Draw

TIMEOUT = timedelta(hours=12)
"""How long processes wait for each other: the first one may be preparing images, or validating."""


class TrainingError(CarlError, RuntimeError):
    """A run that cannot continue. Its last good checkpoint is on disk."""


@contextmanager
def _collective() -> Iterator[None]:
    """Report the loss of another process, for which PyTorch only states that the connection was closed."""
    try:
        yield
    except RuntimeError as error:
        raise TrainingError("another process of this run has ended; its own message says why") from error


@dataclass(frozen=True)
class Team:
    """The processes that train together, and the rank of this one."""

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> Team:
        """The team of `torch.distributed` if it is initialised, otherwise this process alone."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files and prints messages."""
        return self.rank == 0

    def part(self, batch: Tensor) -> Tensor:
        """This process's part of the joint batch: every `size`-th item, starting with the `rank`-th."""
        check_batch(len(batch), self.size)
        return batch[self.rank :: self.size]

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors, which have the same shapes on every process, by their mean over the processes."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        with _collective():
            dist.all_reduce(flat)
        flat /= self.size
        with torch.no_grad():
            for tensor, mean in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(mean.view_as(tensor))

    @_collective()
    def copy_from_leader(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by those of the leading process."""
        for tensor in tensors if self.size > 1 else ():
            dist.broadcast(tensor.detach(), src=0)

    def as_leader(self, answer: bool, device: torch.device) -> bool:
        """The leading process's value, for something that could differ between processes."""
        flag = torch.tensor(answer, dtype=torch.int32, device=device)
        self.copy_from_leader([flag])
        return bool(flag)

    @_collective()
    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()

    def shut_down(self) -> None:
        """Wait for all processes, then destroy the process group."""
        if self.size > 1:
            self.barrier()
            dist.destroy_process_group()


def check_batch(batch: int, processes: int) -> None:
    if batch % processes:
        raise InputError(f"a batch of {batch} cannot be shared by {processes} processes; expected a multiple")


def shared(draw: Draw) -> Draw:
    """Turn a function that draws the joint batch into one that draws this process's part of it."""
    return lambda generator: tuple(None if part is None else Team.current().part(part) for part in draw(generator))


def processes(devices: int, nodes: int) -> tuple[int, int]:
    """The number of processes per machine and of machines: as requested, or as torchrun has set them up."""
    if devices < 1 or nodes < 1:
        raise InputError(f"devices is {devices} and nodes is {nodes}; expected 1 or more of each")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return local, int(os.environ["WORLD_SIZE"]) // local
    return devices, nodes


def ranks(devices: int, nodes: int) -> tuple[int, int, int]:
    """This process's rank, its rank on this machine, and the number of processes, as they will be after `launch`."""
    devices, nodes = processes(devices, nodes)
    if devices * nodes == 1:
        return 0, 0, 1
    local = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    node = int(os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", os.environ.get("SLURM_NODEID", "0"))))
    return node * devices + local, local, devices * nodes


def launch(device: torch.device, devices: int = 1, nodes: int = 1) -> tuple[Team, torch.device]:
    """Start the other processes, or join those that torchrun or a cluster's scheduler has started.

    Returns the team and this process's device. With `devices=1` and `nodes=1`, outside of torchrun, nothing happens.
    Otherwise lightning-fabric runs this program again, with the same arguments, once for each further device.
    """
    devices, nodes = processes(devices, nodes)
    if devices * nodes == 1:
        return Team(), device
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"several processes cannot share {device}; expected 'cuda' or 'cpu'")
    if device.type == "cuda" and devices > torch.cuda.device_count():
        raise InputError(f"devices is {devices}, but this machine has {torch.cuda.device_count()} GPUs")
    try:
        from lightning_fabric import Fabric
        from lightning_fabric.strategies.ddp import DDPStrategy
    except ImportError as error:
        raise DependencyError("several devices need lightning-fabric: pip install 'carlreg[train]'") from error
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    fabric = Fabric(accelerator=device.type, devices=devices, num_nodes=nodes, strategy=DDPStrategy(timeout=TIMEOUT))
    fabric.launch()
    return Team.current(), fabric.device
