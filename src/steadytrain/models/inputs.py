"""What a model wants to see: the size of its images and how their values are scaled."""

from __future__ import annotations

from dataclasses import dataclass, replace

from steadytrain.config.plain import check_types


@dataclass(frozen=True, kw_only=True)
class Input:
    """The preprocessing that a model's weights were trained for; None where nothing says so.

    Args:
        size: side of the square images in pixels.
        mean, std: of each channel, of values in [0, 1].
        crop: evaluation takes the centre ``crop`` share of the shorter side.
        interpolation: ``bilinear`` or ``bicubic``.
        channels: 1 (grey) or 3 (RGB).
    """

    size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop: float | None = None
    interpolation: str | None = None
    channels: int = 3

    def __post_init__(self) -> None:
        check_types(self, "input")

    def filled(self, size: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Input:
        """A copy without None: these values, a crop of 0.875 and bilinear interpolation where nothing was said.

        >>> Input(size=160, channels=1).filled(224, (0.5,), (0.25,)).size
        160
        """
        return replace(
            self,
            size=self.size or size,
            mean=self.mean or mean,
            std=self.std or std,
            crop=self.crop or 0.875,
            interpolation=self.interpolation or "bilinear",
        )

    def with_channels(self, channels: int) -> Input:
        """A copy for images of another number of channels: a grey image gets the mean of the colours' values.

        >>> Input(mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.2)).with_channels(1).mean
        (0.5,)
        """
        if channels == self.channels:
            return self
        mean, std = (told and (sum(told) / len(told),) * channels for told in (self.mean, self.std))
        return replace(self, mean=mean, std=std, channels=channels)
