"""Random contrast: of a scan by a random intensity curve, of a label map by a random intensity for each structure.

A network that is trained on such images, with a loss on the original ones, learns to use shapes instead of intensities.
All random numbers come from the generator, on its device; for whole volumes a GPU is many times faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from carlreg.synthesis.pairs import blurred

KNOTS = (3, 6)
"""Minimum and maximum number of knots of an intensity curve, including its ends."""
BLACK_STAYS = 0.85
"""Fraction of images in which black stays black, like the background of CT and MRI."""
BIAS, NOISE = 0.35, 0.04
"""Maximum standard deviations of the bias field's logarithm and of the noise."""
WAVES = 4
"""Number of cosines along each axis in a bias field, including the constant one."""
FOREGROUND, SAMPLE = 0.05, 4096
"""The contrast of a curve is judged by about so many voxels brighter than this."""
STEPS = 256
"""Intensities at which a curve is tabulated."""


def random_contrast(images: Tensor, generator: torch.Generator) -> Tensor:
    """Apply a piecewise linear curve with 3 to 6 random knots, a smooth bias field and noise to each image.

    Images are (B, C, *shape), from 0 to 1, and so is the result. Of two random curves, each image gets the one that
    leaves its foreground more contrast.

    >>> inputs = random_contrast(images, torch.Generator(images.device).manual_seed(0))
    """
    if not images.is_floating_point():
        raise TypeError(f"the images have dtype {images.dtype}; expected floating point, from 0 to 1")
    curves = random_curves(2 * len(images), generator).to(images).chunk(2)
    voxels = images.flatten(1)
    voxels = voxels[:, :: max(1, voxels.shape[1] // SAMPLE)]
    inside = voxels > FOREGROUND
    spread = [_variance(_apply(curve, voxels), inside) for curve in curves]
    chosen = torch.where((spread[0] >= spread[1])[:, None], curves[0], curves[1])
    return _shade(_apply(chosen, images), generator)


def _variance(values: Tensor, inside: Tensor) -> Tensor:
    """The variance of each row (B, n) where `inside`."""
    count = inside.sum(1).clamp(min=1)
    mean = (values * inside).sum(1) / count
    return ((values - mean[:, None]).square() * inside).sum(1) / count


def random_curves(count: int, generator: torch.Generator) -> Tensor:
    """Piecewise linear curves from [0, 1] to [0, 1] with random knots, at 256 equidistant intensities: (count, 256).

    Each has the range 0 to 1, so that every image keeps some contrast.
    """
    device, most = generator.device, KNOTS[1]
    knots = torch.rand(count, most - 2, generator=generator, device=device)
    number = torch.randint(KNOTS[0], most + 1, (count, 1), generator=generator, device=device)
    unused = torch.arange(most - 2, device=device) >= number - 2
    knots = knots.masked_fill(unused, 1.0).sort(dim=1).values  # unused knots go to the end
    ends = torch.zeros(count, 1, device=device)
    knots = torch.cat([ends, knots, ends + 1], dim=1)
    values = torch.rand(count, most, generator=generator, device=device)
    black = torch.rand(count, generator=generator, device=device) < BLACK_STAYS
    values[:, 0] = torch.where(black, 0.0, values[:, 0])
    at = torch.linspace(0, 1, STEPS, device=device).expand(count, -1).contiguous()
    right = torch.searchsorted(knots, at).clamp(1, most - 1)
    start, end = knots.gather(1, right - 1), knots.gather(1, right)
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
    """Render label maps (B, 1, *shape) as images with one intensity per structure: `colours`, (B, 1 + K) for labels
    from 0 to K, or random ones.

    Images are blurred by a Gaussian whose standard deviation, in voxels, is drawn from the range `blur` for each axis.
    They get a bias field and noise, and texture of up to `texture` within structures. `plain` images have only the
    smallest blur, to compute a loss on.

    >>> inputs = render(labels, generator)
    >>> moving, fixed = (render(map_, generator, colours=colours, plain=True) for map_ in maps)
    """
    batch, dim = len(labels), labels.dim() - 2
    index = labels.long()
    if colours is None:
        colours = random_colours(batch, int(index.max()), generator)
    colours = colours.to(labels.device)
    image = colours.gather(1, index.flatten(1)).reshape(labels.shape)
    if plain:
        return blurred(image, torch.full((batch, dim), blur[0], device=image.device)).clamp(0, 1)
    if texture:
        spread = texture * torch.rand(colours.shape, generator=generator, device=generator.device).to(image)
        grain = torch.randn(image.shape, generator=generator, device=generator.device).to(image)
        visible = (colours > 0).to(image)  # black structures have no texture
        image = image + (spread * visible).gather(1, index.flatten(1)).reshape(labels.shape) * grain
    widths = torch.rand(batch, dim, generator=generator, device=generator.device).to(image)
    image = blurred(image, blur[0] + (blur[1] - blur[0]) * widths)
    return _shade(image, generator)


def _apply(curves: Tensor, images: Tensor) -> Tensor:
    """Evaluate tabulated curves (B, n), one for each image, at its intensities."""
    position = images.clamp(0, 1).flatten(1) * (curves.shape[1] - 1)
    below = position.floor().clamp(max=curves.shape[1] - 2)
    left = below.long()
    return torch.lerp(curves.gather(1, left), curves.gather(1, left + 1), position - below).reshape(images.shape)


def _shade(images: Tensor, generator: torch.Generator) -> Tensor:
    """Apply a bias field and noise of random strength."""
    ones = [1] * (images.dim() - 1)
    strengths = torch.rand(2, len(images), *ones, generator=generator, device=generator.device).to(images)
    noise = torch.randn(images.shape, generator=generator, device=generator.device).to(images)
    bias = _smooth(len(images), images.shape[2:], generator).to(images)
    shaded = images * torch.exp(BIAS * strengths[0] * bias)
    # Squared, so that most images have little noise.
    return (shaded + NOISE * strengths[1].square() * noise).clamp(0, 1)


def _smooth(count: int, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Smooth random functions, sums of products of cosines, with a variance of about 1: (count, 1, *shape)."""
    field = torch.randn(count, 1, *[WAVES] * len(shape), generator=generator, device=generator.device)
    waves = torch.arange(WAVES, device=generator.device)
    for axis, side in enumerate(shape, start=2):
        centres = (torch.arange(side, device=generator.device) + 0.5) / side
        basis = torch.cos(torch.pi * waves[:, None] * centres) / (1 + waves[:, None])
        field = (field.movedim(axis, -1) @ basis).movedim(-1, axis)
    return field
