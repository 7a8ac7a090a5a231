"""A torso drawn by formulas, as a CT scan would show it.

Canonical coordinates are in millimetres: x to the left, y to the back, z to the head, with z = 0 at the first lumbar
vertebra.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from carlreg.synthesis.shapes import Canvas, Distance, Material, Noise, Shape, ellipsoid, largest, section, tube, union

Phase = Literal["native", "arterial", "portal"]
PHASES: tuple[Phase, ...] = ("native", "arterial", "portal")

_STRUCTURES = (
    "spleen", "right kidney", "left kidney", "gallbladder", "liver", "stomach", "aorta", "vena cava", "pancreas",
    "spine", "ribs", "right lung", "left lung", "heart", "colon",
)  # fmt: skip
LABELS = {name: label for label, name in enumerate(_STRUCTURES, start=1)}
"""Labels in a scan's label map; 0 is everything else."""

HOUNSFIELD: dict[str, tuple[float, float, float]] = {
    "liver": (56, 76, 112), "spleen": (48, 120, 124), "kidney cortex": (34, 185, 172), "kidney medulla": (30, 75, 150),
    "gallbladder": (8, 8, 8), "stomach wall": (40, 78, 78), "arteries": (42, 320, 150), "veins": (40, 75, 142),
    "portal vein": (40, 120, 172), "pancreas": (40, 100, 92), "muscle": (52, 56, 62), "myocardium": (45, 90, 100),
    "bowel wall": (38, 75, 80),
}  # fmt: skip
"""Hounsfield units of soft tissue: without contrast agent, in the arterial and in the portal venous phase."""
AIR, FAT, WATER = -1000.0, -102.0, 8.0
SPACING_OF_VERTEBRAE = 29.0
KIDNEYS = {-1: (-64, 34, -14), 1: (64, 36, 2)}
"""Centres of the right and of the left kidney; the right one is lower."""
KNOBBLY = Noise(26.0, 1)
"""Unevenness of organ surfaces: part of the anatomy, the same in all patients."""


# ---- the outline ----------------------------------------------------------------------------------------------------


def _body(points: Tensor) -> Tensor:
    """Distance to the skin."""
    x, y, z = points
    width = 156 + 7 * torch.sin((z - 110) / 75)
    depth = torch.where(y > 0, 112.0, 102 + 6 * torch.sin((z + 150) / 95))
    furrow = 7 * torch.exp(-((x / 16) ** 2)) * (y > 0)  # along the spine
    return section([x, y], [width, depth], 2.35) + furrow


def _of_body(distance: Distance) -> Shape:
    return Shape(distance, (-175, -125, -math.inf), (175, 120, math.inf))


def _muscle(points: Tensor) -> Tensor:
    """Distance to the outer surface of the body wall's muscles, below skin and fat."""
    _, y, z = points
    belly = torch.sigmoid((60 - z) / 25)
    fat = 7 + belly * (6 + 6 * torch.sigmoid((-y - 40) / 15) + 6 * torch.sigmoid((y - 50) / 12))
    return _body(points) + 2 + fat


def _cavity(points: Tensor) -> Tensor:
    """Distance to the inner surface of the body wall."""
    x, y, z = points
    chest = torch.sigmoid((z - 40) / 20)
    back = 24 * torch.exp(-((x / 62) ** 4)) * torch.sigmoid((y - 30) / 10)
    return _muscle(points) + 10 + 7 * chest + back


def _room(points: Tensor) -> Tensor:
    """Distance to the space for organs within the body wall."""
    return _cavity(points) + 3


def _diaphragm(points: Tensor) -> Tensor:
    """Distance above the diaphragm."""
    x, y, z = points

    def dome(cx: float, cy: float, top: float, wx: float, wy: float) -> Tensor:
        return top - 75 * (((x - cx) / wx).square() + ((y - cy) / wy).square()) ** 1.3

    right, left, middle = dome(-68, -8, 108, 88, 92), dome(70, -5, 96, 86, 90), dome(5, -25, 88, 95, 95)
    height = torch.logsumexp(torch.stack([right, left, middle]) / 6, dim=0) * 6
    return (z - height.clamp(min=-15)) * 0.8


def _kidney(side: int) -> Shape:
    x, y, z = KIDNEYS[side]
    bean = ellipsoid((x, y, z), (27, 24, 54), power=2.1, turn=side * 25, tilt=side * -10)
    hilum = ellipsoid((x - side * 24, y - 10, z), (17, 13, 24))
    return bean.without(hilum, blend=10).rough(KNOBBLY, 1.5)


# ---- bones ----------------------------------------------------------------------------------------------------------


def _spine_depth(z: Tensor) -> Tensor:
    return 44 + 7 * torch.sin(z / 100)


def _from_vertebra(z: Tensor) -> Tensor:
    """Height above the centre of the nearest vertebra."""
    return z - SPACING_OF_VERTEBRAE * (z / SPACING_OF_VERTEBRAE).round()


def _least(distances: list[Tensor], blend: float) -> Tensor:
    return -blend * torch.logsumexp(torch.stack([-d for d in distances]) / blend, dim=0)


def _vertebrae(points: Tensor) -> Tensor:
    x, y, z = points
    y, z = y - _spine_depth(z), _from_vertebra(z)
    waist = 1 - 0.10 * (1 - (z / 12).square()).clamp(min=0)
    body = largest([section([x, y], [22 * waist, 17 * waist], 2.3), z.abs() - 11.5])
    height = (z + 2).abs() - 9 - 2 * torch.sigmoid(y - 24)
    ring = largest([section([x, y - 25], [16.0, 13.0]), -section([x, y - 24], [10.5, 8.5]), height])
    spinous = largest([x.abs() - 3.2, (y - 41).abs() - 9, (z + 5 + 0.3 * (y - 41)).abs() - 7.5])
    along = (x.abs().clamp(14, 38), y - 27 - 0.12 * (x.abs() - 14), z - 2)
    transverse = ((x.abs() - along[0]).square() + along[1].square() + 0.45 * along[2].square()).sqrt() - 4.2
    return _least([body, ring, spinous, transverse], 0.8)


def _discs(points: Tensor) -> Tensor:
    x, y, z = points
    return largest([section([x, y - _spine_depth(z)], [21.5, 17.0], 2.3), 20.0 - (_from_vertebra(z).abs() + 8.5)])


def _canal(points: Tensor) -> Tensor:
    x, y, z = points
    return section([x, y - _spine_depth(z) - 24], [10.0, 8.0])


def _rib_coordinates(points: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Height above the nearest rib's axis, the rib's number (0 is the lowest), angle from the back, and distance
    outside the middle of the chest wall."""
    x, y, z = points
    angle = torch.atan2(x.abs(), y - 10)
    fall = 46 * (1 - torch.cos(angle.clamp(max=2.15))) - 62 * (angle - 2.15).clamp(min=0)
    steps = (z + fall - SPACING_OF_VERTEBRAE - 4) / SPACING_OF_VERTEBRAE
    number = steps.round().clamp(min=0)
    return (steps - number) * SPACING_OF_VERTEBRAE, number, angle, _cavity(points) - 5


def _ribs(points: Tensor) -> Tensor:
    height, number, angle, out = _rib_coordinates(points)
    # Near the spine the body wall is thick, and ribs run inwards to their vertebra.
    x, y, z = points
    head = torch.sigmoid((34 - x.abs()) / 3)
    out = out * (1 - head) + head * ((y - _spine_depth(z) - 16) * 0.9)
    end = torch.where(number == 0, 0.95, torch.where(number == 1, 1.45, 2.15))
    return largest([section([out, height * 0.86], [3.8, 6.2]), (angle - end) * 90, 15 - x.abs()])


def _cartilage(points: Tensor) -> Tensor:
    height, number, angle, out = _rib_coordinates(points)
    cuts = [(2.15 - angle) * 90, 14 - points[0].abs(), (2 - number) * 20]
    return largest([section([out, height * 0.8], [3.4, 5.6]), *cuts])


def _sternum(points: Tensor) -> Tensor:
    x, y, z = points
    return largest([(_cavity(points) - 5).abs() - 5, section([x, z - 190], [19.0, 105.0], 4.0), y + 20])


def _ilium(points: Tensor) -> Tensor:
    x, y, z = points
    funnel = section([x, y - 18], [(118 + 0.28 * (z + 110)).clamp(min=40), (72 + 0.2 * (z + 110)).clamp(min=30)])
    crest = z + 112 + 30 * ((y - 22) / 60).square()
    sides = torch.maximum(30 - x.abs(), -55 - y)
    thick = 3 + 2.5 * torch.sigmoid((crest + 9) / 3)  # the crest is a rim
    return -_least([thick - funnel.abs(), -crest, -sides], 1.5)


# ---- everything, from the outside in --------------------------------------------------------------------------------


def draw(canvas: Canvas, phase: Phase, texture: int) -> None:
    """Paint the canonical torso. `texture` is the seed for grain, small vessels and bowel."""
    p = _Painter(canvas, phase, texture)
    for part in (p.wall, p.chest, p.bowel, p.liver, p.spleen, p.kidneys, p.stomach, p.pancreas, p.vessels, p.bones):
        part()  # bones last, so that nothing covers them


class _Painter:
    def __init__(self, canvas: Canvas, phase: Phase, texture: int) -> None:
        self.canvas, self.phase, self.texture = canvas, phase, texture
        self.tissue = {name: values[PHASES.index(phase)] for name, values in HOUNSFIELD.items()}
        scales = (3.0, 9.0, 9.0, 30.0)
        self.fine, self.coarse, self.other, self.broad = (Noise(s, texture + i) for i, s in enumerate(scales))

    def paint(self, shape: Shape, material: Material | str, label: str | None = None) -> None:
        """Paint a solid with a tissue of `HOUNSFIELD`, or with another material."""
        value = self.tissue[material] if isinstance(material, str) else material
        self.canvas.paint(shape, value, LABELS[label] if label else 0)

    # -- materials

    def filled(self, wall: Tensor | float, filling: Tensor | float, depth: Tensor) -> Tensor:
        """A wall and its filling; `depth` is the distance to the inner surface."""
        return wall + (filling - wall) * self.canvas.inside(depth)

    def hollow(self, wall: float, filling: float, thickness: float) -> Material:
        return lambda _, d: self.filled(wall, filling, d + thickness)

    def soft(self, name: str, fine: float = 3.0, coarse: float = 0.0) -> Material:
        return lambda p, _: self.tissue[name] + fine * self.fine(p) + (coarse * self.coarse(p) if coarse else 0.0)

    def bone(self, marrow: float, cortex: float, thickness: float) -> Material:
        """Spongy bone in a dense shell."""
        return lambda p, d: self.filled(
            cortex, marrow * (1 + 0.22 * self.fine(p) + 0.1 * self.coarse(p)), d + thickness
        )

    def muscle(self, p: Tensor, d: Tensor) -> Tensor:
        """Muscle in layers, marbled with fat."""
        flesh = self.tissue["muscle"] + 4 * self.fine(p)
        marbling = torch.sigmoid((self.coarse(p) + 0.7 * self.broad(p) - 1.75) * 6)
        fat = marbling + 0.5 * self.canvas.inside((d + 6).abs() - 0.4)
        return flesh + (FAT - flesh) * (0.6 * fat).clamp(max=0.6)

    def curves(self, radius: Tensor | float, first: Tensor, second: Tensor, sharpness: float = 25.0) -> Tensor:
        """1 in small vessels, 0 elsewhere: the common zeros of two random functions form curves."""
        return torch.sigmoid((radius - (first.square() + second.square()).sqrt()) * sharpness)

    # -- parts

    def wall(self) -> None:
        def fat(p: Tensor, _: Tensor) -> Tensor:
            septa = self.coarse(p)
            return FAT + 9 * septa + 60 * (septa.abs() < 0.05)

        def mesentery(p: Tensor, _: Tensor) -> Tensor:
            return FAT + 5 * self.fine(p) + 110 * self.curves(0.16, self.coarse(p), self.other(p))

        self.paint(_of_body(_body), 20.0)  # skin
        self.paint(_of_body(lambda p: _body(p) + 2), fat)
        self.paint(_of_body(_muscle), self.muscle)
        self.paint(_of_body(_cavity), mesentery)
        for s in (-1, 1):
            erector_spinae = ellipsoid((s * 34, 84, -60), (28, 19, 420), power=2.5)
            psoas = tube((s * 24, 42, 10, 5), (s * 33, 40, -60, 17), (s * 46, 30, -130, 23), (s * 62, 8, -220, 24))
            quadratus_lumborum = ellipsoid((s * 62, 62, -55), (20, 9, 60), turn=s * -20)
            for shape in (erector_spinae, psoas, quadratus_lumborum):
                self.paint(shape, self.muscle)

    def chest(self) -> None:
        paint, tissue = self.paint, self.tissue
        heart = ellipsoid((24, -34, 124), (56, 46, 46), power=2.1, turn=-20, tilt=22)
        heart = heart.within(lambda p: 2 - _diaphragm(p))
        wide = Noise(20.0, self.texture + 6)

        def lung(p: Tensor, _: Tensor) -> Tensor:
            air = -868 + 0.35 * p[1] + 14 * self.broad(p) + 8 * self.fine(p)
            root = torch.stack([(p[0].abs() - 30) / 60, p[1] / 60, (p[2] - 170) / 80]).norm(dim=0)
            thin = self.coarse(p)
            small = self.curves(0.24 - 0.05 * root, thin, self.other(p), 18)
            large = self.curves(0.34 - 0.14 * root, 0.5 * thin, wide(p), 18)
            return air + (40 + 0.5 * tissue["veins"] - air) * torch.maximum(large, 0.7 * small)

        def front(p: Tensor) -> Tensor:
            return p[0].abs() - 5 - 14 * torch.sigmoid((p[2] - 170) / 15) * torch.sigmoid((-10 - p[1]) / 10)

        spine = _of_body(lambda p: section([p[0] - 4, p[1] - 18], [30.0, 50.0], 2.4))
        vessels = ellipsoid((0, -20, 196), (40, 42, 40))
        mediastinum = union(spine, _of_body(front), heart.grown(4), vessels, blend=12)
        chest = _of_body(lambda p: _cavity(p) + 2).within(lambda p: -_diaphragm(p), lambda p: p[2] - 275, blend=8)
        chest = chest.without(mediastinum, blend=6)
        paint(chest.within(lambda p: p[0]), lung, "right lung")
        paint(chest.within(lambda p: -p[0]), lung, "left lung")

        blood = 0.75 * tissue["arteries"] + 0.25 * tissue["veins"]
        paint(heart, self.soft("myocardium", 4), "heart")
        paint(ellipsoid((36, -30, 116), (30, 26, 24), turn=-20, tilt=22), blood, "heart")
        paint(ellipsoid((2, -48, 122), (30, 20, 27), tilt=22), 0.5 * (blood + tissue["veins"]), "heart")
        paint(ellipsoid((10, -6, 138), (36, 17, 20)), blood, "heart")
        paint(ellipsoid((-22, -30, 132), (19, 22, 26)), "veins", "heart")
        for s in (-1, 1):  # pulmonary arteries and main bronchi
            paint(tube((6, -20, 180, 12), (s * 22, -4, 182, 9.5), (s * 48, 4, 172, 6)), blood)
            paint(tube((0, 8, 206, 8), (s * 20, 10, 186, 6), (s * 44, 12, 176, 4)), -960.0)
        paint(tube((-10, -12, 160, 8), (-14, -14, 230, 9)), "veins")
        trachea = tube((0, 8, 206, 9), (0, 0, 330, 9))
        paint(trachea, -980.0)
        oesophagus = tube((6, 18, 320, 7), (8, 22, 200, 7), (14, 12, 120, 7.5), (24, 2, 92, 8), (42, -4, 78, 8))
        paint(oesophagus, self.hollow(tissue["muscle"], -350.0, 5))
        crura = union(tube((-14, 30, 66, 5), (-13, 30, 0, 4)), tube((20, 34, 70, 5), (17, 32, 0, 4)))
        paint(crura, "muscle")
        paint(_of_body(lambda p: (_diaphragm(p) + 1.8).abs() - 1.8).within(_cavity), "muscle")

    def bowel(self) -> None:
        lumps, pockets = Noise(8.0, self.texture + 4), Noise(26.0, self.texture + 5)

        def holding(solid: float, grain: float, gas: float) -> Material:
            def material(p: Tensor, d: Tensor) -> Tensor:
                bubble = self.canvas.inside((gas - pockets(p)) * 9 + 0.16 * p[1])  # gas rises to the front
                content = solid + grain * lumps(p)
                content = content + (-950 - content) * bubble
                return self.filled(self.tissue["bowel wall"], content, d + 2.5)

            return material

        # Loops of small bowel are cells of a random packing, each with a wall.
        region = ellipsoid((0, -34, -118), (96, 42, 72), power=3.0).within(_room)
        low, high = torch.tensor([-92.0, -70.0, -185.0]), torch.tensor([92.0, 8.0, -52.0])
        generator = torch.Generator().manual_seed(self.texture)
        seeds = (low + (high - low) * torch.rand(90, 3, generator=generator)).tolist()

        def cells(p: Tensor) -> Tensor:
            first, second = torch.full_like(p[0], 1e6), torch.full_like(p[0], 1e6)
            for x, y, z in seeds:
                away = ((p[0] - x).square() * 0.6 + (p[1] - y).square() + (p[2] - z).square()).sqrt()
                second = torch.minimum(second, torch.maximum(first, away))
                first = torch.minimum(first, away)
            return torch.maximum(1.8 - (second - first) / 2, first - 19)

        self.paint(region.within(cells), holding(22, 6, 1.5))
        duodenum = tube(
            (-28, -34, 8, 13), (-48, -14, 2, 13), (-50, 4, -30, 12), (-30, 4, -52, 12), (10, 0, -54, 11),
            (34, -10, -30, 11),
        )  # fmt: skip
        self.paint(duodenum, holding(22, 6, 1.8))
        colon = tube(
            (-104, 10, -170, 27), (-112, 14, -110, 25), (-112, 20, -60, 22), (-98, 8, -34, 21), (-84, -42, -48, 19),
            (-40, -62, -66, 18), (10, -66, -70, 17), (56, -58, -52, 18), (98, -30, -14, 18), (112, 6, 6, 18),
            (114, 26, -40, 16), (112, 28, -100, 15), (98, 26, -160, 15), (60, 10, -200, 15),
        ).rough(lambda p: torch.sin(0.19 * (p[0] + p[1] + 1.3 * p[2])), 3.0)  # fmt: skip
        self.paint(colon.within(_room), holding(25, 25, 0.4), "colon")

    def liver(self) -> None:
        right = ellipsoid((-76, 2, 46), (72, 84, 80), power=2.3)
        left = ellipsoid((-10, -42, 58), (92, 40, 40), power=2.1, tilt=-10)
        beside_spine = tube((-25, 40, -60, 48), (-12, 44, 40, 34), (-6, 44, 90, 24))
        below = ellipsoid((-20, 42, -25), (52, 40, 60))
        liver = union(right, left, blend=30).within(lambda p: _diaphragm(p) + 4, _room, blend=6)
        liver = liver.without(_kidney(-1).grown(5), below, beside_spine, blend=10)

        def parenchyma(p: Tensor, _: Tensor) -> Tensor:
            coarse = self.coarse(p)
            vessels = self.curves(0.22, coarse, self.other(p), 30)
            contrast = 0.6 * (self.tissue["portal vein"] - self.tissue["liver"]) - 3
            return self.tissue["liver"] + 3 * (self.fine(p) + coarse + self.broad(p)) + contrast * vessels

        self.paint(liver.rough(KNOBBLY, 1.5), parenchyma, "liver")
        portal = (
            tube((-18, 2, 4, 7.5), (-42, -4, 24, 7), (-68, -2, 36, 6), (-95, 12, 34, 4), (-118, 22, 30, 2)),
            tube((-68, -2, 36, 5.5), (-90, -18, 56, 3.5), (-108, -30, 66, 1.8)),
            tube((-42, -4, 24, 5.5), (-20, -32, 46, 4.5), (20, -48, 58, 2.5)),
        )
        hepatic = (
            tube((-20, 14, 84, 6.5), (-52, 10, 74, 5), (-88, 18, 62, 3.5), (-112, 24, 50, 2)),
            tube((-20, 12, 84, 6), (-42, -18, 74, 4.5), (-58, -46, 52, 2.5)),
            tube((-20, 10, 84, 5.5), (-2, -24, 72, 4), (26, -42, 66, 2)),
        )
        self.paint(union(*portal), "portal vein", "liver")
        self.paint(union(*hepatic), "veins", "liver")
        gallbladder = ellipsoid((-48, -46, -2), (15, 16, 30), tilt=-18)
        self.paint(gallbladder, self.hollow(self.tissue["muscle"], self.tissue["gallbladder"], 1.5), "gallbladder")

    def spleen(self) -> None:
        hilum = ellipsoid((62, 0, 36), (36, 52, 52), turn=25)
        spleen = ellipsoid((102, 24, 44), (40, 54, 54), power=2.2, turn=25)
        spleen = spleen.within(lambda p: _diaphragm(p) + 4, _room, blend=6)
        spleen = spleen.without(hilum, _kidney(1).grown(6), blend=10).rough(KNOBBLY, 1.5)
        mottle = 26.0 if self.phase == "arterial" else 3.0  # contrast agent is taken up unevenly at first
        self.paint(spleen, self.soft("spleen", 3, mottle), "spleen")

    def kidneys(self) -> None:
        for name, s in (("right kidney", -1), ("left kidney", 1)):
            x, y, z = KIDNEYS[s]
            kidney = _kidney(s)

            def flesh(p: Tensor, d: Tensor, x: float = x, z: float = z, s: int = s) -> Tensor:
                # Pyramids of medulla below the cortex, divided by columns of cortex.
                around = torch.atan2(p[2] - z, (p[0] - x) * s + 8)
                medulla = 0.9 * self.canvas.inside(d + 6 + 3 * torch.cos(7 * around))
                cortex = self.tissue["kidney cortex"] + 4 * self.fine(p)
                return cortex + (self.tissue["kidney medulla"] - cortex) * medulla

            self.paint(kidney, flesh, name)
            sinus = ellipsoid((x - s * 9, y - 4, z), (13, 8, 30)).within(kidney.grown(-6), blend=4)
            self.paint(sinus, lambda p, _: -85 + 20 * self.fine(p), name)
            ureter = tube((x - s * 6, y - 3, z + 16, 3.5), (x - s * 14, y - 6, z, 6), (x - s * 30, y - 8, z - 6, 4))
            self.paint(union(ureter, tube((x - s * 6, y - 3, z - 18, 3.5), (x - s * 14, y - 6, z, 6))), WATER)
            x, y, z = x - s * 9, y - 4, z + 60
            limbs = [(x - s * 10, y + 8, z - 12, 2.2), (x + s * 6, y + 10, z - 14, 2)]
            self.paint(union(*(tube((x, y, z, 3), limb) for limb in limbs)), "pancreas")  # adrenal glands

    def stomach(self) -> None:
        curve = (
            (66, -2, 76, 22), (72, -14, 52, 27), (66, -34, 24, 25), (44, -48, 2, 20), (14, -52, -8, 16),
            (-16, -44, 2, 12), (-28, -36, 8, 9),
        )  # fmt: skip
        bag = union(tube(*curve), ellipsoid((68, 0, 66), (36, 32, 26)), blend=14).rough(KNOBBLY, 2.5)
        bag = bag.within(lambda p: _diaphragm(p) + 5, _room, blend=4)

        def contents(p: Tensor, d: Tensor) -> Tensor:
            grain = self.fine(p)
            food = 22 + 14 * grain
            filling = food + (-970 - food) * self.canvas.inside(p[1] + 36)  # the patient is supine, so air is in front
            return self.filled(self.tissue["stomach wall"] + 3 * grain, filling, d + 4.5 + 1.2 * grain)

        self.paint(bag, contents, "stomach")

    def pancreas(self) -> None:
        gland = tube(
            (-34, -12, -8, 13), (-16, -18, 0, 12), (10, -22, 10, 9.5), (40, -6, 20, 10), (70, 14, 28, 9.5),
            (84, 20, 34, 7),
        )  # fmt: skip
        self.paint(gland.rough(Noise(9.0, 2), 1.3), self.soft("pancreas", 4, 7), "pancreas")

    def vessels(self) -> None:
        paint = self.paint
        splenic = tube((-14, -4, 0, 5.5), (12, -12, 4, 4.5), (44, 4, 16, 4.5), (80, 16, 32, 3.5))
        paint(splenic, "portal vein")
        paint(tube((-12, -8, -2, 5.5), (-10, -16, -40, 5), (-6, -24, -80, 3.5)), "portal vein")

        descending = (
            (3, 16, -104, 9), (6, 14, -60, 9.5), (9, 17, 0, 10.5), (10, 22, 60, 11.5), (16, 34, 120, 12.5),
            (24, 38, 180, 13), (26, 34, 226, 13), (18, 10, 250, 14), (-6, -14, 238, 15), (-8, -18, 190, 15),
        )  # fmt: skip
        iliac = [tube((s * 3, 15, -102, 7), (s * 24, 20, -140, 6), (s * 44, 12, -190, 5.5)) for s in (-1, 1)]
        paint(union(tube(*descending), *iliac), "arteries", "aorta")
        branches = (
            tube((8, 8, 14, 4), (8, -4, 16, 3.5), (-16, -14, 20, 3), (-34, -10, 24, 2.2)),
            tube((8, -4, 16, 3.2), (40, 2, 22, 2.8), (78, 14, 36, 2.2)),
            tube((8, 8, 4, 4), (6, -6, -4, 3.5), (4, -18, -40, 3.2), (2, -26, -80, 2.2)),
            tube((12, 14, -6, 3.2), (40, 30, -4, 2.8)),
            tube((2, 16, -8, 3.2), (-36, 30, -14, 2.8)),
        )
        for branch in branches:
            paint(branch, "arteries")
        ascending = (
            (-16, 20, -108, 10), (-20, 17, -50, 10.5), (-21, 16, 0, 11), (-22, 14, 50, 12), (-20, 10, 86, 12.5),
            (-16, -2, 112, 13),
        )  # fmt: skip
        right = tube((-16, 20, -106, 8), (-32, 26, -140, 7), (-46, 18, -190, 7))
        left = tube((-16, 20, -106, 8), (16, 27, -140, 7), (38, 20, -190, 7))
        paint(union(tube(*ascending), right, left), self.soft("veins"), "vena cava")
        paint(tube((-20, 14, -8, 5), (4, 4, -6, 4.5), (44, 32, 0, 4)), "veins")
        paint(tube((-20, 16, -12, 5), (-44, 30, -14, 4)), "veins")

    def bones(self) -> None:
        paint = self.paint
        paint(Shape(_discs, (-30, 10, -320), (30, 90, 420)), lambda p, _: 88 + 6 * self.fine(p), "spine")
        paint(Shape(_canal, (-12, 40, -320), (12, 110, 420)), self.hollow(22.0, 44.0, 3.5))
        paint(Shape(_vertebrae, (-48, 10, -320), (48, 120, 420)), self.bone(185, 620, 1.6), "spine")
        paint(Shape(_cartilage, (-170, -130, -20), (170, 130, 420)), self.hollow(155.0, 95.0, 1.2))
        paint(Shape(_ribs, (-170, -130, -70), (170, 130, 420)), self.bone(230, 900, 1.5), "ribs")
        paint(Shape(_sternum, (-25, -130, 70), (25, -20, 300)), self.bone(140, 480, 1.3))
        paint(Shape(_ilium, (-150, -60, -320), (150, 110, -95)), self.bone(170, 750, 1.6))
        sacrum = ellipsoid((0, 62, -190), (52, 18, 48), power=2.6)
        paint(sacrum, self.bone(170, 600, 1.5))
