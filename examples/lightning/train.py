"""Train with Lightning. Its Trainer finds in the environment that the workers are there, and starts none itself.

Lightning writes a checkpoint after each epoch; `ckpt_path="last"` begins with the newest one, or from the start.
"""

import os
import tempfile

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_epoch_start(self):
        print(f"rank {self.global_rank} of {self.trainer.world_size}: epoch {self.current_epoch}", flush=True)
        is_first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if self.current_epoch == 2 and self.global_rank == 1 and is_first_life:
            raise RuntimeError("this worker fails on purpose, once")


def main():
    directory = f"{tempfile.gettempdir()}/holdfast-lightning-{os.environ['TORCHELASTIC_RUN_ID']}"
    lightning.seed_everything(1, verbose=False)
    x = torch.randn(64, 4)
    data = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=8)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=4,
        default_root_dir=directory,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(directory, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), data, ckpt_path="last")
    print(f"rank {trainer.global_rank} ends after {trainer.global_step} steps", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
