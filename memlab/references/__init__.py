"""Who holds a tensor: live objects, the paths that reference them, and releasing them."""
