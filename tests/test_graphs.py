"""Captured work that pairs of a list share. Without a GPU, a fake capture repeats the computation itself: on tensors
of the first pair, filled anew for the second."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from carlreg import Identity, carl, optimize_fields
from carlreg.fast.graphs import Graphs
from carlreg.geometry.transforms import DisplacementField
from carlreg.model import loaded as loaded_module
from carlreg.model.loaded import LoadedModel
from carlreg.objective.fields import LEVELS
from carlreg.objective.guide import Guide
from carlreg.objective.losses import Loss
from carlreg.registration.api import register
from carlreg.registration.both import both_maps

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, GPU])]


class Counted:
    """A capture that repeats the computation, and counts."""

    def __init__(self) -> None:
        self.captures = 0

    def __call__(self) -> Callable[[Callable[[], None]], Callable[[], None]]:
        def capture(run: Callable[[], None]) -> Callable[[], None]:
            self.captures += 1
            run()  # the warm-up
            return run

        return capture


class Addition:
    def __init__(self, value: float = 0.0) -> None:
        self.value = torch.tensor(value)

    def run(self) -> None:
        self.value.add_(1)


def shared(device: str, most: int = 8) -> Graphs:
    return Graphs(most) if device == "cuda" else Graphs(most, Counted())


def captures(graphs: Graphs) -> int:
    counted = graphs._new_capture
    assert isinstance(counted, Counted)
    return counted.captures


def texture(shape: tuple[int, ...], shift: float, seed: int) -> Tensor:
    """Waves of at least 12 voxels."""
    axes = torch.meshgrid(*(torch.arange(n) - shift for n in shape), indexing="ij")
    generator = torch.Generator().manual_seed(seed)
    waves = (2 * torch.rand(len(shape), 30, generator=generator) - 1) * 0.3
    values = torch.cos(torch.stack(axes, dim=-1) @ waves + 6.28 * torch.rand(30, generator=generator)).sum(-1)
    return (0.5 + values / 40)[None, None]


def pair(device: str, seed: int) -> tuple[Tensor, Tensor]:
    return texture((40, 24, 36), 2.0, seed).to(device), texture((44, 32, 40), 0.0, seed).to(device)


def optimized(images: tuple[Tensor, Tensor], graphs: Graphs | None = None, **options: Any) -> tuple[Tensor, list[Any]]:
    moving, fixed = images
    start = DisplacementField(torch.full((1, 3, 4, 4, 4), 0.01, device=fixed.device))
    settings: dict[str, Any] = {"steps": 4, "levels": 2, **options}
    result = optimize_fields(start, Identity(), moving, fixed, graphs=graphs, **settings)
    maps = [phi.on_grid_of(image) for phi, image in ((result.transform, fixed), (result.inverse, moving))]
    return torch.cat([part.flatten() for part in maps]), result.losses


# ---- fields ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("similarity", ["lncc", "lncc2"])
def test_pairs_that_share_graphs_have_the_bits_of_pairs_alone(device: str, similarity: str) -> None:
    graphs, seeds = shared(device), (1, 2, 1)
    alone = [optimized(pair(device, seed), similarity=similarity) for seed in seeds]
    together = []
    for seed in seeds:
        images = pair(device, seed)
        together.append(optimized(images, graphs, similarity=similarity))
        for image in images:  # what is left of a pair must not reach the next one
            image.fill_(torch.nan)
    for (fields, losses), (expected, expected_losses) in zip(together, alone, strict=True):
        assert fields.equal(expected)
        assert losses == expected_losses
    assert not together[0][0].equal(together[1][0])
    assert len(graphs) == 2  # one for each level
    if device == "cpu":
        assert captures(graphs) == 2


@pytest.mark.parametrize("device", DEVICES)
def test_masks_of_a_pair_do_not_reach_the_next_one(device: str) -> None:
    graphs = shared(device)
    moving, fixed = pair(device, 1)
    masks = {"fixed_mask": (torch.arange(40, device=device) < 30).float().expand_as(fixed)}
    masked = optimized((moving, fixed), graphs, **masks)
    plain = optimized((moving, fixed), graphs)
    assert masked[0].equal(optimized((moving, fixed), **masks)[0])
    assert plain[0].equal(optimized((moving, fixed))[0])
    assert not masked[0].equal(plain[0])


@pytest.mark.parametrize("device", DEVICES)
def test_losses_that_a_callback_keeps_stay_as_they_were(device: str) -> None:
    graphs, seen = shared(device), list[Loss]()
    _, losses = optimized(pair(device, 1), graphs, levels=1, callback=lambda _, loss: seen.append(loss))
    optimized(pair(device, 2), graphs, levels=1)
    assert [float(loss.total) for loss in seen] == [loss["total"] for loss in losses]


@pytest.mark.parametrize(
    "other",
    [
        {"weight": 1.0},
        {"steps": 5},
        {"seed": 1},
        {"window": 3.0},
        {"fixed_spacing": (1.0, 1.0, 1.5)},
        {"similarity": "lncc2"},
    ],
)
def test_other_settings_are_captured_anew(other: dict[str, Any]) -> None:
    graphs = shared("cpu")
    optimized(pair("cpu", 1), graphs, levels=1)
    result = optimized(pair("cpu", 2), graphs, **({"levels": 1} | other))
    assert captures(graphs) == len(graphs) == 2
    assert result[0].equal(optimized(pair("cpu", 2), **({"levels": 1} | other))[0])


def test_other_shapes_are_captured_anew() -> None:
    graphs = shared("cpu")
    optimized(pair("cpu", 1), graphs, levels=1)
    moving, fixed = (image[..., :32] for image in pair("cpu", 1))
    result = optimized((moving, fixed), graphs, levels=1)
    assert len(graphs) == 2
    assert result[0].equal(optimized((moving, fixed), levels=1)[0])


def test_guided_pairs_are_not_kept() -> None:
    """Their points are part of the captured step."""
    graphs, at = shared("cpu"), torch.tensor([[0.5, 0.5, 0.5]])
    first, second = (
        optimized(pair("cpu", 1), graphs, levels=1, guide=Guide(at, at + move))[0] for move in (0.02, -0.02)
    )
    assert len(graphs) == 0
    assert not first.equal(second)
    assert second.equal(optimized(pair("cpu", 1), levels=1, guide=Guide(at, at - 0.02))[0])


# ---- the network ----------------------------------------------------------------------------------------------------


def network(device: str) -> Any:
    torch.manual_seed(0)
    model = carl(3, width=8, unet_down=(4, 8), unet_up=(8, 4))
    for parameter in model.parameters():  # the last convolutions of new U-Nets are zero
        torch.nn.init.normal_(parameter, std=0.1)
    return model.to(device).eval()


def maps(model: Any, seed: int, device: str, graphs: Graphs | None = None) -> Tensor:
    moving, fixed = (texture((24, 24, 24), shift, seed).to(device) for shift in (1.0, 0.0))
    return torch.cat([phi.on_grid_of(fixed) for phi in both_maps(model, moving, fixed, graphs)])


@pytest.mark.parametrize("device", DEVICES)
def test_a_shared_network_gives_the_maps_of_a_plain_one(device: str) -> None:
    model, graphs = network(device), shared(device)
    first = maps(model, 1, device, graphs)
    assert len(graphs) == 0  # a single pair is not worth a capture
    second = maps(model, 2, device, graphs)
    third = maps(model, 1, device, graphs)
    assert len(graphs) == 1
    expected = [maps(model, seed, device) for seed in (1, 2, 1)]
    assert not expected[0].equal(expected[1])
    for found, plain in zip((first, second, third), expected, strict=True):
        assert torch.allclose(found, plain, rtol=0, atol=0 if device == "cpu" else 1e-6)
    assert maps(model, 2, device, graphs).equal(second)


@pytest.mark.parametrize("device", DEVICES)
def test_changed_and_moved_weights_are_used(device: str) -> None:
    model, graphs = network(device), shared(device)
    for seed in (1, 2):
        maps(model, seed, device, graphs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert torch.allclose(maps(model, 1, device, graphs), maps(model, 1, device), rtol=0, atol=1e-6)
    for parameter in model.parameters():  # as moving to a CPU and back does
        parameter.data = parameter.data * 1.1
    for seed in (1, 2, 1):
        assert torch.allclose(maps(model, seed, device, graphs), maps(model, seed, device), rtol=0, atol=1e-6)


def test_a_network_of_the_users_is_never_captured() -> None:
    class Own(type(network("cpu"))):  # type: ignore[misc]
        def transform(self, moving: Tensor, fixed: Tensor) -> Any:
            assert float(moving.mean()) < 10  # waits for a GPU
            return super().transform(moving, fixed)

    plain = network("cpu")
    model, graphs = Own(plain.phi, plain.psi).eval(), shared("cpu")
    for seed in (1, 2, 3):
        maps(model, seed, "cpu", graphs)
    assert len(graphs) == 0


# ---- the registration of a list -------------------------------------------------------------------------------------


def test_pairs_registered_with_one_loaded_model_share_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the pairs of `carl cohort` do, which loads its model once."""
    graphs = shared("cpu")
    model = LoadedModel(network("cpu"), (24, 24, 24), {"name": "small"})

    def registered(seed: int) -> Any:
        moving, fixed = (texture((32, 32, 32), shift, seed)[0, 0].numpy() for shift in (2.0, 0.0))
        options: dict[str, Any] = {"io_iterations": 2, "io_sim": "lncc", "confidence": "off", "device": "cpu"}
        return register(fixed=fixed, moving=moving, model=model, **options)

    alone = [registered(seed).losses for seed in (1, 2, 3)]
    monkeypatch.setattr(loaded_module, "_graphs", lambda _: graphs)
    together, counts = [], []
    for seed in (1, 2, 3):
        together.append(registered(seed).losses)
        counts.append(captures(graphs))
    assert together == alone
    assert counts == [LEVELS, LEVELS + 1, LEVELS + 1]  # the network when it comes a second time


# ---- what is kept ---------------------------------------------------------------------------------------------------


def test_the_least_recently_used_is_released_first() -> None:
    graphs = shared("cpu", most=2)
    for key in ("a", "b", "a", "c", "a"):
        with graphs.lend(key, Addition) as (work, repeat):
            repeat()
    assert captures(graphs) == 3
    assert float(work.value) == 4  # the warm-up, and three repetitions
    with graphs.lend("b", Addition):
        assert captures(graphs) == 4


def test_a_second_thread_gets_a_work_of_its_own() -> None:
    graphs, others = shared("cpu"), list[Addition]()

    def borrow() -> None:
        with graphs.lend("a", Addition) as (work, _):
            others.append(work)

    with graphs.lend("a", Addition) as (own, _):
        thread = threading.Thread(target=borrow)
        thread.start()
        thread.join()
    borrow()
    assert others[0] is not own
    assert others[1] is own
    assert len(graphs) == 1


def test_a_failed_capture_leaves_nothing_behind() -> None:
    def fails() -> Addition:
        raise torch.cuda.OutOfMemoryError("full")

    graphs = shared("cpu")
    with pytest.raises(torch.cuda.OutOfMemoryError), graphs.lend("a", fails):
        pass
    assert not graphs.release()
    with graphs.lend("a", Addition):
        pass
    assert graphs.release()
    assert len(graphs) == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_are_empty(copied: Callable[[Graphs], Graphs]) -> None:
    graphs = Graphs()
    graphs._held["a"] = (Addition(), lambda: None)
    assert len(copied(graphs)) == 0
