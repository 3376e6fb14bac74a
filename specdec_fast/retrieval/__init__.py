"""Stores: what drafters look tokens up in. Suffix structures, texts of finished requests, datastores. No models."""
