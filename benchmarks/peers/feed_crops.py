"""Crops for contenders whose library has none: torchvision's RandomResizedCrop and evaluation in Python."""

import math
import random


def random_box(width, height):
    """Return left, top, right, bottom of a random area (0.08 to 1) and ratio (3/4 to 4/3)."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return left, top, left + w, top + h
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def shorter_side(width, height, side):
    """Return the size once the shorter side is ``side``."""
    return (side, side * height // width) if width < height else (side * width // height, side)


def centre(width, height, size):
    """Return left and top of the square in the middle."""
    return round((width - size) / 2), round((height - size) / 2)
