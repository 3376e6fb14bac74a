"""Token trees: topologies, static layouts, dynamic trees, and expansion level by level."""
