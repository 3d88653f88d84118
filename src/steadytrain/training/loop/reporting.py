"""Events of a run while it trains: losses and speed, epochs, where its time went, and notices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from msgspec.structs import replace

from steadytrain.events import EpochTrained, Event, FeedStats, Logged
from steadytrain.training.session.session import Session


def accounts(session: Session) -> Iterator[Event]:
    """Yield where the seconds of the attempt went so far, what the loader has done, and what servers have."""
    threads = torch.get_num_threads() if session.state.engine.device.type == "cpu" else None
    yield replace(session.clock.account(), compute_threads=threads)
    yield FeedStats(step=session.state.cursor.step, **vars(session.feed.stats()))
    if (exchanged := session.state.engine.account(session.state.cursor.step)) is not None:
        yield exchanged


def log_line(session: Session, lr: float) -> Logged:
    """Return loss and speed since the last line; waits for the device."""
    laps = session.laps
    with session.clock.within("logging"):
        loss, top1, norm = session.state.meters.take(session.state.engine)
    laps.lap()  # the device has done the work that the host had only asked for
    rate, share = laps.images / laps.seconds, laps.waited / laps.seconds
    laps.images, laps.seconds, laps.waited = 0, 0.0, 0.0
    return Logged(
        step=session.state.cursor.step,
        epoch=session.epoch,
        loss=loss,
        top1=top1,
        lr=lr,
        images_per_second=rate,
        wait_share=share,
        grad_norm=norm,
    )


def end_epoch(session: Session, before: int, *, is_last: bool = False) -> None:
    """Keep the sums of an epoch after the last of its updates; ``is_last``: of one that ends with the attempt.

    An update belongs to the epoch of its first image, which stands at ``before``.
    """
    cursor, num_train = session.state.cursor, session.data.num_train
    epoch = before // num_train
    is_whole = cursor.position // num_train > epoch
    if is_whole != is_last:
        session.state.meters.end_epoch(epoch + 1, cursor.step, is_whole=is_whole)


def epochs(session: Session) -> Iterator[EpochTrained]:
    """Tell of the epochs that ended. It waits for the device, so it comes with what has to wait for it anyway."""
    laps = session.laps
    with session.clock.within("logging"):
        ended = session.state.meters.take_epochs(session.state.engine)
    if ended:
        laps.lap()
        rate = laps.epoch_images / laps.epoch_seconds
        laps.epoch_images, laps.epoch_seconds = 0, 0.0
        for sums in ended:
            yield EpochTrained(**sums._asdict(), images_per_second=rate)


def pending_notices(session: Session) -> Iterator[Event]:
    """Yield what parts of the session have had to say since the last call."""
    while session.outbox:
        event: Any = session.outbox.popleft()
        yield replace(event, step=session.state.cursor.step)
