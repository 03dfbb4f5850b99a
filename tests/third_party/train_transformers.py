"""A script with the Trainer of transformers, as a user writes it: `train_transformers.py OUT [CULPRIT] [HOW [BATCHES]]`.

CULPRIT is "none", "kept" (the list `kept_logits` grows by 64 MiB a step) or "widen" (the output of the module `widen` has
3 GiB). HOW: `plain` leaves out memlab's callback, `predict` lets it predict. BATCHES make an optimizer step.
"""

import importlib.util
import sys

import torch

if (
    importlib.util.find_spec("torchvision") is not None
):  # transformers imports it, also one that was built for another torch
    from third_party import vision

    vision.load()

import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

VOCABULARY = 8192
WIDE = 400_000


class Model(GPT2LMHeadModel):
    def __init__(self, config, width):
        super().__init__(config)
        self.widen = torch.nn.Linear(64, width)

    def forward(self, input_ids, labels=None, **more):
        output = super().forward(input_ids=input_ids, labels=labels)
        output.loss = output.loss + self.widen(self.transformer.wte(input_ids)).square().mean()
        return output


class KeepingTrainer(Trainer):
    kept_logits: list[torch.Tensor] = []  # noqa: RUF012

    def compute_loss(self, model, inputs, return_outputs=False, **more):
        outputs = model(**inputs)
        self.kept_logits.append(outputs.logits)
        return outputs.loss


def main(out, culprit="none", how="", accumulated="1"):
    config = GPT2Config(
        n_embd=64, n_layer=2, n_head=2, vocab_size=VOCABULARY, n_positions=256, bos_token_id=0, eos_token_id=0
    )
    model = Model(config, width=WIDE if culprit == "widen" else 16)
    data = [{"input_ids": (ids := torch.randint(0, VOCABULARY, (256,))), "labels": ids} for _ in range(64)]
    arguments = TrainingArguments(
        out, max_steps=1000 if culprit == "kept" else 4, per_device_train_batch_size=8, report_to=[], logging_steps=2,
        save_strategy="no", disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=int(accumulated),
    )  # fmt: skip
    if how == "predict":  # a simulated GPU has no values, and would take every position for the beginning of a sequence
        positions = torch.arange(256, device="cpu")[None]
        find = transformers.masking_utils.find_packed_sequence_indices
        transformers.masking_utils.find_packed_sequence_indices = lambda _: find(positions)
    callbacks = []
    if how != "plain":
        from memlab.integrations.transformers import MemoryCallback

        callbacks.append(MemoryCallback(out=out, name="train", predict="RTX 4060" if how == "predict" else None))
    kind = KeepingTrainer if culprit == "kept" else Trainer
    trainer = kind(model, arguments, train_dataset=data, callbacks=callbacks)
    trainer.train()
    print("trained", trainer.state.global_step)
    if how == "predict":
        print("bytes", callbacks[0].prediction.peak_bytes, callbacks[0].run.peak_bytes)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main(*sys.argv[1:])
