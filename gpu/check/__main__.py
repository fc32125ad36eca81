"""`python -m gpu.check` (needs torch)."""

import os
import sys

from gpu.check.command import leave_torchrun, main

if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        leave_torchrun(main())
    sys.exit(main())
