"""`memlab predict hf:ORG/NAME`: what a language model would take on a GPU, by its name."""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memlab.cli.parser import UNKNOWN, Parser, given, status_of
from memlab.language_models.configuration import is_model

if TYPE_CHECKING:
    from memlab.api.language_model import Step

REFERENCE = "H200"
"""Without a card the model is predicted for this one, whose memory is the largest of those with common kernels."""
DESCRIPTION = """Predict what a language model would take on a GPU: two training steps of transformers' Trainer, or its generate.
MODEL is hf:ORG/NAME, or a folder with a config.json. Of the hub only the configuration is read, no weights. Options stand before
or after MODEL. Several numbers of --batch, --seq or --context give a table. Exit status: 0 fits, 1 does not fit, 2 wrong usage,
3 too close to call or unknown."""
EXAMPLES = """  memlab predict hf:Qwen/Qwen2.5-7B --lora 16 --nf4 --batch 2 --seq 4096 --gradient-checkpointing --card "RTX 4090"
  memlab predict hf:Qwen/Qwen2.5-7B --serve --context 32k --batch 4 --card "A100 80GB"
  memlab predict hf:Qwen/Qwen2.5-7B --serve --context 8k,32k,128k --batch 1,4 --card H200
  memlab predict ./my-model --optimizer adafactor      (full fine-tuning; MODEL is a folder)"""


def asks_for_model(arguments: Sequence[str]) -> bool:
    """Whether the arguments of `memlab predict` name a model and not a script: what stands before it are options."""
    at = next((place for place, word in enumerate(arguments) if is_model(word)), None)
    if at is None:
        return False
    try:
        before, others = _parser(quiet=True).parse_known_args(list(arguments[:at]))
    except (argparse.ArgumentError, ValueError):
        return False
    return before.model is None and not others


def main(arguments: Sequence[str]) -> int:
    """Predict the model that the arguments name; whether it fits as exit status."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    if asked.model is None:
        parser.error("which model? Name one, hf:ORG/NAME, or a folder with a config.json")
    with parser.refusing():
        from memlab.prediction.cards import find
        from memlab.prediction.torch_versions import checked_version

        card, version = find(asked.card or REFERENCE), checked_version(asked.torch)
        steps = _steps(asked)
    with parser.refusing(UNKNOWN):
        from memlab.api.language_model import predict_model, predict_models

        if len(steps) > 1:
            table = predict_models(steps, card, asked.limit, version)
            print(json.dumps([row.facts for row in table.rows]) if asked.json else table.text)
            return status_of(row.prediction.fits for row in table.rows)
        found = predict_model(steps[0], card, limit_s=asked.limit, torch_version=version)
        print(json.dumps(found.facts) if asked.json else found.text)
        return status_of([found.prediction.fits])


def _parser(quiet: bool = False) -> Parser:
    parser = Parser("predict", "MODEL [OPTIONS]", DESCRIPTION, EXAMPLES)
    parser.exit_on_error = not quiet
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="hf:ORG/NAME, or a folder with a config.json")
    add("--card", metavar="NAME|SIZE", type=given, help=f'"RTX 4090", 24GiB (default: {REFERENCE})')
    add("--batch", metavar="N", type=numbers, default=(1,), help="sequences; several, 1,2,4, give a table (default: 1)")
    add("--nf4", action="store_true", help="weights in 4 bits, by bitsandbytes with double quantization")
    add("--dtype", default="bfloat16", help="of the weights: bfloat16 (default), float16 or float32")
    add("--attn", metavar="NAME", default="sdpa", help="sdpa (default) or eager")
    caches = "dynamic (default), static, offloaded, offloaded_static or quantized"
    train = parser.add_argument_group("training").add_argument
    train("--seq", metavar="N", type=numbers, default=(2048,), help="tokens of a sequence (default: 2048)")
    train("--lora", metavar="RANK", type=int, help="train adapters (default: full fine-tuning)")
    train("--optimizer", metavar="NAME", default="adamw_torch_fused", help="`optim` of the Trainer (default: its own)")
    train("--gradient-checkpointing", action="store_true", help="recompute activations in backward")
    serve = parser.add_argument_group("inference").add_argument
    serve("--serve", action="store_true", help="predict generate: prefill, then decode")
    serve("--context", metavar="N", type=numbers, default=(4096,), help="tokens; 32k is 32768 (default: 4096)")
    serve("--new-tokens", metavar="N", type=int, default=8, help="so many of them are generated (default: 8)")
    serve("--cache", metavar="NAME", default="dynamic", help=caches)
    add("--trust-remote-code", action="store_true", help="run Python code that the model brings")
    parser.add_prediction()
    add("--json", action="store_true", help="one line of JSON, sizes in bytes")
    return parser


def numbers(text: str) -> tuple[int, ...]:
    """The type of an argument with one or several whole numbers: "4", "1,2,4", "32k"."""
    found = [re.fullmatch(r"([1-9]\d{0,8})([kK]?)", word.strip()) for word in text.split(",")]
    if not all(found):
        wanted = "a whole number of 1 or more such as 4 or 32k, or several, 1,2,4"
        raise argparse.ArgumentTypeError(f"{wanted}, got {text!r:.80}")
    return tuple(sorted({int(one[1]) * (1024 if one[2] else 1) for one in found if one is not None}))


def _steps(asked: Any) -> list[Step]:
    """What was asked for, the smallest first; the configuration is read once."""
    from memlab.language_models import Generation, TrainingStep

    known = {"nf4": asked.nf4, "dtype": asked.dtype, "attention": asked.attn}
    make: Any
    if asked.serve:
        make, name, lengths = Generation, "context", asked.context
        known |= {"cache": asked.cache, "new_tokens": asked.new_tokens}
    else:
        make, name, lengths = TrainingStep, "tokens", asked.seq
        known |= {"lora": asked.lora, "optimizer": asked.optimizer}
        known |= {"gradient_checkpointing": asked.gradient_checkpointing}
    make = functools.partial(make, trust_remote_code=asked.trust_remote_code, **known)
    first = make(asked.model, batch=asked.batch[0], **{name: lengths[0]})
    return [make(first.model, batch=batch, **{name: length}) for length in lengths for batch in asked.batch]
