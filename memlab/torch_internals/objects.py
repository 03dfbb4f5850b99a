"""Private attributes of PyTorch's objects: operators, storages, modules, and what sharding and pipelines wrap.

Each is in the table of private names, under the class that has it.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

schema_of = attrgetter("_schema")
"""The schema of an operator (torch._ops.OpOverload)."""
function_of = attrgetter("_op")
"""The C++ function of an operator: to call it saves a Python frame."""
storage_id = attrgetter("_cdata")
"""The address of a storage in C++, which identifies it while it is alive."""
own_parameters = attrgetter("_parameters")
"""The parameters of a module without those of its submodules, as the module has them (None included)."""
forward_hooks = attrgetter("_forward_hooks")
"""The forward hooks of a module."""
local_part = attrgetter("_local_tensor")
"""The tensor of this rank in a DTensor."""
fsdp_module = attrgetter("_module_info.module")
"""The module that a parameter of FSDP2 belongs to."""
fsdp_name = attrgetter("_module_info.param_name")
"""Its name in that module."""
fsdp_shard = attrgetter("_sharded_param_data")
"""The padded shard of a parameter of FSDP2."""
given_shapes = attrgetter("_user_meta")
"""The shapes that a stage of a pipeline was given."""
output_shapes = attrgetter("_stage_meta.outputs")
"""The shapes of the outputs of a stage."""
destroy = attrgetter("_destroy")
"""The method of a torch.library.Library that takes its rules away again."""


def schema_if_any(func: Any) -> Any:
    """The schema of an operator; None of what takes functions, which has none."""
    return getattr(func, "_schema", None)


def function_or_itself(func: Any) -> Any:
    """The C++ function of an operator; of what has none, itself."""
    return getattr(func, "_op", func)


def local_part_or(tensor: Any, other: Any = None) -> Any:
    """The tensor of this rank in a DTensor; `other` for what is no DTensor."""
    return getattr(tensor, "_local_tensor", other)


def written_model(model: Any) -> Any:
    """The model that torch.compile wraps; any other itself."""
    return dict(model.__dict__.get("_modules", {})).get("_orig_mod", model)
