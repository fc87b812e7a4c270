"""The only modules that import private names of torch.

Everything here was checked on torch 2.11, 2.13 and 2.15; where the versions differ, a comment says how.
"""
