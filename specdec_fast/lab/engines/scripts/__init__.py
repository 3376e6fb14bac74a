"""Programs that run in the interpreter of an engine under test, and import nothing of this project."""
