"""Bridges to other libraries. Each is imported only where it is used."""
