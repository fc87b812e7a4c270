"""Programs with frameworks, started by torchrun: as users write them, with one argument for DDP or this package."""
