"""Until tests name it otherwise: the backend."""

from fsdp_compile.backend import fsdp as fsdp
from fsdp_compile.fsdp2.flat_inputs import flat_inputs as flat_inputs
