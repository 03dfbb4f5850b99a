"""What forward keeps for backward, made smaller, forgotten and made again, or moved."""
