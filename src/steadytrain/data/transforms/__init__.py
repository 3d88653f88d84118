"""Transforms of training batches, on the device: colour, geometry, policies, erasing and mixing."""

from steadytrain.data.transforms.augment import Augmentation as Augmentation
from steadytrain.data.transforms.augment import make_own as make_own
