"""The magics: parse, call, show; nothing else."""
