"""Trains a compiled model beside a reference on real processes and says how far apart they are."""
