"""Train a tiny language model with Hugging Face's Trainer. Model and data are made here, nothing is downloaded.

The Trainer finds ranks and addresses in the environment. It saves every other step, and begins with the newest
checkpoint of its directory if there is one.
"""

import os
import tempfile
from pathlib import Path

import torch
import transformers

STEPS = 8


class FailOnce(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5 and args.process_index == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise RuntimeError("this worker fails on purpose, once")


def main():
    directory = Path(tempfile.gettempdir(), f"holdfast-transformers-{os.environ['TORCHELASTIC_RUN_ID']}")
    torch.manual_seed(1)
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    texts = [torch.arange(start, start + 8) % 16 for start in range(32)]
    arguments = transformers.TrainingArguments(
        str(directory),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": text, "labels": text} for text in texts]
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[FailOnce()])
    has_checkpoint = any(directory.glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=has_checkpoint)
    begun = "continued" if has_checkpoint else "begun anew"
    place = f"rank {arguments.process_index} of {arguments.world_size}"
    print(f"{place}: {begun}, {trainer.state.global_step} steps done", flush=True)
    os._exit(0)  # gloo aborts now and then when the interpreter frees what is left of it.


if __name__ == "__main__":
    main()
