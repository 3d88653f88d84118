"""Evaluations of a run: when they are due, the event, the best weights, the average's own statistics."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import nn

from steadytrain.config.figures import NEED_OUTPUTS, SIGN, is_better
from steadytrain.data.arrays import Ints
from steadytrain.data.loader import Batch
from steadytrain.errors import CheckpointError, DivergedError, ModelError, SteadyError
from steadytrain.events import Evaluated, Event, Tested
from steadytrain.format import few
from steadytrain.training.checkpoints import read_weights
from steadytrain.training.data import DeviceBatch
from steadytrain.training.ema import Ema
from steadytrain.training.evaluation import Evaluation, evaluate_module, write_per_image
from steadytrain.training.inference.prior import weighting
from steadytrain.training.loop.saving import (
    export,
    finish_writing,
    require_finite_weights,
    settled_loss,
    write_checkpoint,
)
from steadytrain.training.metrics import effective_n, even_shift
from steadytrain.training.metrics import figure as figure_of
from steadytrain.training.session.session import Session, Validation
from steadytrain.training.state import in_mode

STATISTICS_BATCHES = 8
"""Batches by which the average's running statistics are computed; each costs a forward pass."""


def is_due(session: Session) -> bool:
    """Return whether there is something to evaluate on, and it is time."""
    if session.validation is None:
        return False
    period = session.recipe.every.evaluate_epochs
    passed = _periods(session.epoch, period) > _periods(session.state.evaluated, period)
    return passed or (session.is_done and session.state.evaluated < session.epoch)


def _periods(epoch: float, period: float) -> int:
    return math.floor(epoch / period + 1e-9)  # 0.3 / 0.1 is 2.9999999999999996


@contextlib.contextmanager
def settle_average(session: Session, ema: Ema, batch: DeviceBatch) -> Iterator[None]:
    """Around an update: if the average is about to be used, move it towards running statistics of its own.

    Running statistics are those of the weights that were trained, whose noise the average has not: under a high
    learning rate they fit it badly. Averaged weights need a few batches of their own (Izmailov et al. 2018, "Averaging
    Weights Leads to Wider Optima and Better Generalization", section 3.2); here the last ones before they are used.
    """
    state = session.state
    left = session.timeline.steps - state.cursor.step  # updates until the weights are exported, or evaluated
    if session.validation is not None:
        period = session.recipe.every.evaluate_epochs
        until = session.timeline.update_at((_periods(session.epoch, period) + 1) * period)
        left = min(left, until - state.cursor.step)
    is_due = ema.is_average and left <= STATISTICS_BATCHES
    ema.keeps_statistics = settles = is_due and ema.has_statistics(state.module)
    yield
    if settles:
        with session.clock.within("evaluation"), torch.no_grad(), state.policy.autocast():
            n, number = len(batch.images), STATISTICS_BATCHES - left  # of the batches before it
            limit = session.update.limit
            parts = batch.images.tensor_split(-(-n // (n if limit is None else limit.at_once(n))))
            for k, part in enumerate(parts):
                images = state.policy.images(part, session.input.mean, session.input.std)
                ema.settle(state.module, images, share=1 / (number * len(parts) + k + 1))


def maybe_evaluate(session: Session, stop: Callable[[], str | None]) -> Iterator[Event]:
    """Evaluate, if it is time, and keep the best weights; a request to stop ends it without a result.

    Raises:
        DivergedError: the loss on the validation images of the last evaluation is not finite.
    """
    validation = session.validation
    if validation is None or not is_due(session):
        return
    with contextlib.ExitStack() as settled:
        yield from _evaluate(session, validation, stop, settled)
    session.laps.restart()


def _evaluate(
    session: Session, validation: Validation, stop: Callable[[], str | None], settled: contextlib.ExitStack
) -> Iterator[Event]:
    """Evaluate and keep the best weights; ``settled``: until when all ranks have the weights that count."""
    state, engine, module = session.state, session.state.engine, session.evaluated_module
    settled_loss(session)
    engine.rest()
    began = time.perf_counter()
    try:
        with session.clock.within("evaluation"):
            is_last = session.is_done
            settled.enter_context(engine.settled(module))
            evaluation = _evaluate_on(session, validation, session.data.num_val, stop)
    except Exception:
        # The updates are sound whatever became of the validation data; other ranks are not asked for their part.
        with contextlib.suppress(SteadyError):
            if engine.world.size == 1:
                require_finite_weights(session)
                write_checkpoint(session, time.perf_counter())
                yield from finish_writing(session)
        raise
    if evaluation is not None:
        value = figure_of(evaluation, state.figure)
        now = SIGN[state.figure] * value, evaluation.loss
        is_best = is_better(state.figure, now, (state.best, state.best_loss), evaluation.n)
        is_replaced = is_best or is_last or state.cursor.step >= state.lost_best
        if state.lost_best and is_replaced:  # the weights on the disk are of no update now
            is_best, state.lost_best = is_best or all(map(math.isfinite, now)), 0
        state.evaluated, validation.seconds = session.epoch, time.perf_counter() - began
        seconds, figures = validation.seconds, _figures(session, evaluation, session.data.val_groups)
        figures |= {
            "figure": state.figure,
            "figure_value": value,
            "is_best": is_best,
            "loss_error": evaluation.loss_error,
        }
        yield Evaluated(step=state.cursor.step, epoch=session.epoch, seconds=seconds, **figures)
        progress = session.timeline.batches.progress(state.cursor.step)
        if (span := session.timeline.plateau) is not None and progress > span.begin:
            watched = {"top1": evaluation.score, "loss": -evaluation.loss}
            state.plateau = state.plateau.after(span.stage, watched.get(span.stage.on, now[0]))
        totals = zip(session.data.classes, evaluation.total, strict=True)
        left_out = [name for name, n in totals if n in (0, evaluation.n) and state.figure == "auc"]
        if left_out and not math.isfinite(state.best):
            session.notice(f"AUC leaves out the classes of no validation image, or of each: {few(left_out)}")
        state.misses += 1
        if is_best:
            require_finite_weights(session, module)  # padding hides those that see nothing else from the loss
            (state.best, state.best_loss), state.misses = now, 0
            export(session, "best.safetensors")
            if session.is_first:
                with session.clock.within("checkpoint"):  # it is the disk's time, as that of the weights
                    write_per_image(session.run.predictions, *session.data.validated, evaluation)
        if is_last and not math.isfinite(evaluation.loss):
            kept = "" if math.isfinite(state.best) else "; no evaluation was finite, and there are no best weights"
            values = [engine.own_values(value.detach()) for value in (*module.parameters(), *module.buffers())]
            square = torch.stack([value.float().square().sum() for value in values]).sum()
            if math.isfinite(float(engine.sum(square))):  # the network can be used, in training mode at least
                export(session, "model.safetensors")
                yield from finish_writing(session)
                kept += "; model.safetensors has the last weights, which are finite"
            raise DivergedError(f"{session.diverged(f'the loss on the validation images is {evaluation.loss}')}{kept}")


def _evaluate_on(
    session: Session, part: Validation, num_images: int, stop: Callable[[], str | None]
) -> Evaluation | None:
    """Evaluate the network as it is on images, together with the other ranks; None where somebody asks to stop."""
    state, engine, module = session.state, session.state.engine, session.evaluated_module
    was_stopped = False
    together = _Together(session) if engine.is_sharded else None

    def until_stopped() -> Iterator[Batch]:
        nonlocal was_stopped
        for batch in part.feed:
            session.clock.to(session.clock.bucket)  # the watchdog sees that it moves
            if stop() or (together is not None and together.is_stopped):
                was_stopped = True
                if together is not None:
                    together.is_stopped = True
                return
            yield batch

    data, counts = session.data, session.data.class_counts.tolist()
    evaluation = evaluate_module(
        together or module,
        until_stopped(),
        state.policy,
        session.input,
        len(data.classes),
        sum_ranks=engine.sum if together is None else together.finish_and_sum,
        num_outputs=num_images,
        is_multi_label=data.num_labels is not None,
        keep_logits=state.figure in NEED_OUTPUTS and part is session.validation,
        shift=None if data.num_labels else even_shift(counts, weighting(session.recipe, state.cursor.step)),
        limit=part.limit,
    )
    stopped = float(engine.sum(torch.tensor(float(was_stopped), device=engine.device)))
    return None if stopped else evaluation


class _Together(nn.Module):
    """The evaluated network, of which ranks gather the parameters together: in passes of one image, for ranks without.

    ``is_stopped``: some rank has ended early, and the others do so, too.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.module, self._session, self.is_stopped = session.evaluated_module, session, False

    def forward(self, images: torch.Tensor) -> Any:
        self._is_any_left(has_pass=True)
        return self.module(images)

    def finish_and_sum(self, count: torch.Tensor) -> torch.Tensor:
        """Take part in what passes other ranks have left; then sum a tensor over the ranks."""
        session, policy = self._session, self._session.state.policy
        size, channels = session.input.size or 1, session.input.channels
        image = policy.images(torch.zeros(1, size, size, channels, dtype=torch.uint8), None, None)
        with in_mode(self.module, "evaluation"), torch.no_grad(), policy.autocast():
            while self._is_any_left(has_pass=False):
                self.module(image)
        return session.state.engine.sum(count)

    def _is_any_left(self, *, has_pass: bool) -> bool:
        engine = self._session.state.engine
        left, stopped = engine.sum(torch.tensor([has_pass, self.is_stopped], device=engine.device).float()).tolist()
        self.is_stopped = bool(stopped)
        return bool(left)


def _figures(session: Session, evaluation: Evaluation, groups: Ints | None) -> dict[str, Any]:
    """Return the figures of an evaluation that its event holds; ``groups``: of its images."""
    ema, macro = session.state.ema, evaluation.macro
    figures = {name: getattr(evaluation, name) for name in ("n", "loss", "top1", "top5", "mean_ap")}
    figures["even_top1"], figures["even_macro_recall"] = evaluation.other or (None, None)
    if evaluation.outputs is not None:
        figures["effective_n"] = effective_n(evaluation.outputs[:, 3] == 1, groups)
    weights = "model" if ema is None else "ema" if ema.decay is not None else "swa"
    return {**figures, "macro_recall": macro.recall, "macro_f1": macro.f1, "weights": weights}


def evaluate_test(session: Session, stop: Callable[[], str | None]) -> Generator[Event, None, bool]:
    """Evaluate the best weights, or the last where none were validated, on the test images; the run ends with it.

    An attempt that goes on after it was killed at its very end does not evaluate the same weights again.

    Returns:
        Whether that is done; not where somebody asks to stop.
    """
    if session.test is None or session.data.test is None:
        return True
    with session.clock.within("evaluation"):
        digest, progress = session.data.test.digest, session.run.progress()
        tested = progress.tested if progress.tested is not None and progress.tested.data == digest else None
        step, is_done = _load_best(session, tested)
        if is_done:
            return True
        began = time.perf_counter()
        with session.state.engine.settled(session.evaluated_module):
            evaluation = _evaluate_on(session, session.test, session.data.num_test, stop)
    if evaluation is None:
        return False
    epoch = session.timeline.epoch(int(session.timeline.batches.position(step)))
    seconds, figures = time.perf_counter() - began, _figures(session, evaluation, session.data.test_groups)
    figures |= {"before": progress.num_tested, "num_seen": session.data.num_test_seen}
    yield Tested(step=step, epoch=epoch, seconds=seconds, data=digest, **figures)
    return True


def _load_best(session: Session, tested: Tested | None) -> tuple[int, bool]:
    """Load the best weights on all ranks, as the first one has written them; the last stay where there are none.

    Args:
        tested: of weights that were tested already: if they are the best, nothing is loaded.

    Returns:
        The updates after which these were the weights, and whether they were tested already.
    """
    engine, module = session.state.engine, session.evaluated_module
    weights, step = dict[str, torch.Tensor](), session.state.cursor.step
    if session.is_first:
        with contextlib.suppress(CheckpointError, ModelError):
            weights, about = read_weights(session.run.directory / "best.safetensors")
            step = int(about.get("step", step))
    facts = [bool(weights), step, tested is not None and step == tested.step] if session.is_first else [0, 0, 0]
    has_best, step, is_done = engine.sum(torch.tensor(facts, dtype=torch.int64, device=engine.device)).tolist()
    if has_best and not is_done:
        for name, value in module.state_dict().items():
            if engine.is_sharded:  # it takes the first rank's, and leaves no whole tensor here
                weights.setdefault(name, torch.empty(value.shape, dtype=value.dtype, device="meta"))
                continue
            whole = torch.empty_like(value)
            weights[name] = engine.broadcast(whole.copy_(weights[name]) if session.is_first else whole)
        engine.load_weights(module, weights)
    return step, bool(is_done)
