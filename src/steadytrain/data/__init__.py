"""Images: where they lie, how they are checked and packed, and how batches are made of them.

docs/architecture.md lists the floors. The loader's names are here: ``st.data.ImageLoader``, ``st.data.Records``, ...
"""

import sys
from typing import Any

__all__ = ["BlockShuffle", "Crop", "ImageLoader", "ImageLoaderDataset", "Records", "Unpacked"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'steadytrain.data' has no attribute {name!r}", name=name)
    return getattr(sys.modules["steadytrain"], name)  # which loads each when it is first used


def __dir__() -> list[str]:
    return __all__
