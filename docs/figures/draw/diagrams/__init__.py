"""One module per diagram: trees, steps, caches, packages."""
