"""The figures of README, ARCHITECTURE and the documentation, drawn by `python -m docs.figures.draw` (`make figures`).

Each module of `diagrams` and `plots` draws one figure: `diagrams/token_tree.py` draws `docs/figures/token-tree.svg`.
A module has `TITLE`, `DESCRIPTION` and `draw()`. It reads the code, a result file of `benchmarks/results/` or a
record of `docs/figures/data/`; a module with `record()` writes its record. Tests: tests/docs/test_figures.py.
"""
