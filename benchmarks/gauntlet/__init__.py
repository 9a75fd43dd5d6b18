"""Pathologies of training, each run by several loops on the CPU with a tiny model: what each loop did.

`scenarios` lists them, `plants` and `samples` put them into model and data, `loops` has the loops, `runner` runs one
loop on one scenario in a process of its own, `ours` reads what `harness train` recorded, `report` makes table and
picture. docs/studies/gauntlet.md is the page.
"""
