"""The rules, by theme; `verify/check.py` lists them."""
