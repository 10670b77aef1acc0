"""The training loop: steps, evaluations, samples and checkpoints of one run, which can be stopped and resumed anywhere.

It knows how the parts go together, and the run folder; it draws nothing (listeners get records, see log.py) and reads
no command line. Everything that decides the next step's bits is in a checkpoint: weights, the optimiser's averages,
where the loader stands, the random state, the loss scale, the running mean of the loss. So a run that was killed and
resumed ends with the weights of one that never was, bit for bit: on a CPU always, on a GPU with `deterministic`.

    trainer = Trainer(run, open_prepared("data/stories"), device="auto", listeners=[print])
    trainer.train()                       # from the last checkpoint where there is one
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fuselm import cost
from fuselm.checkpoint import Run
from fuselm.config import TrainConfig
from fuselm.data.shards import Shard
from fuselm.optim import AdamW, decay_groups
from fuselm.torchlm.checks import check_data, device_for, precision_of_run
from fuselm.torchlm.evaluate import Evaluation, evaluate
from fuselm.torchlm.feed import Feed
from fuselm.torchlm.graph import GraphedGradients, NotRecordable, Watch, is_for_graph
from fuselm.torchlm.layers import narrow
from fuselm.torchlm.log import Listener
from fuselm.torchlm.memory import logits_bytes, pick_micro_batch
from fuselm.torchlm.model import Transformer
from fuselm.torchlm.precision import (
    DTYPES,
    LossScaler,
    attention_backends,
    make_deterministic,
)
from fuselm.torchlm.sample import sample
from fuselm.torchlm.schedule import learning_rate
from fuselm.torchlm.state import restore, snapshot
from fuselm.torchlm.step import Found, Outcome, gradients, update

MEAN_SHARE = 0.05  # of a new loss in the running mean that spikes are measured against
STEPS_BEFORE_SPIKES = 20  # a mean of fewer losses says little
SAMPLE_TEMPERATURE = 0.8
EVALUATION_TOKENS = 65_536  # at once at the most, and no more rows than a step has: those fit the memory


class Interrupted(Exception):
    """Somebody asked the run to stop; everything is saved."""


class TrainingFailed(RuntimeError):
    """The loss is no number, or leaps, for so many steps in a row that going on makes no sense."""


@dataclass
class Progress:
    """Where a run stands; all of it is in a checkpoint."""

    step: int = 0  # steps made, or skipped
    updates: int = 0  # steps made
    seconds: float = 0.0  # spent in steps, evaluations and saves, over all sessions
    mean_loss: float | None = None
    best_loss: float | None = None
    best_step: int = 0
    stale: int = 0  # evaluations since the best one
    bad_steps: int = 0  # in a row
    first_bad: int = 0  # where that row began


class Trainer:
    """A run under way. `stop()` may be called from a signal handler: the step that is being made is finished first."""

    on_step: Callable[[int], None] | None = None  # called after each step with its number

    def __init__(
        self,
        run: Run,
        shards: Mapping[str, Shard],
        *,
        device: str = "auto",
        listeners: Iterable[Listener] = (),
        on_evaluation: Callable[[int, int], None] | None = None,
        cuda_graph: bool | None = None,  # of this session; None: as the run has it
    ) -> None:
        assert run.train is not None
        self.run, self.config, self.shards, self.listeners = run, run.train, shards, list(listeners)
        self.on_evaluation = on_evaluation
        self.tokenizer = run.tokenizer()
        checkpoint = run.load("last") if run.has_checkpoint else None
        self.cuda_graph = self.config.cuda_graph if cuda_graph is None else cuda_graph
        self.device = device_for(device, cuda_graph if checkpoint else self.cuda_graph)
        begun_in = checkpoint.state.get("precision") if checkpoint else None  # "auto" may be another one here
        self.precision = precision_of_run(begun_in, self.config.precision, self.device)
        if self.config.deterministic:
            make_deterministic()
        check_data(run.model, self.config, shards, self.tokenizer)
        torch.manual_seed(self.config.seed)  # of dropout, on every device
        self.model = Transformer(run.model, dtype=DTYPES[self.precision], device=self.device, seed=self.config.seed)
        self.model.logits_bytes = logits_bytes(self.device)
        self.parameters = list(self.model.parameters())
        self.optimizer = _optimizer_for(self.model, self.config)
        self.scaler = LossScaler(enabled=self.precision == "fp16")
        self.progress = Progress()
        self.micro_batch = self.config.micro_batch or 0
        place: dict[str, int] = {}
        if checkpoint is not None:
            place = restore(self, checkpoint)
        self.feed = Feed(
            shards["train"],
            batch_size=self.config.batch_size,
            context=run.model.context,
            seed=self.config.seed,
            rows=self.config.rows,
            device=self.device,
            **place,
        )
        # Last, when all but gradients, averages and activations is in memory.
        self.micro_batch = self.micro_batch or pick_micro_batch(
            run.model, self.config.batch_size, self.device, self.precision, held=cost.weight_bytes(run.model)
        )
        self.loss: Callable[..., Any] = self.model.loss
        if self.config.compile:
            self.loss = torch.compile(self.model.loss, dynamic=False)
            self.optimizer.compile()
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        self.peak = cost.peak(name, self.precision)
        self._leaves: list[torch.Tensor] = []  # what gradients are of; found out at the first step
        self._graphed: GraphedGradients | None = None
        self._eager: bool | None = None  # decided at the first step, when all hooks are there
        self._stopping = False
        self._begun: float | None = None  # when it would have begun, had it never stopped
        self._since = _Since()
        self._unsettled: tuple[Found, float] | None = None
        self._last: dict[str, float] = {}

    # --- the loop ----------------------------------------------------------------------------------------------------

    def train(self) -> Progress:
        """Go on to the last step, or until the loss has not got better for long enough."""
        if self.finished:
            return self.progress
        with attention_backends(self.config.deterministic):
            self._begun = time.monotonic() - self.progress.seconds
            while not self.finished:
                self.advance()
                self._after_step()
                if self.on_step is not None:
                    self.on_step(self.progress.step)
                if self._stopping and not self.finished:
                    self.save()
                    self._end("stopped")
                    raise Interrupted
            self._end("patience" if self.progress.step < self.config.steps else "done")
        return self.progress

    def _end(self, reason: str) -> None:
        if self._since.losses:
            self._tell("step", **self._record())
        self._tell("end", reason=reason)
        self._begun = None

    def stop(self) -> None:
        """Save and leave after this step."""
        self._stopping = True

    @property
    def tokens_per_step(self) -> int:
        """Targets of a batch."""
        return self.config.batch_size * self.run.model.context

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        patience = self.config.patience
        return self.progress.step >= self.config.steps or bool(patience and self.progress.stale >= patience)

    def advance(self) -> None:
        """Launch one step; what came of the one before is read while this one runs."""
        begin = time.monotonic()
        config, progress = self.config, self.progress
        rate = self.rate(progress.step)
        found = self._gradients()
        self._settle()  # the step before: by now its numbers are there, and this step's limit depends on them
        progress.step += 1
        update(self.optimizer, found, learning_rate=rate, clip=config.clip, limit=self._limit())
        self._unsettled = (found, rate)
        if self.scaler.enabled:  # the next step's scale depends on this one
            self._settle()
        self._since.seconds += time.monotonic() - begin

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0."""
        config = self.config
        return learning_rate(
            step,
            kind=config.schedule,
            peak=config.learning_rate,
            steps=config.steps,
            warmup=config.warmup,
            floor=config.floor,
            decay_share=config.decay_share,
        )

    def losses(self) -> list[float]:
        """Of every step since the last record; waits for the last step."""
        self._settle()
        return list(self._since.losses)

    def _gradients(self) -> Found:
        """Those of the next batch, launched one by one or as a graph."""
        batches, scale = list(self.feed.next(self.micro_batch)), self.scaler.scale
        leaves = self._leaves = self._leaves or self._narrow()
        self.optimizer.refresh()  # should somebody have written over weights
        for parameter, leaf in zip(self.parameters, leaves, strict=True):
            if parameter is not leaf:  # whoever asked for its gradient has had it: the copy's counts
                parameter.grad = None
        fixed: dict[str, Any] = {
            "parts": self.config.batch_size // self.micro_batch,
            "balance_weight": self.run.model.balance_weight if self.run.model.num_experts else 0.0,
            "norm": self.model.ops.global_norm,
        }
        if self._eager is None:
            self._eager = not is_for_graph(self.cuda_graph, self.model, self.micro_batch, self.device)
            self._watch = Watch(self.model)
        if self.cuda_graph is None and not self._eager and not self._watch.sees_nothing(self.loss):
            self._settle()  # the step before, which may be at work in the graph's memory
            self._graphed, self._eager = None, True
        if not self._eager:
            self._graphed = self._graphed or GraphedGradients(self.loss, leaves, **fixed)
            try:
                return self._graphed(batches, scale)
            except (NotRecordable, torch.OutOfMemoryError) as error:
                self._go_on_without(error)
        return gradients(self.loss, leaves, batches, scale=scale, **fixed)

    @property
    def is_graphed(self) -> bool:
        """Whether steps are launched as one CUDA graph."""
        return self._graphed is not None

    def _go_on_without(self, error: Exception) -> None:
        """Without a graph, which is as good, unless somebody has asked this run to begin with one."""
        asked = self.cuda_graph
        if asked and (not self.run.has_checkpoint or not isinstance(error, NotRecordable)):
            raise error
        if asked:  # it began where this could be recorded: what it has learnt is not to be lost
            warnings.warn(f"{error} This run goes on without one.", RuntimeWarning, stacklevel=4)
        self._graphed, self._eager = None, True

    def _narrow(self) -> list[torch.Tensor]:
        """The parameters, but of those that are cast at each use 16-bit copies, which AdamW writes with them.

        A batch in several parts adds its gradients up in what they are of: then they are of fp32 weights.
        """
        dtype, whole = DTYPES[self.precision], self.micro_batch == self.config.batch_size
        if dtype == torch.float32 or not whole:
            return list(self.parameters)
        copies = narrow(self.model, lambda parameter: self.optimizer.narrow(parameter, dtype))
        return [copies.get(parameter, parameter) for parameter in self.parameters]

    def _limit(self) -> float:
        """The loss above which a step counts as a spike and is not made."""
        mean = self.progress.mean_loss
        settled = bool(self.config.spike_factor) and self.progress.updates >= STEPS_BEFORE_SPIKES
        # Rounded as the device rounds it: both must come to the same verdict.
        return float(np.float32(self.config.spike_factor * mean)) if mean is not None and settled else math.inf

    def _settle(self) -> None:
        """Read what came of the step that was launched last, and draw the conclusions."""
        if self._unsettled is None:
            return
        (found, rate), self._unsettled = self._unsettled, None
        outcome, progress = found.outcome(), self.progress
        self._last = {"learning_rate": rate, "gradient_norm": outcome.norm, "loss_scale": found.scale}
        self._last |= {"balance": outcome.balance} if self.run.model.num_experts else {}
        self._since.add(outcome.loss, self.tokens_per_step)
        limit = self._limit()
        self.scaler.update(outcome.finite)
        if outcome.finite and outcome.loss <= limit:
            progress.updates, progress.bad_steps = progress.updates + 1, 0
            mean = progress.mean_loss
            progress.mean_loss = outcome.loss if mean is None else mean + MEAN_SHARE * (outcome.loss - mean)
        else:
            self.optimizer.uncount()
            self._skipped(outcome, found.scale)

    def _skipped(self, outcome: Outcome, scale: float) -> None:
        """A bad step has changed nothing but the count of bad ones; too many in a row end the run."""
        progress, factor = self.progress, self.config.spike_factor
        if outcome.finite:
            fault = f"loss {outcome.loss:.4g}, over {factor:g} times its running mean {progress.mean_loss:.4g}"
        else:
            fault = f"loss {outcome.loss:g}, gradient norm {outcome.norm:g}"
        self._tell("skip", reason=fault, loss_scale=scale)
        if not outcome.finite and scale > 1.0:
            return  # an overflow of fp16, and what the scale is there for
        progress.bad_steps += 1
        progress.first_bad = progress.step if progress.bad_steps == 1 else progress.first_bad
        if progress.bad_steps >= self.config.bad_steps:
            kept = f"step {self.run.saved['last']} in {self.run.folder}" if self.run.has_checkpoint else "none yet"
            raise TrainingFailed(
                f"Steps {progress.first_bad} to {progress.step} were bad and were not made ({fault}); the last good "
                f"checkpoint is {kept}. Look at the data, or begin a new run with a lower learning rate or a longer "
                "warm-up."
            )

    def _after_step(self) -> None:
        config, step = self.config, self.progress.step
        last = step >= config.steps
        intervals = (config.log_every, config.eval_every, config.save_every, config.sample_every)
        if last or self._stopping or any(step % every == 0 for every in intervals if every):
            begin = time.monotonic()
            self._settle()
            self._since.seconds += time.monotonic() - begin  # the device was at work on the step
        if step % config.log_every == 0 or last:
            self._tell("step", **self._record())
        saved = False
        if step % config.eval_every == 0 or last:
            saved = self._evaluate()
        every = config.eval_every if config.sample_every is None else config.sample_every
        if every and (step % every == 0 or last):
            self._tell("sample", text=self.sample_text())
        if not saved and self._save_is_due():
            self.save()

    def _save_is_due(self) -> bool:
        """At its step, but not while steps go wrong: a run resumed from there would go wrong again."""
        every = self.config.save_every or self.config.eval_every
        return self.finished or (self.progress.step % every == 0 and not self.progress.bad_steps)

    def _record(self) -> dict[str, Any]:
        found = self._since.record()
        share = cost.mfu(self.run.model, found["tokens_per_second"], self.peak) if self.peak else None
        return {**found, **self._last, "tokens": self.progress.step * self.tokens_per_step, "mfu": share}

    # --- evaluation, samples -----------------------------------------------------------------------------------------

    def evaluation(self) -> Evaluation:
        """The loss on the whole validation split, as evaluate.py defines it."""
        context = self.run.model.context
        rows = min(self.micro_batch, max(1, EVALUATION_TOKENS // context))
        self.model.eval()
        try:
            return evaluate(
                self.model.loss,
                self.shards["valid"],
                batch_size=rows,
                context=context,
                device=self.device,
                tokenizer=self.tokenizer,
                on_progress=self.on_evaluation,
            )
        finally:
            self.model.train()

    def _evaluate(self) -> bool:
        """Evaluate, keep the best; whether that saved everything."""
        progress = self.progress
        begin = time.monotonic()
        found = self.evaluation()
        better = math.isfinite(found.loss) and (progress.best_loss is None or found.loss < progress.best_loss)
        if better:
            progress.best_loss, progress.best_step, progress.stale = found.loss, progress.step, 0
        else:
            progress.stale += 1
        seconds = time.monotonic() - begin
        self._tell("eval", loss=found.loss, bits_per_byte=found.bits_per_byte, best=better, took=seconds)
        whole = self._save_is_due()
        if better:
            self.save(best_loss=found.loss, weights_only=not whole)
        return better and whole

    def sample_text(self) -> str:
        """A text by the model as it is now."""
        return self.texts(1, self.config.sample_tokens, self.config.seed + self.progress.step)[0][0]

    def texts(
        self, count: int, max_tokens: int, seed: int, on_progress: Callable[[int, int], None] | None = None
    ) -> list[tuple[str, bool]]:
        """Texts from the beginning of a document on, and whether each came to its end."""
        tokenizer = self.tokenizer
        separator = tokenizer.end_of_text
        # A corpus that is one document has no separator: then texts go on from its first token.
        start = int(self.shards["valid"].tokens[0]) if separator is None else separator
        found = sample(
            self.model,
            [start],
            count=count,
            max_tokens=max_tokens,
            temperature=SAMPLE_TEMPERATURE,
            seed=seed,
            stop=separator,
            vocab_size=tokenizer.vocab_size,
            on_progress=on_progress,
        )
        lead = [] if separator is not None else [start]
        return [(tokenizer.decode([*lead, *one.ids]), one.finished) for one in found]

    # --- state -------------------------------------------------------------------------------------------------------

    def save(self, best_loss: float | None = None, weights_only: bool = False) -> None:
        """Save what the next step depends on; with a loss, as the best so far."""
        self._settle()
        self._note_time()
        weights, optimizer, state = snapshot(self)
        self.run.save(self.progress.step, weights, None if weights_only else optimizer, state, best_loss=best_loss)
        self._tell("save", best=best_loss is not None)

    def _note_time(self) -> None:
        if self._begun is not None:
            self.progress.seconds = time.monotonic() - self._begun

    def _tell(self, kind: str, **facts: Any) -> None:
        self._note_time()
        progress = self.progress
        record = {"kind": kind, "step": progress.step, "seconds": round(progress.seconds, 3), **facts}
        for listener in self.listeners:
            listener(record)


class _Since:
    """What happened since the last record of steps: the mean loss, and how fast it went."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.tokens = 0
        self.seconds = 0.0  # in steps alone: evaluations and saves do not make a run look slow

    def add(self, loss: float, tokens: int) -> None:
        self.losses.append(loss)
        self.tokens += tokens

    def record(self) -> dict[str, float]:
        """The means so far, and a new beginning."""
        finite = [loss for loss in self.losses if math.isfinite(loss)]  # of a step that was not made it may be NaN
        mean = sum(finite) / len(finite) if finite else math.nan
        rate = self.tokens / max(self.seconds, 1e-9)
        self.__init__()  # type: ignore[misc]
        return {"loss": mean, "tokens_per_second": round(rate, 1)}


def _optimizer_for(model: Transformer, config: TrainConfig) -> AdamW:
    groups = decay_groups(model.named_parameters(), config.weight_decay)
    return AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, impl=model.config.impl)
