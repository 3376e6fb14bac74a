"""Forward passes of drafters: draft models and trained heads beside a target, with caches of their own."""
