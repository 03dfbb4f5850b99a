"""Who holds a tensor: the objects that are alive, the paths to them, and releasing of them."""
