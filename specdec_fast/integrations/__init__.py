"""Bridges to other libraries; each is imported only by whoever uses it."""
