"""Heat maps by occlusion: how far the answer for a class falls where a part of the image is covered.

Each part is covered in turn with the image's mean colour, and the network answers again (Zeiler and Fergus 2014,
"Visualizing and Understanding Convolutional Networks", section 4.2). That needs no gradients and no layer by name: it
is the same for any network, view or exported file, and says no more than what was tried. The answer is the log odds of
the class: what all classes share is no reason for one of them. Gradients cost less and were tried (docs/report.md).
"""

from __future__ import annotations

import base64
import io
import json
import math
import time
from contextlib import closing

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from steadytrain.data.images.decode import decode
from steadytrain.data.results.predictions import read_predictions
from steadytrain.errors import DataError
from steadytrain.files import replace_file
from steadytrain.run import Run
from steadytrain.training import build
from steadytrain.training.data import load, open_data
from steadytrain.training.evaluation import logits_of
from steadytrain.training.inference.trained import Trained, restore
from steadytrain.training.memory import PassLimit
from steadytrain.training.precision import exact

MEANING = (
    "Coloured: where covering the picture makes the network less sure of the class; no proof. Dark: not seen by it."
)
CELLS = 7  # a side; twice as much is covered at a time
PASSES = CELLS**2 + 1  # passes through the network for the map of one image
MOST_MISTAKES = 24  # mistakes of a run that its report shows
LEAST_SIDE, MOST_SIDE = 256, 1024  # pixels of the longer side of a picture under its map

_AT_ONCE = 16  # images
_COLOURS = np.array([(60, 15, 110), (190, 45, 100), (245, 130, 30), (255, 235, 90)], np.float32)  # ever lighter
_COVERED, _UNSEEN = 0.75, 0.3  # of the picture by the strongest colour; of its brightness that is left in the dark


def heat_maps(trained: Trained, images_BHWC: Tensor, outputs_BN: Tensor, limit: PassLimit) -> NDArray[np.float32]:
    """Map which places of each image spoke for some of the model's outputs, by :data:`PASSES` passes of each image.

    Args:
        trained: the model.
        images_BHWC: uint8, as the model sees them, on its device.
        outputs_BN: int64, the outputs to map of each image.
        limit: images that go through the network at a time.

    Returns:
        float32 [B, N, 7, 7], 1 at the strongest place of each map; all 0 where none spoke for the class.
    """
    edges = (torch.arange(2 * CELLS + 1) * images_BHWC.shape[1] / (2 * CELLS)).round().int().tolist()
    spans = [slice(edges[max(0, 2 * cell - 1)], edges[min(2 * CELLS, 2 * cell + 3)]) for cell in range(CELLS)]
    maps = []
    for image, outputs in zip(images_BHWC, outputs_BN, strict=True):
        covered = image.repeat(PASSES, 1, 1, 1)
        colour = image.float().mean((0, 1)).round().to(image.dtype)
        for number in range(1, PASSES):
            row, column = divmod(number - 1, CELLS)
            covered[number, spans[row], spans[column]] = colour
        with torch.no_grad():
            parts = covered.split(_AT_ONCE)
            logits = torch.cat(
                [logits_of(trained.module, part, trained.policy, trained.input, limit) for part in parts]
            )
            answers = _answers(trained, exact(logits), outputs)
        maps.append((answers[:1] - answers[1:]).T.reshape(-1, CELLS, CELLS).nan_to_num(0, 0, 0).relu())
    stacked = torch.stack(maps)
    return (stacked / stacked.amax((2, 3), keepdim=True)).nan_to_num(0).float().cpu().numpy()


def _answers(trained: Trained, logits: Tensor, outputs_N: Tensor) -> Tensor:
    """Return the log odds of classes against all others, [B, N]; of several labels their logits."""
    answers = logits[:, outputs_N]
    if trained.is_multi_label or logits.shape[1] == 1:
        return answers
    others = [logits.index_fill(1, output, -torch.inf).logsumexp(1) for output in outputs_N]
    return answers - torch.stack(others, 1)


def draw(trained: Trained, data: bytes | memoryview, cells: NDArray[np.float32], side: int | None = None) -> bytes:
    """Lay a map over the image file that it is of, which becomes grey, and dark where the model did not see it.

    Returns a JPEG, upright, whose longer side has ``side`` pixels, or those of the image, from 256 to 1,024. Raises
    BadImageError: the file cannot be decoded.
    """
    picture, crop = decode(data).convert("L"), build.evaluation_crop(trained.input)
    scale = (side or min(max(*picture.size, LEAST_SIDE), MOST_SIDE)) / max(picture.size)
    width, height = (max(1, round(scale * pixels)) for pixels in picture.size)
    plan = crop.plan(np.array([picture.size[::-1]]), np.empty((1, 0))).squares[0]
    down, across = height / plan.resized[0], width / plan.resized[1]
    square = max(1, round(crop.size * across)), max(1, round(crop.size * down))
    seen = Image.new("F", (width, height), -1.0)
    heat = Image.fromarray(np.ascontiguousarray(cells)).resize(square, Image.Resampling.BILINEAR)
    seen.paste(heat, (round(plan.corner[1] * across), round(plan.corner[0] * down)))
    values, buffer = np.asarray(seen)[..., None], io.BytesIO()
    grey = np.asarray(picture.resize((width, height), Image.Resampling.LANCZOS), np.float32)[..., None]
    places = np.linspace(0, 1, len(_COLOURS))
    colours = np.concatenate([np.interp(values, places, channel) for channel in _COLOURS.T], axis=2)
    share = _COVERED * np.sqrt(values.clip(0, 1))
    pixels = np.where(values < 0, _UNSEEN * grey, (1 - share) * grey + share * colours)
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def data_address(picture: bytes) -> str:
    """Return a JPEG as a data address."""
    return f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}"


def map_mistakes(run: Run, *, seconds: float = math.inf) -> None:
    """Write small pictures of what spoke for a run's worst mistakes into its folder, by record, for its report.

    The worst comes first; after ``seconds`` no further one is begun.

    Raises:
        DataError, RunError, ModelError: its images, predictions or weights are gone, or do not belong together.
        StorageError: the file cannot be written.
    """
    trained, limit = restore(run), PassLimit("evaluation", on_halved=lambda halved: None)
    until = time.perf_counter() + seconds
    with closing(open_data(run.data, run.recipe.model, seed=run.recipe.seed, run=run)) as sets:
        if (val := sets.val) is None or trained.is_multi_label:
            return
        wrong = [row for row in read_predictions(run.predictions) if row.true != row.predicted]
        rows = sorted(wrong, key=lambda row: -row.loss if math.isfinite(row.loss) else 1.0)[:MOST_MISTAKES]
        try:
            ids = np.array([val.number(row.shard, row.record) for row in rows], np.int64)
            outputs = torch.tensor([[trained.classes.index(row.predicted)] for row in rows])
        except (IndexError, ValueError) as error:
            raise DataError(f"{run.predictions} is not of the run's images and weights ({error})") from error
        pictures: dict[int, dict[str, str]] = {}
        if rows:
            with trained.feed(val, ids=ids, batch_size=len(ids), threads=1) as feed:
                images = next(iter(load(feed, trained.policy.device))).images
                for at, (number, row) in enumerate(zip(ids.tolist(), rows, strict=True)):
                    if at and time.perf_counter() >= until:
                        break
                    this = slice(at, at + 1)
                    cells = heat_maps(trained, images[this], outputs[this].to(images.device), limit)[0, 0]
                    source = data_address(draw(trained, val.image(number), cells, 112))
                    pictures[number] = {"class": row.predicted, "source": source}
    replace_file(run.maps, json.dumps({"meaning": MEANING, "records": pictures}))
