"""Graph rewrites, one per file: each a pure plan and a mechanical edit."""
