"""One training step: loss, gradients and Adam, on a GPU replayed as a CUDA graph."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from carlreg.errors import InputError
from carlreg.fast.precision import Precision, mixed_precision
from carlreg.geometry.fitting import random_rotation
from carlreg.geometry.jacobian import folding
from carlreg.geometry.transforms import Affine, Transform
from carlreg.model.algorithms import Augmented, RegistrationAlgorithm, TwoStep
from carlreg.model.zoo import first_step
from carlreg.objective.losses import Loss, find_similarity, registration_loss
from carlreg.training.batches import Batch
from carlreg.training.distributed import Team
from carlreg.training.stages import Stage

Inputs = tuple[Tensor | None, ...]
"""The tensors of a batch, and its rotations."""
Shapes = tuple[tuple[int, ...] | None, ...]
"""The shapes of the inputs: each combination is captured as a graph of its own."""
WARM_UP, MOST_GRAPHS = 3, 8
"""Steps before a graph is captured, in which kernels are chosen and compiled; and the most graphs, since each keeps its
memory."""


class Captured(NamedTuple):
    """A step as a CUDA graph, and the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Inputs
    result: Loss
    phi: Transform
    image: Tensor


class TrainingStep:
    """One training step of a stage, for `train` and for loops of your own.

    Call it with a batch, the learning rate and a seed for the randomness of the loss, which includes rotations.
    `optimizer` is a state of Adam to resume from. A step whose gradients are not finite changes nothing; `skipped`
    counts those steps.

    >>> step = TrainingStep(model, Stage(1000), device=device)
    >>> loss = step(Batch(moving, fixed), rate=1e-4, seed=0)
    """

    def __init__(
        self,
        model: RegistrationAlgorithm,
        stage: Stage,
        *,
        device: torch.device,
        precision: Precision = "auto",
        graphs: bool | None = None,
        optimizer: dict[str, Any] | None = None,
        team: Team | None = None,
    ) -> None:
        self.model = first_step(model) if stage.first_step_alone else model
        self.stage, self.precision, self.team = stage, precision, team or Team()
        on_gpu = device.type == "cuda"
        self.rate = torch.zeros((), device=device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.rate, fused=True, capturable=on_gpu)
        if optimizer is not None:
            self.optimizer.load_state_dict(optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        self.generator = torch.Generator(device)
        self.skipped, self.skipped_in_a_row = (torch.zeros((), dtype=torch.long, device=device) for _ in range(2))
        self.captured: dict[Shapes, Captured] = {}
        self.warm: Counter[Shapes] = Counter()
        captured = on_gpu and graphs is not False and self.team.size == 1
        # cuBLAS keeps a workspace per stream: graphs captured on one stream could not be replayed side by side.
        self.stream = torch.cuda.Stream() if captured else None

    @property
    def is_captured(self) -> bool:
        """Whether batches of the last step's shapes are replayed, so that others may be drawn during the next one."""
        return self.stream is None or self.shapes in self.captured

    def __call__(self, batch: Batch, rate: float, seed: int) -> Loss:
        if not self.stage.label_weight:
            batch = batch._replace(moving_labels=None, fixed_labels=None)
        elif batch.labels is None:
            raise InputError("the batch has no labels, but the stage has a label weight; draw images, then labels")
        return self.launch((*batch, _rotations(batch, seed, self.team) if self.stage.rotate else None), rate, seed)

    def launch(self, inputs: Inputs, rate: float, seed: int) -> Loss:
        """Run a step on these tensors, by the graph of their shapes if there is one."""
        self.rate.fill_(rate)
        self.generator.manual_seed(seed)
        if self.stream is None:
            return self._run(inputs)
        self.shapes = tuple(None if part is None else tuple(part.shape) for part in inputs)
        if self.shapes not in self.captured:
            if len(self.captured) == MOST_GRAPHS:
                raise InputError(
                    f"batches have more than {MOST_GRAPHS} different shapes, the last {self.shapes[:-1]}; expected "
                    "fewer, or graphs=False"
                )
            if self.warm[self.shapes] < WARM_UP:
                return self._warm_up(self.stream, inputs)
            self.captured[self.shapes] = self._capture(inputs)
        return self._replay(self.captured[self.shapes], inputs)

    def folds(self) -> float:
        """Folds of the last step's first pair in per cent; NaN if an axis is too short for a derivative."""
        return math.nan if min(self.image.shape[2:]) < 3 else folding(self.phi, self.image)

    def _warm_up(self, stream: torch.cuda.Stream, inputs: Inputs) -> Loss:
        self.warm[self.shapes] += 1
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = self._run(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        return result

    def _capture(self, inputs: Inputs) -> Captured:
        copies = tuple(None if tensor is None else tensor.clone() for tensor in inputs)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph, stream=self.stream):
            result = self._run(copies)
        return Captured(graph, copies, result, self.phi, self.image)

    def _replay(self, captured: Captured, inputs: Inputs) -> Loss:
        for copy, tensor in zip(captured.inputs, inputs, strict=True):
            if copy is not None and tensor is not None:
                copy.copy_(tensor)
        captured.graph.replay()
        self.phi, self.image = captured.phi, captured.image
        return captured.result

    def _run(self, inputs: Inputs) -> Loss:
        *parts, rotations = inputs
        batch = Batch(*parts)  # type: ignore[arg-type]
        algorithm = self._repeated(batch.fixed)
        if rotations is not None:
            algorithm = Augmented(algorithm, lambda _: Affine(rotations))
        self.optimizer.zero_grad(set_to_none=True)
        statistics = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        before = torch._foreach_add(statistics, 0) if statistics else []
        with mixed_precision(batch.moving.device, self.precision):
            phi, inverse = algorithm.both(batch.moving, batch.fixed)
        loss = registration_loss(
            phi,
            inverse,
            *batch.compared,
            similarity=find_similarity(self.stage.similarity, self.stage.window),
            regularity=self.stage.regularity,
            weight=self.stage.weight,
            generator=self.generator,
            labels=batch.labels,
            label_weight=self.stage.label_weight,
        )
        loss.total.backward()
        self.phi, self.image = phi[:1].detach(), batch.fixed[:1]
        return self._update(loss, statistics, before)

    def _repeated(self, image: Tensor) -> RegistrationAlgorithm:
        """The network, applied as often as the stage has it for such images."""
        algorithm, most = self.model, self.stage.once_above
        if most is None or image[0, 0].numel() <= most:
            for _ in range(self.stage.passes - 1):
                algorithm = TwoStep(algorithm, self.model)
        return algorithm

    def _update(self, loss: Loss, statistics: list[Tensor], before: Sequence[Tensor]) -> Loss:
        """Average gradients over all processes and step, unless something is not finite."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        parts = (loss.total, loss.similarity, loss.regularity, loss.label_loss)
        values = [part.detach().clone() for part in parts if part is not None]
        self.team.average([*gradients, *statistics, *values])  # before the check, so that all skip the same steps
        finite = torch.stack(torch._foreach_norm([*gradients, *statistics])).isfinite().all()
        self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]  # Adam skips the step
        self.optimizer.step()
        if statistics:  # BatchNorm's must not keep a trace of a skipped step either
            kept = torch.where(finite, _joined(statistics), _joined(before))
            torch._foreach_copy_(statistics, list(kept.split([buffer.numel() for buffer in statistics])))
        self.skipped += ~finite
        self.skipped_in_a_row.add_(1).mul_(~finite)
        return Loss(*values)


def _rotations(batch: Batch, seed: int, team: Team) -> Tensor:
    """R of each moving and Q of each fixed image, (2B, D, D+1), one after the other as `both` expects them."""
    shapes = [tuple(image.shape) for image in batch[:2]]
    if shapes[0] != shapes[1]:
        raise InputError(f"moving has shape {shapes[0]} and fixed {shapes[1]}; expected equal shapes to rotate them")
    generator = torch.Generator().manual_seed(seed)
    drawn = [
        random_rotation(image.shape[2:], team.size * len(image), like=image, generator=generator).matrix
        for image in (batch.moving, batch.fixed)
    ]
    return torch.cat([team.part(matrices) for matrices in drawn])


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """All values in one vector: one operation on it is cheaper than one per tensor."""
    return torch.cat([tensor.flatten() for tensor in tensors])
