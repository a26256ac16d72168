"""Build the shapes of the fifty rendered toys in five categories. Each toy is made of solids of random sizes."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np

from torchcaps.data.norb import CATEGORIES

Draw = Callable[[float | int, float | int], float]
"""Function that takes two numbers, low and high, and draws a random number between them."""
Vector = tuple[float | int, float | int, float | int]


@dataclass(frozen=True)
class Solid:
    """A part of a toy: an ellipsoid, a box or a cylinder.

    Arguments:
        kind: shape. The axis of a cylinder is along z before the rotation.
        centre: position `(x, y, z)`.
        half_sizes: half of the size along x, y and z, before the rotation.
        angles: rotation in degrees, about x, then y, then z.
        taper: width of the top of a cylinder, divided by the width of its bottom.
    """

    kind: Literal["ellipsoid", "box", "cylinder"]
    centre: Vector
    half_sizes: Vector
    angles: Vector = (0.0, 0.0, 0.0)
    taper: float = 1.0

    def rotation(self) -> np.ndarray:
        """Compute the rotation matrix `[3, 3]` of `angles`."""
        turned = np.eye(3)
        for axis, angle in enumerate(np.radians(self.angles)):
            turn = np.eye(3)
            one, other = (axis + 1) % 3, (axis + 2) % 3
            turn[one, one] = turn[other, other] = math.cos(angle)
            turn[other, one] = math.sin(angle)
            turn[one, other] = -math.sin(angle)
            turned = turn @ turned
        return turned


def _animal(draw: Draw) -> list[Solid]:
    length, girth, leg = draw(0.5, 0.9), draw(0.2, 0.38), draw(0.2, 0.75)
    thick, splay = draw(0.05, 0.13), draw(-12, 12)
    body = leg * 2 + girth * 0.8
    kind: Literal["ellipsoid", "box"] = "box" if draw(0, 1) < 0.25 else "ellipsoid"
    solids = [Solid(kind, (0, 0, body), (length, girth * draw(0.7, 1.0), girth * draw(0.8, 1.1)))]
    for x, y in product((-1, 1), (-1, 1)):
        foot = (x * length * 0.68, y * girth * 0.6, leg)
        solids.append(Solid("cylinder", foot, (thick, thick, leg), (0, x * splay, 0), draw(1.0, 1.6)))
    neck, rise, head = draw(0.1, 0.75), draw(20, 80), draw(0.13, 0.28)
    forward, up = neck * math.cos(math.radians(rise)), neck * math.sin(math.radians(rise))
    root = (length * 0.85, 0.0, body + girth * 0.4)
    solids.append(
        Solid(
            "cylinder", (root[0] + forward, 0, root[2] + up), (thick * 1.6, thick * 1.4, neck), (0, 90 - rise, 0), 0.8
        )
    )
    top = (root[0] + 2 * forward, 0.0, root[2] + 2 * up)
    solids.append(Solid("ellipsoid", top, (head * draw(1.0, 1.6), head * 0.8, head)))
    snout = draw(0.05, 0.3)
    solids.append(
        Solid(
            "cylinder",
            (top[0] + head + snout * 0.6, 0, top[2] - 0.06),
            (head * 0.4, head * 0.4, snout),
            (0, 100, 0),
            0.7,
        )
    )
    ear = draw(0.04, 0.22)
    solids += [Solid("ellipsoid", (top[0], y * head * 0.8, top[2] + head), (0.04, 0.07, ear)) for y in (-1, 1)]
    tail, hang = draw(0.1, 0.5), draw(100, 220)
    solids.append(
        Solid(
            "cylinder",
            (-length - tail * math.sin(math.radians(hang)) * -0.9, 0, body + girth * 0.5 - tail * 0.5),
            (0.05, 0.05, tail),
            (0, hang, 0),
            0.5,
        )
    )
    return solids


def _human(draw: Draw) -> list[Solid]:
    leg, torso, wide = draw(0.4, 0.6), draw(0.3, 0.45), draw(0.2, 0.36)
    stride, thick = draw(0, 32), draw(0.08, 0.14)
    solids = []
    for side in (-1, 1):
        turn = side * stride
        lean = math.radians(turn)
        solids.append(
            Solid(
                "cylinder",
                (-math.sin(lean) * leg, side * wide * 0.55, leg * (2 - math.cos(lean))),
                (thick, thick, leg),
                (0, turn, 0),
                1.35,
            )
        )
        solids.append(
            Solid(
                "box",
                (-2 * math.sin(lean) * leg + 0.07, side * wide * 0.55, 0.05 + 2 * leg * (1 - math.cos(lean))),
                (0.16, thick, 0.06),
            )
        )
    chest = 2 * leg + torso
    kind: Literal["cylinder", "box"] = "box" if draw(0, 1) < 0.4 else "cylinder"
    solids.append(Solid(kind, (0, 0, chest), (draw(0.12, 0.22), wide, torso), (0, draw(-6, 12), 0), draw(0.9, 1.4)))
    arm = draw(0.3, 0.45)
    for side in (-1, 1):
        swing, lift = draw(-60, 60), draw(8, 150)
        along = Solid("box", (0, 0, 0), (1, 1, 1), (-side * lift, swing, 0)).rotation() @ np.array([0, 0, -1.0])
        hand = np.array([0, side * (wide + 0.06), chest + torso * 0.85]) + along * arm
        solids.append(
            Solid("cylinder", tuple(hand.tolist()), (thick * 0.75, thick * 0.75, arm), (-side * lift, swing, 0), 1.2)
        )
    head = draw(0.14, 0.24)
    centre = chest + torso + head * 1.15
    solids.append(Solid("ellipsoid", (0.02, 0, centre), (head, head * 0.9, head * draw(1.0, 1.25))))
    hat = draw(0, 1)
    if hat < 0.5:
        solids.append(
            Solid(
                "cylinder",
                (0.02, 0, centre + head * 0.95),
                (head * draw(0.8, 1.5),) * 2 + (head * 0.4,),
                taper=draw(0.2, 1.0),
            )
        )
    return solids


def _airplane(draw: Draw) -> list[Solid]:
    length, girth, height = draw(0.85, 1.15), draw(0.1, 0.22), draw(0.3, 0.5)
    solids = [Solid("ellipsoid", (0, 0, height), (length, girth, girth * draw(0.85, 1.25)))]
    if draw(0, 1) < 0.5:
        solids.append(
            Solid("cylinder", (-0.1 * length, 0, height), (girth, girth, length * 0.7), (0, 90, 0), draw(0.6, 1))
        )
    span, chord, sweep, dihedral = draw(0.55, 0.95), draw(0.12, 0.26), draw(-8, 38), draw(-2, 12)
    place, level = draw(-0.1, 0.3) * length, height + draw(-0.7, 0.7) * girth
    floors = (level, level + 2.2 * girth) if draw(0, 1) < 0.2 else (level,)
    for side, floor in product((-1, 1), floors):
        turn = math.radians(sweep)
        centre = (
            place - math.sin(turn) * span * 0.8,
            side * math.cos(turn) * span,
            floor + span * math.sin(math.radians(dihedral)),
        )
        solids.append(Solid("box", centre, (chord, span, 0.035), (side * dihedral, 0, side * sweep)))
    tail, fin = draw(0.22, 0.42), draw(0.15, 0.32)
    rear, top = -length * 0.88, height + draw(0.0, 1.6) * girth
    solids += [
        Solid("box", (rear - 0.05, side * tail * 0.9, top), (chord * 0.55, tail, 0.03), (0, 0, side * sweep))
        for side in (-1, 1)
    ]
    solids.append(
        Solid("box", (rear - fin * 0.3, 0, height + girth * 0.6 + fin), (chord * 0.6, 0.03, fin), (0, -draw(0, 35), 0))
    )
    engines = int(draw(0, 3))
    for number, side in product(range(engines), (-1, 1)):
        along = 0.4 + 0.45 * number
        solids.append(
            Solid(
                "cylinder",
                (
                    place + chord * 0.8 - along * math.sin(math.radians(sweep)) * span,
                    side * along * 1.3 * span,
                    level - 0.07,
                ),
                (0.08, 0.08, draw(0.12, 0.22)),
                (0, 90, 0),
            )
        )
    if engines == 0:
        blade = draw(0.2, 0.34)
        solids.append(Solid("box", (length * 1.01, 0, height), (0.02, 0.04, blade), (draw(0, 90), 0, 0)))
        solids.append(Solid("ellipsoid", (0.1 * length, 0, height + girth), (0.2, girth * 0.6, girth * 0.6)))
    return solids


def _wheels(places: Iterable[float], half_track: float, radius: float) -> list[Solid]:
    return [
        Solid("cylinder", (x, side * half_track, radius), (radius, radius, 0.07), (90, 0, 0))
        for x, side in product(places, (-1, 1))
    ]


def _truck(draw: Draw) -> list[Solid]:
    length, wide, radius = draw(0.8, 1.1), draw(0.26, 0.38), draw(0.12, 0.22)
    floor = radius * draw(1.1, 1.7)
    solids = [Solid("box", (0, 0, floor), (length, wide * 0.8, 0.06))]
    cab, tall = draw(0.16, 0.3), draw(0.26, 0.46)
    hood = draw(0.0, 0.28) if draw(0, 1) < 0.5 else 0.0
    nose = length - hood * 2 - cab
    solids.append(Solid("box", (nose, 0, floor + tall), (cab, wide, tall), (0, 0, 0)))
    if hood:
        solids.append(Solid("box", (length - hood, 0, floor + tall * 0.45), (hood, wide * 0.85, tall * 0.45)))
    back = (nose - cab + length) / 2
    load = -length + back
    kind = int(draw(0, 4))
    if kind == 0:
        solids.append(
            Solid("box", (load - 0.03, 0, floor + 0.06 + draw(0.3, 0.5)), (back * 0.94, wide, draw(0.3, 0.5)))
        )
    elif kind == 1:
        tank = draw(0.24, 0.36)
        solids.append(
            Solid("cylinder", (load - 0.02, 0, floor + 0.06 + tank), (tank, wide * 0.95, back * 0.94), (0, 90, 0))
        )
    elif kind == 2:
        side = draw(0.12, 0.26)
        solids += [Solid("box", (load, y * wide * 0.92, floor + side), (back * 0.92, 0.03, side)) for y in (-1, 1)]
        solids.append(Solid("box", (load - back * 0.9, 0, floor + side), (0.03, wide * 0.92, side)))
        if draw(0, 1) < 0.5:
            solids.append(Solid("ellipsoid", (load, 0, floor + side), (back * 0.8, wide * 0.8, side * 1.3)))
    else:
        solids.append(Solid("box", (load, 0, floor + 0.33), (back * 0.9, wide * 0.9, 0.2), (0, draw(5, 25), 0)))
    axles = [length * 0.72, -length * 0.66] + ([-length * 0.25] if draw(0, 1) < 0.5 else [])
    return solids + _wheels(axles, wide, radius)


def _car(draw: Draw) -> list[Solid]:
    length, wide, radius = draw(0.8, 1.1), draw(0.3, 0.44), draw(0.13, 0.22)
    low, floor = draw(0.12, 0.22), radius * draw(0.95, 1.3)
    body: Literal["ellipsoid", "box"] = "ellipsoid" if draw(0, 1) < 0.45 else "box"
    rounder = 1.25 if body == "ellipsoid" else 1.0
    solids = [Solid(body, (0, 0, floor + low * 0.8), (length * rounder**0.5, wide * rounder, low * rounder))]
    cabin, place, tall = draw(0.3, 0.6) * length, draw(-0.3, 0.12) * length, draw(0.13, 0.28)
    top = floor + low * 1.6 + tall * 0.7
    style = int(draw(0, 4))
    if style == 0:
        solids.append(Solid("ellipsoid", (place, 0, top - tall * 0.4), (cabin * 1.15, wide * 0.85, tall * 1.5)))
    elif style == 1:
        solids.append(Solid("cylinder", (place, 0, top), (cabin * 1.2, wide * 0.95, tall), taper=draw(0.55, 0.8)))
    elif style == 2:
        solids.append(Solid("box", (place, 0, top), (cabin, wide * 0.88, tall)))
        solids.append(
            Solid("box", (place + cabin, 0, top - tall * 0.2), (tall * 0.8, wide * 0.85, tall * 0.7), (0, 40, 0))
        )
    else:
        solids.append(Solid("box", (place + cabin * 0.5, 0, top - 0.05), (0.03, wide * 0.8, tall), (0, -30, 0)))
        solids += [Solid("ellipsoid", (place - 0.1, y * wide * 0.4, top - 0.08), (0.12, 0.1, 0.18)) for y in (-1, 1)]
    if draw(0, 1) < 0.3:
        solids.append(Solid("box", (-length * 0.95, 0, floor + low * 2.3), (0.09, wide * 0.9, 0.03)))
    return solids + _wheels((length * draw(0.55, 0.66), -length * draw(0.55, 0.66)), wide * 0.95, radius)


TOYS = dict(zip(CATEGORIES, (_animal, _human, _airplane, _truck, _car), strict=True))


def toy(category: str, instance: int, seed: int = 0) -> list[Solid]:
    """Build the solids of one toy, scaled to radius 1 about the origin.

    The same arguments always give the same toy.

    Arguments:
        category: one of `CATEGORIES`.
        instance: index of the toy in its category.
        seed: seed of the shapes, at least 0.

    Example:
        >>> len(toy("car", 0)) > 4
        True
    """
    random = np.random.default_rng([seed, CATEGORIES.index(category), instance])
    solids = TOYS[category](lambda low, high: float(random.uniform(low, high)))
    corners = np.array(
        [
            np.array(solid.centre) + solid.rotation() @ (np.array(signs) * solid.half_sizes)
            for solid in solids
            for signs in product((-1, 1), repeat=3)
        ]
    )
    middle = (corners.min(axis=0) + corners.max(axis=0)) / 2
    radius = float(np.linalg.norm(corners - middle, axis=1).max())
    return [
        replace(
            solid,
            centre=tuple(((np.array(solid.centre) - middle) / radius).tolist()),
            half_sizes=tuple((np.array(solid.half_sizes) / radius).tolist()),
        )
        for solid in solids
    ]
