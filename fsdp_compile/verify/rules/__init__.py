"""The rules, by theme; `verify/table.py` lists them."""
