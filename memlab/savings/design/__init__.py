"""Layers and shapes chosen for their memory."""
