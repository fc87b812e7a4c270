"""`python -m fsdp_compile.cli`, for launchers of modules: `torchrun ... -m fsdp_compile.cli train`."""

import sys

from fsdp_compile.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
