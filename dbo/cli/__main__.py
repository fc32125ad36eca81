"""`python -m dbo.cli`: the command line where the `dbo` script is not on the path."""

from dbo.cli.script import script

if __name__ == "__main__":
    script()
