"""Predict a CUDA run without a GPU: the dry run, its child process, the GPUs, library workspaces, the forecast."""
