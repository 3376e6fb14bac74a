"""Token trees: shapes, static layouts, and expansion level by level."""
