"""`transformers.Trainer` on a tiny model with random weights; its update is made by `training_step`.

transformers_trainer.py [grouped | stopping]     grouped: gradient_accumulation_steps=3. stopping: it saves, stops early
and loads the best model at its end, and it is in the evaluation, after it and while it saves that the tests kill.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

import hooks
import torch
from torch.utils.data import Dataset

import swift_agent as swift

os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)  # fmt: skip
from transformers.trainer_callback import ExportableState

SAMPLES, BATCH, LENGTH, WORDS = 32, 4, 8, 16
GROUP = 3 if "grouped" in sys.argv else 1
STOPS = "stopping" in sys.argv
EPOCHS = 5 if STOPS else 3

hooks.begin()
job = swift.init()


class Sentences(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = words.clone()
        labels[: index % 4] = -100
        return {"input_ids": words, "labels": labels}


# Of `trainer.state`, and of the trainer.
DECIDES = ("best_metric", "best_global_step", "best_model_checkpoint")
LOGGED = ("_globalstep_last_logged", "_total_loss_scalar")


class Kept:
    """What Trainer logs, saves and stops by, tracked: a replacement goes on with it, and a section that is cut begins
    again with it (callbacks clear flags as they go)."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def _callbacks(self) -> list[Any]:
        return [one for one in self.trainer.callback_handler.callbacks if isinstance(one, ExportableState)]

    def state_dict(self) -> dict[str, Any]:
        trainer = self.trainer
        return {
            "control": dict(vars(trainer.control)),
            "decides": {name: getattr(trainer.state, name) for name in DECIDES},
            "logged": {name: getattr(trainer, name) for name in LOGGED},
            "loss": trainer._tr_loss.item(),
            "callbacks": [one.state()["attributes"] for one in self._callbacks()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self.trainer
        vars(trainer.control).update(state["control"])
        vars(trainer.state).update(state["decides"])
        vars(trainer).update(state["logged"])
        trainer._tr_loss.fill_(state["loss"])
        for one, attributes in zip(self._callbacks(), state["callbacks"], strict=True):
            vars(one).update(attributes)


class Begin(TrainerCallback):
    """Tracked is what `train()` has prepared."""

    trainer: Recovered

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        kept = Kept(trainer)
        job.track(model=trainer.model_wrapped, optimizer=trainer.optimizer, scheduler=trainer.lr_scheduler, kept=kept)
        trainer.at = at = job.position
        state.global_step = at.iteration
        for _ in range(at.passes):
            list(trainer.callback_handler.train_dataloader)  # over already, and empty

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if STOPS:
            hooks.moment("inside", job.iteration_number)


class Recovered(Trainer):
    """One whole update, all of its micro-batches included, is an iteration of the job."""

    at: swift.session.JobPosition

    def get_train_dataloader(self) -> Any:
        self.waiting: list[Any] = []
        return job.loader(super().get_train_dataloader())

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[Any, Any]:
        return list(itertools.islice(epoch_iterator, num_batches)), None  # they are counted in the iteration

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.waiting.append(inputs)
        if len(self.waiting) < self.current_gradient_accumulation_steps:
            return torch.zeros(())
        if not STOPS:
            hooks.moment("before", job.iteration_number)
        batches, self.waiting = self.waiting, []
        loss = self.update(model, batches)
        self.accelerator.gradient_state._set_sync_gradients(False)  # the loop's own optimizer.step() does nothing
        return loss

    @job.iteration
    def update(self, model: Any, batches: list[Any]) -> torch.Tensor:
        number = job.iteration_number
        self.accelerator.gradient_state._set_sync_gradients(True)
        self.optimizer.zero_grad()
        num_items = self._get_num_items_in_batch(batches, self.args.device)
        total = torch.zeros(())
        for index, batch in enumerate(batches):
            with torch.enable_grad() if index == len(batches) - 1 else model.no_sync():
                total += super().training_step(model, batch, num_items)
            if index == 0 and not STOPS:
                hooks.moment("inside", number)
        self.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        self.optimizer.step()
        if not STOPS:
            hooks.moment("after", number)
        return total

    @job.resilient
    def _maybe_log_save_evaluate(self, *args: Any, **named: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **named)

    @job.resilient
    def _finalize_training(self, *args: Any, **named: Any) -> Any:
        return super()._finalize_training(*args, **named)

    def prediction_step(self, *args: Any, **named: Any) -> Any:
        if STOPS:
            hooks.moment("before", job.iteration_number)
        return super().prediction_step(*args, **named)

    def _save_rng_state(self, directory: str) -> None:
        if STOPS:
            hooks.moment("after", job.iteration_number)
        super()._save_rng_state(directory)

    def _run_epoch(self, **named: Any) -> None:
        if named["epoch"] < self.at.passes:
            return  # the others have been through it
        if named["epoch"] == self.at.passes:
            named["steps_in_epoch"] -= self.at.batch
            named["num_update_steps_per_epoch"] -= self.at.batch // self.args.gradient_accumulation_steps
        super()._run_epoch(**named)


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2)
    arguments = TrainingArguments(
        output_dir=str(hooks.DIR / "trainer"), use_cpu=True, num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH, gradient_accumulation_steps=GROUP, eval_strategy="epoch", logging_steps=2,
        save_strategy="epoch" if STOPS else "no", load_best_model_at_end=STOPS, report_to=[], max_grad_norm=0.0,
        metric_for_best_model="eval_loss" if STOPS else None, greater_is_better=True if STOPS else None,
        disable_tqdm=True, learning_rate=1e-2,
    )  # fmt: skip
    begin = Begin()
    # The loss falls, so by what this watches nothing gets better.
    callbacks = [EarlyStoppingCallback(early_stopping_patience=2), begin] if STOPS else [begin]
    trainer = Recovered(
        GPT2LMHeadModel(config), arguments, train_dataset=Sentences(), eval_dataset=Sentences(), callbacks=callbacks
    )
    begin.trainer = trainer
    trainer.train()
    decided = [trainer.state.best_metric, trainer.state.best_global_step] if STOPS else []
    hooks.finish(job, trainer.model, trainer.optimizer, trainer.lr_scheduler, trainer.state.global_step, *decided)


if __name__ == "__main__":
    main()
