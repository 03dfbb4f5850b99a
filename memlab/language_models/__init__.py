"""Language models of the Hugging Face hub by name: the steps that train and serve them, for predictions.

`memlab.predict(TrainingStep("hf:ORG/NAME", lora=16, nf4=True, batch=2, tokens=4096), "RTX 4090")`. Of the hub only the
configuration is read. The model is that of transformers, without weights; training is its Trainer, LoRA that of peft, NF4 that of
bitsandbytes, serving its `generate`.
"""

from memlab.language_models.steps import Generation, TrainingStep

__all__ = ["Generation", "TrainingStep"]
