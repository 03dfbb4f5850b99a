"""What memlab costs, measured beside others; each file is one command."""
