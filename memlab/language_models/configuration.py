"""The configuration of a language model, from the Hugging Face hub or from a folder. It comes from strangers: no code of it runs.

huggingface_hub reads it, so its environment variables hold (HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE, HF_TOKEN). No weights are read.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memlab.errors import MemlabError
from memlab.units import one_line

HUB = "hf:"
"""What the name of a model on the hub begins with."""
FILE = "config.json"
_MOST_BYTES = 1 << 20
_MOST_MODULES = 10_000
"""Layers, blocks or experts: each is a Python object, so a larger number would fill the host's memory."""
_OF_MODULES = ("layer", "block", "expert", "depth")
"""What is in the names of such numbers: num_hidden_layers, n_layer, num_local_experts."""
_A_FOLDER = f"give a folder that has its {FILE}: memlab predict ./FOLDER"


def is_model(word: str) -> bool:
    """Whether a word of a command names a model: on the hub, or as a folder that is no program."""
    if word.startswith(HUB):
        return True
    folder = Path(word)
    return Path(folder, FILE).is_file() and not Path(folder, "__main__.py").exists()


def required(*packages: str) -> list[Any]:
    """These packages, imported; one error that says how to install what is missing."""
    wanted = dict.fromkeys(packages)
    missing = [package for package in wanted if importlib.util.find_spec(package) is None]
    if missing:
        raise MemlabError(f"models by name need {', '.join(missing)}: pip install {' '.join(wanted)}")
    found = []
    for package in wanted:
        try:
            found.append(importlib.import_module(package))
        except Exception as error:  # one that uses a library built for another torch raises whatever that raises
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            why = f"{type(cause).__name__}: {one_line(str(cause), 200)}"
            raise MemlabError(
                f"models by name need {package}, whose import fails here ({why}): install it anew."
            ) from None
    return found


def configuration(model: str, trust_remote_code: bool = False) -> Any:
    """The configuration, as transformers reads it; MemlabError if there is none, or if it cannot be predicted.

    `model` is "hf:ORG/NAME", or a folder with a config.json. With `trust_remote_code` the code that the configuration names is
    downloaded and run, in this process too.
    """
    (transformers,) = required("transformers")
    name = model.removeprefix(HUB)
    path = _of_hub(name) if model.startswith(HUB) else Path(model, FILE)
    _check(_facts(path, model), model)
    # From the file that was checked, not once more from the hub; code that it names is looked for beside its name.
    source = name if trust_remote_code else str(path.parent)
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        config.name_or_path = name
        if trust_remote_code:  # now, as the child process of a prediction has no network
            import torch

            with torch.device("meta"):
                transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    except Exception as error:  # whatever transformers, or trusted code, makes of it
        if isinstance(error, ValueError) and "custom code" in str(error):
            how = "read it first, then pass --trust-remote-code (trust_remote_code=True)"
            raise MemlabError(
                f"{model} is defined by Python code of its own, which does not run here: {how}."
            ) from None
        which, why = f"transformers {transformers.__version__}", error
        while why.__cause__ is not None:  # of an import that failed, the text alone says little
            why = why.__cause__  # type: ignore[assignment]
        raise MemlabError(f"{which} cannot read the configuration of {model}: {one_line(str(why), 300)}") from None
    causal = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in causal:
        raise MemlabError(
            f"{model} is no causal language model of transformers: its type is {config.model_type!r:.80}."
        )
    return config


def _of_hub(name: str) -> Path:
    """The file in the cache of the hub, downloaded if needed."""
    (hub,) = required("huggingface_hub")
    errors, level = hub.errors, hub.utils.logging.get_verbosity()
    hub.utils.logging.set_verbosity_error()  # of each attempt it would log a line
    try:
        return Path(hub.hf_hub_download(name, FILE))
    except errors.HFValidationError:
        why = f"{HUB}{name:.80} is no name of a model on the hub: it is {HUB}ORG/NAME, such as {HUB}openai-community/gpt2."
    except errors.GatedRepoError:
        why = f"{name} is gated: ask for access on its page, log in (hf auth login, or HF_TOKEN), or {_A_FOLDER}."
    except errors.RepositoryNotFoundError:
        why = f"the hub has no model {name}, or it is private: check the name, or log in (hf auth login, or HF_TOKEN)."
    except errors.RemoteEntryNotFoundError:
        why = f"{name} has no {FILE}, so it is no model of transformers."
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        why = (
            f"the hub does not answer, or is off, and {FILE} of {name} is not in its cache: go online, or {_A_FOLDER}."
        )
    except Exception as error:  # of the network, of the disk, of a proxy
        why = f"{FILE} of {name} cannot be read from the hub ({one_line(str(error), 200)}): try again, or {_A_FOLDER}."
    finally:
        hub.utils.logging.set_verbosity(level)
    raise MemlabError(one_line(why, 500)) from None


def _facts(path: Path, model: str) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise MemlabError(f"{FILE} of {model} is larger than 1 MiB: it is no configuration.")
        facts = json.loads(path.read_bytes())
    except FileNotFoundError:
        is_name = model.count("/") == 1 and model[0].isalnum() and not Path(model).exists()
        hint = f" A model on the hub is {HUB}{model}." if is_name else ""
        raise MemlabError(f"there is no {FILE} in {model!r:.200}.{hint}") from None
    except OSError as error:
        raise MemlabError(f"{FILE} of {model:.200} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise MemlabError(f"{FILE} of {model:.200} is no JSON: {one_line(str(error), 200)}.") from None
    if not isinstance(facts, dict):
        raise MemlabError(f"{FILE} of {model:.200} is no configuration: it is a JSON {type(facts).__name__}.")
    return facts


def _check(facts: dict[str, Any], model: str) -> None:
    """Refuse what would build without end, and weights whose memory would be predicted wrongly."""
    for key, value in _numbers(facts):
        if value > _MOST_MODULES and any(word in key for word in _OF_MODULES):
            raise MemlabError(
                f"{FILE} of {model} has {key:.80} {value:.6g}, and at most {_MOST_MODULES:,} are predicted."
            )
    stored = facts.get("quantization_config")
    method = stored.get("quant_method") if isinstance(stored, dict) else stored
    if method is not None:
        other = "name the model that was quantized, with --nf4 for weights of 4 bits"
        raise MemlabError(
            f"the weights of {model} are stored quantized ({method!s:.40}), which is not predicted: {other}."
        )


def _numbers(facts: Any) -> Iterator[tuple[str, int | float]]:
    """The numbers of a configuration by name, those of its parts (vision, text) too."""
    parts = [facts]
    while parts:
        part = parts.pop()
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            if isinstance(value, dict | list):
                parts.append(value)
            elif isinstance(value, int | float):
                yield str(key), value
