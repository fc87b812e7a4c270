"""Policies that users choose."""
