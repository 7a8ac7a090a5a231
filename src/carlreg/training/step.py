"""One training step: loss, gradients and Adam, on a GPU replayed as a CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from carlreg.errors import InputError
from carlreg.fast.precision import Precision, mixed_precision
from carlreg.geometry.fitting import random_rotation
from carlreg.geometry.jacobian import folding
from carlreg.geometry.transforms import Affine
from carlreg.model.algorithms import Augmented, RegistrationAlgorithm
from carlreg.model.zoo import first_step
from carlreg.objective.losses import Loss, registration_loss
from carlreg.training.distributed import Team
from carlreg.training.stages import Stage

WARM_UP = 3
"""Steps before a graph is captured, in which kernels are chosen and compiled."""


class TrainingStep:
    """One training step of a stage, for `train` and for loops of your own.

    Call it with the images, the learning rate and a seed for the randomness of the loss, which includes rotations;
    `targets` are the images that the loss compares, if they differ from those that the network sees. `optimizer` is a
    state of Adam to resume from. A step whose gradients are not finite changes nothing; `skipped` counts those steps.

    >>> step = TrainingStep(model, Stage(1000), device=device)
    >>> loss = step(moving, fixed, rate=1e-4, seed=0)
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
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm = 0
        captured = on_gpu and graphs is not False and self.team.size == 1
        # cuBLAS keeps a workspace per stream: graphs captured on one stream could not be replayed side by side.
        self.stream = torch.cuda.Stream() if captured else None

    @property
    def is_captured(self) -> bool:
        """Whether no graph is left to capture."""
        return self.stream is None or self.graph is not None

    def __call__(
        self,
        moving: Tensor,
        fixed: Tensor,
        rate: float,
        seed: int,
        labels: tuple[Tensor, Tensor] | None = None,
        targets: tuple[Tensor, Tensor] | None = None,
    ) -> Loss:
        if bool(self.stage.label_weight) != (labels is not None):
            raise InputError(
                f"labels were {'not ' * (labels is None)}given, and the stage's label weight is "
                f"{self.stage.label_weight:g}; expected labels if and only if there is a weight"
            )
        self.rate.fill_(rate)
        self.generator.manual_seed(seed)
        inputs = {"moving": moving, "fixed": fixed}
        if self.stage.rotate:
            inputs["rotations"] = _rotations(moving, fixed, seed, self.team)
        if labels is not None:
            inputs |= {"moving_labels": labels[0], "fixed_labels": labels[1]}
        if targets is not None:
            inputs |= {"moving_target": targets[0], "fixed_target": targets[1]}
        if self.stream is None:
            return self._run(**inputs)
        if self.graph is None and self.warm < WARM_UP:
            return self._warm_up(self.stream, inputs)
        return self._replay(self.graph or self._capture(inputs), inputs)

    def folds(self) -> float:
        """Folds of the last step's first pair in per cent; NaN if an axis is too short for a derivative."""
        return math.nan if min(self.image.shape[2:]) < 3 else folding(self.phi, self.image)

    def _warm_up(self, stream: torch.cuda.Stream, inputs: dict[str, Tensor]) -> Loss:
        self.warm += 1
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = self._run(**inputs)
        torch.cuda.current_stream().wait_stream(stream)
        return result

    def _capture(self, inputs: dict[str, Tensor]) -> torch.cuda.CUDAGraph:
        self.inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(self.generator)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.result = self._run(**self.inputs)
        return self.graph

    def _replay(self, graph: torch.cuda.CUDAGraph, inputs: dict[str, Tensor]) -> Loss:
        first, now = ({name: tuple(part.shape) for name, part in parts.items()} for parts in (self.inputs, inputs))
        if first != now:
            raise InputError(
                f"a step has inputs {now} and the first had {first}; expected the same shapes throughout a stage, or "
                "graphs=False"
            )
        for name, captured in self.inputs.items():
            captured.copy_(inputs[name])
        graph.replay()
        return self.result

    def _run(
        self,
        moving: Tensor,
        fixed: Tensor,
        rotations: Tensor | None = None,
        moving_labels: Tensor | None = None,
        fixed_labels: Tensor | None = None,
        moving_target: Tensor | None = None,
        fixed_target: Tensor | None = None,
    ) -> Loss:
        algorithm = self.model if rotations is None else Augmented(self.model, lambda _: Affine(rotations))
        labels = [part.float() for part in (moving_labels, fixed_labels) if part is not None]
        self.optimizer.zero_grad(set_to_none=True)
        statistics = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        before = torch._foreach_add(statistics, 0) if statistics else []
        with mixed_precision(moving.device, self.precision):
            phi, inverse = algorithm.both(moving, fixed)
        loss = registration_loss(
            phi,
            inverse,
            moving if moving_target is None else moving_target,
            fixed if fixed_target is None else fixed_target,
            similarity=self.stage.similarity,
            regularity=self.stage.regularity,
            weight=self.stage.weight,
            generator=self.generator,
            labels=(labels[0], labels[1]) if labels else None,
            label_weight=self.stage.label_weight,
        )
        loss.total.backward()
        self.phi, self.image = phi[:1].detach(), fixed[:1]
        return self._update(loss, statistics, before)

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


def _rotations(moving: Tensor, fixed: Tensor, seed: int, team: Team) -> Tensor:
    """R of each moving and Q of each fixed image, (2B, D, D+1), one after the other as `both` expects them."""
    if moving.shape != fixed.shape:
        raise InputError(
            f"moving has shape {tuple(moving.shape)} and fixed {tuple(fixed.shape)}; expected equal shapes to rotate"
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = [
        random_rotation(image.shape[2:], team.size * len(image), like=image, generator=generator).matrix
        for image in (moving, fixed)
    ]
    return torch.cat([team.part(matrices) for matrices in drawn])


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """All values in one vector: one operation on it is cheaper than one per tensor."""
    return torch.cat([tensor.flatten() for tensor in tensors])
