"""`lightning.Trainer` with automatic optimization, a validation in each epoch and its own samplers.

All that swift_agent needs is in a strategy: the loaders for training, the update, the place in the loops, the sections.
"validation": its metric is reduced over ranks, the best checkpoint and the end are chosen by it, and it is in the
validation and at its end that the tests kill.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import hooks
import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import swift_agent as swift

EPOCHS, SAMPLES, BATCH = 3, 40, 4
VALIDATES = "validation" in sys.argv

hooks.begin()
job = swift.init()


# Of a `ModelCheckpoint`, besides its state.
SAVED = ("dirpath", "_last_global_step_saved", "_last_checkpoint_saved")


class Kept:
    """What Trainer counts and decides by, tracked: a replacement goes on with it, and a section that is cut begins
    again with it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def _progress(self) -> dict[str, _BaseProgress]:
        epoch = self.trainer.fit_loop.epoch_loop
        loops = [self.trainer.fit_loop, epoch, epoch.automatic_optimization, epoch.val_loop]
        return {
            f"{type(loop).__name__}.{name}": one
            for loop in loops for name, one in vars(loop).items() if isinstance(one, _BaseProgress)
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        trainer, callbacks = self.trainer, {}
        for callback in trainer.callbacks:
            saved = {name: getattr(callback, name) for name in SAVED if hasattr(callback, name)}
            callbacks[callback.state_key] = {"state": callback.state_dict(), "saved": saved}
        return {
            "progress": {name: one.state_dict() for name, one in self._progress().items()},
            "batches": trainer.fit_loop.epoch_loop._batches_that_stepped,
            "callbacks": callbacks,
            "metrics": dict(trainer._logger_connector._callback_metrics),
            "stops": trainer.should_stop,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self.trainer
        for name, one in self._progress().items():
            one.load_state_dict(state["progress"][name])
        trainer.fit_loop.epoch_loop._batches_that_stepped = state["batches"]
        for callback in trainer.callbacks:
            kept = state["callbacks"][callback.state_key]
            vars(callback).update(kept["saved"])
            callback.load_state_dict(kept["state"])
        trainer._logger_connector._callback_metrics.update(state["metrics"])
        trainer.should_stop = state["stops"]


class Recovered(DDPStrategy):
    """DDP whose updates are iterations of the job."""

    has_begun = False

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        # In the set-up each rank has it already: directories, for one.
        return super().broadcast(obj, src) if self.has_begun else obj

    def process_dataloader(self, dataloader: Any) -> Any:
        return job.loader(dataloader) if self.lightning_module.trainer.training else dataloader

    @job.iteration
    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        number = job.iteration_number
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if not VALIDATES:
            hooks.moment("after", number)
        return result

    def on_train_start(self) -> None:
        trainer = self.lightning_module.trainer
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        job.track(model=self.model, optimizer=self.optimizers, scheduler=schedulers, kept=Kept(trainer))
        at = job.position
        self.has_begun = True
        # A broadcast before each batch, by which all stop on SIGTERM; here the agent ends them.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        # In it callbacks save and stop by metrics of all ranks.
        trainer.fit_loop.on_advance_end = job.resilient(trainer.fit_loop.on_advance_end)
        validation = trainer.fit_loop.epoch_loop.val_loop
        validate = validation.run

        @job.resilient
        def run() -> Any:
            try:
                return validate()
            except BaseException:  # it is run again, if a peer was lost in it
                validation._module_mode.restore(self.lightning_module)
                trainer._logger_connector.reset_results()
                raise

        validation.run = run
        if at.iteration == 0:
            return
        # A replacement, or the newest checkpoint of the job: what Trainer counts is set to where the others are.
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        steps = epoch.automatic_optimization.optim_progress.optimizer.step
        counted = [(fit.epoch_progress, at.passes), (epoch.batch_progress, at.batch)]
        for progress, number in counted:
            for counter in (progress.total, progress.current):
                counter.ready = counter.started = counter.processed = counter.completed = number
        for counter in (steps.total, steps.current):
            counter.ready = counter.completed = at.iteration
        epoch.restarting = True
        epoch.update_restart_stage()
        for _ in range(at.passes):
            list(trainer.train_dataloader)  # over already, and empty


class Watched(lightning.Callback):
    """What the tests need: moments between two iterations."""

    def on_train_batch_start(self, *_: Any) -> None:
        if not VALIDATES:
            hooks.moment("before", job.iteration_number)

    def on_validation_batch_start(self, *_: Any) -> None:
        if VALIDATES:
            hooks.moment("before", job.iteration_number)

    def on_validation_end(self, *_: Any) -> None:
        if VALIDATES:
            hooks.moment("after", job.iteration_number)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        number = job.iteration_number
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        hooks.moment("inside", number)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), sync_dist=VALIDATES)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"},
        ]


def main() -> None:
    warnings.filterwarnings("ignore", module="lightning")
    lightning.seed_everything(0)
    points = torch.randn(SAMPLES, 8)
    data = TensorDataset(points, (points.sum(1) > 0).long() + (points[:, 0] > 1).long())
    module, decide = Classifier(), list[Any]()
    if VALIDATES:
        decide.append(ModelCheckpoint(hooks.DIR / "kept", monitor="accuracy", mode="max", save_top_k=2, save_last=True))
        decide.append(EarlyStopping("accuracy", mode="max", patience=5))
    trainer = lightning.Trainer(
        accelerator="cpu", strategy=Recovered(), devices=1, num_nodes=job.world_size, max_epochs=EPOCHS, logger=False,
        enable_checkpointing=VALIDATES, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
        callbacks=[Watched(), *decide],
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, BATCH, shuffle=True), DataLoader(data, BATCH))
    decided = [(decide[0].best_model_score, decide[1].wait_count, decide[1].best_score)] if VALIDATES else []
    hooks.finish(job, module, trainer.optimizers[0], trainer.global_step, trainer.current_epoch, *decided)


if __name__ == "__main__":
    main()
