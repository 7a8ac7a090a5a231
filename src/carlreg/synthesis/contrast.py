"""Images of another contrast: of a scan by a random curve, of a label map by a random intensity for each structure.

A network that sees such images, while its loss is computed on the true ones, learns to look at shapes and not at
intensities. All random numbers come from the generator, on its device: a GPU's is many times faster for whole volumes.
"""

from __future__ import annotations

import torch
from torch import Tensor

KNOTS = (3, 6)
"""Of a curve of contrast, at least and at most, its ends among them."""
BLACK_STAYS = 0.85
"""Share of images in which black stays black, as the background of CT and MRI does."""
BIAS, NOISE = 0.35, 0.04
"""At most: the logarithm of the bias field, as a standard deviation, and the standard deviation of the noise."""
WAVES = 4
"""Cosines along each axis that a bias field is made of, the constant one among them."""
STEPS = 256
"""Intensities at which a curve is tabulated."""


def random_contrast(images: Tensor, generator: torch.Generator) -> Tensor:
    """Images (B, C, *shape) from 0 to 1, each with its intensities changed by a piecewise linear curve of 3 to 6 random
    knots, shaded by a smooth bias field and covered with noise; from 0 to 1 again.

    >>> seen = random_contrast(images, torch.Generator(images.device).manual_seed(0))
    """
    if not images.is_floating_point():
        raise TypeError(f"the images have dtype {images.dtype}; expected floating point, from 0 to 1")
    changed = _apply(random_curves(len(images), generator).to(images), images)
    return _shade(changed, generator)


def random_curves(count: int, generator: torch.Generator) -> Tensor:
    """Piecewise linear curves of random knots from [0, 1] to [0, 1], at 256 equidistant intensities: (count, 256).

    Each reaches from 0 to 1, so that some contrast is left in every image.
    """
    device, most = generator.device, KNOTS[1]
    places = torch.rand(count, most - 2, generator=generator, device=device)
    knots = torch.randint(KNOTS[0], most + 1, (count, 1), generator=generator, device=device)
    unused = torch.arange(most - 2, device=device) >= knots - 2
    places = places.masked_fill(unused, 1.0).sort(dim=1).values  # those that are not used lie at the end
    ends = torch.zeros(count, 1, device=device)
    places = torch.cat([ends, places, ends + 1], dim=1)
    values = torch.rand(count, most, generator=generator, device=device)
    black = torch.rand(count, generator=generator, device=device) < BLACK_STAYS
    values[:, 0] = torch.where(black, 0.0, values[:, 0])
    at = torch.linspace(0, 1, STEPS, device=device).expand(count, -1).contiguous()
    right = torch.searchsorted(places, at).clamp(1, most - 1)
    start, end = places.gather(1, right - 1), places.gather(1, right)
    part = ((at - start) / (end - start).clamp(min=1e-6)).clamp(0, 1)
    curves = torch.lerp(values.gather(1, right - 1), values.gather(1, right), part)
    low, high = curves.amin(1, keepdim=True), curves.amax(1, keepdim=True)
    low = torch.where(black[:, None], 0.0, low)
    return (curves - low) / (high - low).clamp(min=1e-3)


def random_colours(count: int, structures: int, generator: torch.Generator) -> Tensor:
    """An intensity from 0 to 1 for each label from 0 to `structures`, (count, 1 + structures); 0 is mostly black."""
    colours = torch.rand(count, 1 + structures, generator=generator, device=generator.device)
    black = torch.rand(count, generator=generator, device=generator.device) < BLACK_STAYS
    colours[:, 0] = torch.where(black, 0.0, colours[:, 0])
    return colours


def render(
    labels: Tensor,
    generator: torch.Generator,
    *,
    colours: Tensor | None = None,
    blur: tuple[float, float] = (0.4, 1.2),
    texture: float = 0.05,
    plain: bool = False,
) -> Tensor:
    """Images of label maps (B, 1, *shape), each structure in one intensity: those of `colours`, (B, 1 + K) for labels
    from 0 to K, or random ones.

    Each is blurred by a standard deviation between the two numbers of `blur`, in voxels and drawn for each axis,
    shaded and covered with noise, and each structure's intensity varies from place to place by up to `texture`. `plain`
    images have the smallest blur and nothing else: to compute a loss on.

    >>> seen = render(labels, generator)
    >>> moving, fixed = (render(map_, generator, colours=colours, plain=True) for map_ in maps)
    """
    batch, dim = len(labels), labels.dim() - 2
    index = labels.long()
    if colours is None:
        colours = random_colours(batch, int(index.max()), generator)
    colours = colours.to(labels.device)
    image = colours.gather(1, index.flatten(1)).reshape(labels.shape)
    if plain:
        return _blurred(image, torch.full((batch, dim), blur[0], device=image.device)).clamp(0, 1)
    if texture:
        spread = texture * torch.rand(colours.shape, generator=generator, device=generator.device).to(image)
        grain = torch.randn(image.shape, generator=generator, device=generator.device).to(image)
        visible = (colours > 0).to(image)  # what is black has no texture
        image = image + (spread * visible).gather(1, index.flatten(1)).reshape(labels.shape) * grain
    widths = torch.rand(batch, dim, generator=generator, device=generator.device).to(image)
    image = _blurred(image, blur[0] + (blur[1] - blur[0]) * widths)
    return _shade(image, generator)


def _apply(curves: Tensor, images: Tensor) -> Tensor:
    """Tabulated curves (B, n), one for each image, at its intensities."""
    place = images.clamp(0, 1).flatten(1) * (curves.shape[1] - 1)
    below = place.floor().clamp(max=curves.shape[1] - 2)
    left = below.long()
    return torch.lerp(curves.gather(1, left), curves.gather(1, left + 1), place - below).reshape(images.shape)


def _shade(images: Tensor, generator: torch.Generator) -> Tensor:
    """With a bias field and noise, both of random strength."""
    ones = [1] * (images.dim() - 1)
    strengths = torch.rand(2, len(images), *ones, generator=generator, device=generator.device).to(images)
    noise = torch.randn(images.shape, generator=generator, device=generator.device).to(images)
    bias = _smooth(len(images), images.shape[2:], generator).to(images)
    shaded = images * torch.exp(BIAS * strengths[0] * bias)
    # Squared, so that most images have little noise.
    return (shaded + NOISE * strengths[1].square() * noise).clamp(0, 1)


def _smooth(count: int, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Smooth random functions of standard deviation about 1, sums of products of cosines: (count, 1, *shape)."""
    field = torch.randn(count, 1, *[WAVES] * len(shape), generator=generator, device=generator.device)
    waves = torch.arange(WAVES, device=generator.device)
    for axis, side in enumerate(shape, start=2):
        place = (torch.arange(side, device=generator.device) + 0.5) / side
        basis = torch.cos(torch.pi * waves[:, None] * place) / (1 + waves[:, None])
        field = (field.movedim(axis, -1) @ basis).movedim(-1, axis)
    return field


def _blurred(images: Tensor, widths: Tensor) -> Tensor:
    """Gaussian blur of these standard deviations in voxels, (B, D)."""
    for axis in range(2, images.dim()):
        index = torch.arange(images.shape[axis], device=images.device)
        gap = (index[:, None] - index).square() / (2 * widths[:, axis - 2, None, None].square())
        matrix = torch.softmax(-gap, dim=-1)  # (B, n, n), rows that add up to 1
        rows = images.movedim(axis, -1)
        moved = rows.reshape(len(rows), -1, rows.shape[-1]) @ matrix.mT
        images = moved.reshape(rows.shape).movedim(-1, axis)
    return images.contiguous()
