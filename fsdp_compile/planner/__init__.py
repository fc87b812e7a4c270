"""When collectives start and when they are waited for: a plan over numbers alone, without graphs or tensors."""
