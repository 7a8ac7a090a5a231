"""Several processes that train one model: each on its part of the batch, with the average of their gradients.

Gradients are averaged explicitly, after the backward pass, by one all-reduce. PyTorch's wrapper for this counts on a
model being called through `forward`; a registration algorithm is called through `both`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Team:
    """The processes that work together, and which of them this one is."""

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> Team:
        """That of `torch.distributed`, where it is initialised; else this process alone."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes files and speaks."""
        return self.rank == 0

    def part(self, batch: Tensor) -> Tensor:
        """Every `size`-th item of the joined batch, beginning with the `rank`-th: this process's part of it."""
        if len(batch) % self.size:
            raise ValueError(f"a batch of {len(batch)} cannot be shared by {self.size} processes; expected a multiple")
        return batch[self.rank :: self.size]

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors, of the same shapes on every process, by their mean over the processes."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        dist.all_reduce(flat)
        flat /= self.size
        with torch.no_grad():
            for tensor, mean in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(mean.view_as(tensor))

    def copy_from_leader(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by those of the leading process."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    def leader_says(self, answer: bool, device: torch.device) -> bool:
        """The leading process's answer, for what each would decide differently, such as whether time is up."""
        if self.size == 1:
            return answer
        said = torch.tensor(answer, dtype=torch.int32, device=device)
        dist.broadcast(said, src=0)
        return bool(said)

    def leave(self) -> None:
        """Part, when all is done."""
        if self.size > 1:
            dist.barrier()
            dist.destroy_process_group()

    def wait(self) -> None:
        """Go on when all have come here."""
        if self.size > 1:
            dist.barrier()


def shared(draw: Callable[[torch.Generator], tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """A function that draws the joined batch, as one that draws this process's part of it."""

    def own(generator: torch.Generator) -> tuple[Tensor, ...]:
        team = Team.current()
        return tuple(team.part(drawn) for drawn in draw(generator))

    return own


def processes(devices: int, nodes: int) -> tuple[int, int]:
    """How many there will be on each machine, and how many machines: what is asked for, or what torchrun says."""
    if devices < 1 or nodes < 1:
        raise ValueError(f"devices is {devices} and nodes is {nodes}; expected 1 or more of each")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return local, int(os.environ["WORLD_SIZE"]) // local
    return devices, nodes


def launch(device: torch.device, devices: int = 1, nodes: int = 1) -> tuple[Team, torch.device]:
    """Start the other processes, or join those that torchrun or a cluster's scheduler has started.

    Gives the team and this process's device. With `devices=1` and `nodes=1`, outside of torchrun, nothing happens.
    Otherwise lightning-fabric runs this program again, with the same arguments, once for each further device.
    """
    devices, nodes = processes(devices, nodes)
    if devices * nodes == 1:
        return Team(), device
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"several processes cannot share {device}; expected 'cuda' or 'cpu'")
    if device.type == "cuda" and devices > torch.cuda.device_count():
        raise ValueError(f"devices is {devices}, but there are {torch.cuda.device_count()} GPUs here")
    try:
        from lightning_fabric import Fabric
    except ImportError as error:
        raise ImportError("several devices need lightning-fabric: pip install 'carlreg[train]'") from error
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    fabric = Fabric(accelerator=device.type, devices=devices, num_nodes=nodes, strategy="ddp")
    fabric.launch()
    return Team.current(), fabric.device
