"""Train with Hugging Face's Accelerate, whose own launcher is adopted:

    holdfast adopt -- accelerate launch --multi_gpu --num_processes 2 --max_restarts 1 train.py

`accelerate launch` calls torchrun, and under `holdfast adopt` holdfast answers in its place. `--multi_gpu` stands for
several processes, here on CPUs. Accelerator.save_state and load_state make the job survive a restart.
"""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


def main():
    checkpoint = Path(tempfile.gettempdir(), "holdfast-accelerate")
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    x = torch.randn(64, 4)
    data = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=8)
    model = nn.Linear(4, 1)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    first = 0
    if (checkpoint / "epoch").exists():
        accelerator.load_state(checkpoint)
        first = int((checkpoint / "epoch").read_text())
    print(f"rank {accelerator.process_index} of {accelerator.num_processes} begins at epoch {first}", flush=True)
    for epoch in range(first, EPOCHS):
        for inputs, targets in data:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        accelerator.save_state(checkpoint)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (checkpoint / "epoch").write_text(str(epoch + 1))
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.6f}", flush=True)
        if epoch == 1 and accelerator.process_index == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise RuntimeError("this worker fails on purpose, once")
    if accelerator.is_main_process:
        shutil.rmtree(checkpoint)  # The next job begins anew.
    accelerator.end_training()
    os._exit(0)  # gloo aborts now and then when the interpreter frees what is left of it.


if __name__ == "__main__":
    main()
