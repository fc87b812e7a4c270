"""Names under which a sharded module keeps what its reads need."""

from __future__ import annotations

READS = "_fsdp_reads"
"""Attribute of a sharded module: parameter name to (flat shard's leaf, text of its `ReadSpec`, flat shard)."""
EVAL_READS = "_fsdp_eval_reads"
"""Attribute of a sharded module: parameter name to the text of the read that eval mode makes, where it is another."""
VARIANTS = "_fsdp_variants"
"""Attribute of a sharded module: parameter name to what its reads take besides (`variants.py`); absent by default."""
