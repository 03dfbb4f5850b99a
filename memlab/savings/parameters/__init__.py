"""What is stored and trained: frozen, shared, adapted, unused, loaded."""
