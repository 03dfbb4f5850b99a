"""How data comes to the device and results come back, and the memory each holds on the host."""
