"""A script with Lightning's Trainer, as a user writes it: `train_lightning.py OUT [CULPRIT] [plain]`.

CULPRIT is "none", "kept" (the list `kept_outputs` grows by 64 MiB a step) or "widen" (the output of the module `widen` has
3 GiB). `plain` leaves out memlab's callback, `predict` lets it predict.
"""

import importlib.util
import sys

import torch

if (
    importlib.util.find_spec("torchvision") is not None
):  # torchmetrics imports it, also one that was built for another torch
    from third_party import vision

    vision.load()

import lightning


class Module(lightning.LightningModule):
    def __init__(self, width, keeps):
        super().__init__()
        self.lookup = torch.nn.Embedding(8192, 64)
        self.head = torch.nn.Linear(64, 2048)
        self.widen = torch.nn.Linear(64, width)
        self.keeps = keeps
        self.kept_outputs = []

    def training_step(self, batch, index):
        features = self.lookup(batch[0])
        output = self.head(features)
        if self.keeps:
            self.kept_outputs.append(output)
        loss = output.square().mean() + self.widen(features).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def main(out, culprit="none", how=""):
    module = Module(width=100_000 if culprit == "widen" else 16, keeps=culprit == "kept")
    data = torch.utils.data.TensorDataset(torch.randint(0, 8192, (64, 1024)))
    callbacks = []
    if how != "plain":
        from memlab.integrations.lightning import MemoryCallback

        callbacks.append(MemoryCallback(out=out, name="train", predict="RTX 4060" if how == "predict" else None))
    trainer = lightning.Trainer(
        max_steps=1000 if culprit == "kept" else 4, devices=1, default_root_dir=out, callbacks=callbacks, log_every_n_steps=2,
        accelerator="gpu" if torch.cuda.is_available() else "cpu", logger=lightning.pytorch.loggers.CSVLogger(out),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=1000,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
    print("trained", trainer.global_step)
    if how == "predict":
        print("bytes", callbacks[0].prediction.peak_bytes, callbacks[0].run.peak_bytes)


if __name__ == "__main__":
    main(*sys.argv[1:])
