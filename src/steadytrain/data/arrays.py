"""Types of numpy arrays, by what they hold."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Pixels = NDArray[np.uint8]
"""uint8[H, W, 3], or uint8[H, W] of grey."""
