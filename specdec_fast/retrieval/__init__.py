"""Indices that drafters search: suffix structures, texts of finished requests, and datastores. No models."""
