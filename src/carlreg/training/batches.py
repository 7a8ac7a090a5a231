"""The batches of a stage: drawn one after the other, on a GPU while the step before still runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from carlreg.errors import InputError


class Batch(NamedTuple):
    """The tensors of one training step."""

    moving: Tensor
    """(B, C, *shape), like `fixed`: the images that the network sees."""
    fixed: Tensor
    moving_labels: Tensor | None = None
    """(B, K, *shape), like `fixed_labels`: one map from 0 to 1 for each structure. Needed by stages with a
    `label_weight`."""
    fixed_labels: Tensor | None = None
    moving_target: Tensor | None = None
    """(B, C, *shape), like `fixed_target`: the images that the loss compares, if they differ from those that the
    network sees; for example the original scans if the network sees them with a random contrast."""
    fixed_target: Tensor | None = None

    @property
    def compared(self) -> tuple[Tensor, Tensor]:
        """The images that the loss compares."""
        moving = self.moving if self.moving_target is None else self.moving_target
        return moving, self.fixed if self.fixed_target is None else self.fixed_target

    @property
    def labels(self) -> tuple[Tensor, Tensor] | None:
        if self.moving_labels is None or self.fixed_labels is None:
            return None
        return self.moving_labels.float(), self.fixed_labels.float()


Draw = Callable[[torch.Generator], tuple[Tensor | None, ...]]
"""Draw a `Batch`, or a tuple that starts like one: two images, then two label maps, then two targets. All randomness
must come from the generator, which is a CPU generator. On a GPU the function is called in a background thread, on a
stream of its own, while the previous step runs.

If several processes train together, each draws its own part of the joint batch, with generators in the same state, and
must leave them in the same state: `carlreg.training.distributed.shared` turns a function that draws the joint batch
into such a function.
"""


class Batches:
    """The batches of a stage, each determined by the seed of its step; on a GPU they can be drawn ahead.

    Nothing may be drawn during the capture of a CUDA graph: allocations in another thread would break it.
    """

    def __init__(self, draw: Draw, seed: Callable[[int], int], steps: int, device: torch.device) -> None:
        self.draw, self.seed, self.steps, self.device = draw, seed, steps, device
        self.ahead: tuple[int, Future[tuple[Batch, torch.cuda.Event]]] | None = None
        on_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="draw") if on_gpu else None

    def take(self, step: int) -> Batch:
        """The batch of a step: the one drawn ahead, or a new one. An error of the background thread is raised here."""
        ahead, self.ahead = self.ahead, None
        if ahead is None or ahead[0] != step:
            batch = self._draw(step)
        else:
            batch, drawn = ahead[1].result()
            current = torch.cuda.current_stream(self.device)
            current.wait_event(drawn)
            for tensor in batch:
                if tensor is not None:
                    tensor.record_stream(current)  # keeps its memory from being reused before this stream is done
        if self.worker is not None:
            self.begun = torch.cuda.Event()
            self.begun.record(torch.cuda.current_stream(self.device))
        return batch

    def draw_ahead(self, step: int) -> None:
        """Start drawing the batch of the next step. Does nothing on a CPU or after the last step."""
        if self.worker is not None and step < self.steps:
            self.ahead = step, self.worker.submit(self._draw_ahead, step, self.begun)

    def wait(self) -> None:
        """Wait until the background thread is idle."""
        if self.ahead is not None:
            self.ahead[1].exception()

    def _draw_ahead(self, step: int, begun: torch.cuda.Event) -> tuple[Batch, torch.cuda.Event]:
        assert self.stream is not None
        begun.synchronize()  # so that at most one batch is waiting
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            batch = self._draw(step)
            drawn = torch.cuda.Event()
            drawn.record(self.stream)
        return batch, drawn

    def _draw(self, step: int) -> Batch:
        drawn = self.draw(torch.Generator().manual_seed(self.seed(step)))
        if len(drawn) not in (2, 4, 6):
            raise InputError(f"{len(drawn)} tensors were drawn; expected 2 images, then 2 label maps, then 2 targets")
        return Batch(*(None if part is None else part.to(self.device, non_blocking=True) for part in drawn))  # type: ignore[arg-type]
