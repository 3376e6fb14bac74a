"""Draft budgets that follow measured acceptance and cost."""
