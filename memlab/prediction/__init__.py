"""What a CUDA run would take on a card, without one: fake CUDA, the child process it runs in, the cards, the workspaces."""
