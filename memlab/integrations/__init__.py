"""memlab inside other tools: trainers and pytest. Each is imported by its user only."""
