"""`python -m dbo.cli`: the command line where the `dbo` script is not on the path."""

import sys

from dbo.cli.frame import main

if __name__ == "__main__":
    sys.exit(main())
