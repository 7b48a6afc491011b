"""A library's trainer, with nothing but `swift_agent.init()` in front of it.

unnamed_trainer.py lightning | transformers
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import hooks
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import swift_agent as swift

hooks.begin()
job = swift.init()


class Points(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        point = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": point, "labels": (point.sum() > 0).long()}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 2)
        self.step = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = F.cross_entropy(self.linear(x), labels)
        hooks.moment("before", self.step)
        self.step += 1
        return {"loss": loss}


def by_lightning(net: Net) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    warnings.filterwarnings("ignore", module="lightning")
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=1, num_nodes=job.world_size, max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(Points(), 4))


def by_transformers(net: Net) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(hooks.DIR / "trainer"), use_cpu=True, num_train_epochs=2, per_device_train_batch_size=4,
        save_strategy="no", report_to=[], disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    Trainer(net, arguments, train_dataset=Points()).train()


def main() -> None:
    torch.manual_seed(0)
    net = Net()
    (by_lightning if "lightning" in sys.argv else by_transformers)(net)
    hooks.finish(job, net)


if __name__ == "__main__":
    main()
